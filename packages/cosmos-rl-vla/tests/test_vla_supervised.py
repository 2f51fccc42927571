"""Demonstrations as training sees them, and whole runs of imitation."""

import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cosmos_rl_core import run
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Prompt, Share
from cosmos_rl_vla.actions import ActionStats, Gripper, Spread
from cosmos_rl_vla.build import build_policy
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig
from cosmos_rl_vla.data.recording.writer import Demonstration, DemoWriter
from cosmos_rl_vla.data.rows import load_rows
from cosmos_rl_vla.domain import VLA
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.sims.reach import Reach

MODEL = {"family": "pi05", "action_dim": 2, "state_dim": 2, "horizon": 3, "num_steps": 2}
CAMERA = "observation.images.board"


def play(simulator, task, init):
    """An episode of the expert."""
    simulator.reset(task, init)
    images, states, actions, squares, success = [], [], [], [], False
    while not success:
        seen = simulator.observe()
        images.append(seen.images["board"])
        states.append(seen.state)
        squares.append(simulator.privileged())
        actions.append(simulator.expert_action())
        success = simulator.step(actions[-1]).success
    return Demonstration(
        task=simulator.instruction(task),
        images={"board": np.stack(images)},
        states=np.stack(states),
        actions=np.stack(actions),
        columns={"squares": np.stack(squares)},
    )


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    path = tmp_path_factory.mktemp("reach") / "demos"
    simulator = Reach(image_size=16)
    with DemoWriter(
        path, fps=10, cameras={"board": (16, 16)}, state_dim=2, action_dim=2, columns={"squares": 6}
    ) as writer:
        for init in range(4):
            for task in ("red", "blue"):
                writer.add(play(simulator, task, init))
    return path


def policy_of(data, **keys):
    model = VLAModelConfig.model_validate({**MODEL, **keys})
    return build_policy(model, data=data, sampling=None, seed=0, setup=ModelSetup())


def prompts_of(data, count, first=0):
    rows, origin = load_rows(data)
    return [Prompt(sample_id=first + i, row=rows[i], origin=f"{origin}:{i}") for i in range(count)]


def collated(data, *, count=6, first=0, policy=None, share=None, microbatch_terms=64, **keys):
    return VLA.collate_sft(
        prompts_of(data, count, first),
        data=data,
        policy=policy or policy_of(data, **keys),
        microbatch_terms=microbatch_terms,
        share=share or Share(),
    )


def test_a_sample_is_what_was_seen_and_the_normalised_actions_that_followed(demos):
    data = VLADataConfig(demos=str(demos))
    policy = policy_of(data)
    batch = collated(data, policy=policy, count=12)
    (microbatch,) = batch.microbatches
    inputs = microbatch.inputs
    expected = play(Reach(image_size=16), "red", 0)
    assert (batch.num_terms, batch.num_rollouts, batch.metrics) == (12, 12, {"rows_dropped": 0.0})
    assert microbatch.terms.loss_mask.tolist() == [1.0] * 12
    assert np.array_equal(inputs["images"][2, 0], expected.images["board"][2])
    np.testing.assert_allclose(inputs["state"][2], policy.loaded.stats.normalise_state(expected.states[2]))
    normalised = policy.loaded.stats.normalise(expected.actions)
    horizon = policy.loaded.model.model_horizon
    count = min(horizon, len(expected.actions))
    assert inputs["action_mask"][0].sum() == count
    np.testing.assert_allclose(inputs["actions"][0, :count], normalised[:count], atol=1e-6)
    assert inputs["action_mask"][len(expected.actions) - 1].tolist() == [True] + [False] * (
        policy.loaded.model.model_horizon - 1
    )
    assert not inputs["actions"][~inputs["action_mask"]].any()


def test_the_forward_pass_is_minus_the_loss_with_that_of_the_auxiliary_targets(demos):
    data = VLADataConfig(demos=str(demos), aux_columns=("squares",))
    values = {}
    for coef in (0.0, 1.0, 3.0):
        policy = policy_of(data, aux_dim=6, aux_coef=coef)
        (microbatch,) = collated(data, policy=policy).microbatches
        outputs = policy.forward(microbatch)
        values[coef] = outputs.logprobs.detach()
        parts = outputs.metrics["loss_actions"] + coef * outputs.metrics["loss_aux"]
        torch.testing.assert_close(parts, -outputs.logprobs)
    assert microbatch.inputs["aux"].shape == (6, 6)
    assert (values[0.0] < 0).all() and (values[1.0] < values[0.0]).all()
    torch.testing.assert_close(values[3.0] - values[0.0], 3 * (values[1.0] - values[0.0]))


def test_what_is_drawn_follows_from_the_place_in_the_stream(demos):
    data = VLADataConfig(demos=str(demos))
    policy = policy_of(data)
    first, same, other = (
        policy.forward(collated(data, policy=policy, first=start).microbatches[0]).logprobs for start in (0, 0, 50)
    )
    assert torch.equal(first, same)
    assert (first != other).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_make_as_many_passes_and_train_on_each_row_once(demos, count):
    data = VLADataConfig(demos=str(demos))
    policy = policy_of(data)
    batches = [
        collated(data, count=7, policy=policy, share=Share(index=index, count=count), microbatch_terms=2)
        for index in range(count)
    ]
    assert len({len(batch.microbatches) for batch in batches}) == 1
    assert {batch.num_terms for batch in batches} == {7}
    trained = [
        int(seed)
        for batch in batches
        for each in batch.microbatches
        for seed, mask in zip(each.inputs["seeds"], each.terms.loss_mask)
        if mask
    ]
    assert len(trained) == len(set(trained)) == 7


def test_a_row_without_a_picture_is_named_counted_and_trains_nothing(demos, tmp_path, caplog):
    damaged = tmp_path / "demos"
    damage(demos, damaged, rows=[1])
    data = VLADataConfig(demos=str(damaged))
    with caplog.at_level(logging.WARNING):
        batch = collated(data)
    (microbatch,) = batch.microbatches
    assert microbatch.terms.loss_mask.tolist() == [1, 0, 1, 1, 1, 1]
    assert batch.metrics == {"rows_dropped": 1.0}
    assert f"{CAMERA} of row 1 is not an image" in caplog.text
    assert len(batch.rows_dropped) == 1 and f"{CAMERA} of row 1 is not an image" in batch.rows_dropped[0]


def test_pictures_that_are_mostly_bad_are_an_error(demos, tmp_path):
    damage(demos, tmp_path / "demos", rows=range(20))
    with pytest.raises(UserError, match=r"9 of 12 rows so far have no images: .*row 0 is not an image"):
        collated(VLADataConfig(demos=str(tmp_path / "demos")), count=12)


def damage(whole, path, *, rows):
    for file in whole.rglob("*.*"):
        (path / file.relative_to(whole)).parent.mkdir(parents=True, exist_ok=True)
        (path / file.relative_to(whole)).write_bytes(file.read_bytes())
    (data,) = (path / "data").rglob("*.parquet")
    table = pq.read_table(data)
    pictures, at = table.column(CAMERA).to_pylist(), table.column_names.index(CAMERA)
    for row in rows:
        pictures[row]["bytes"] = b"no picture"
    pq.write_table(table.set_column(at, CAMERA, pa.array(pictures, table.schema.field(CAMERA).type)), data)


def test_demonstrations_that_do_not_fit_the_model_are_refused(demos, tmp_path):
    data = VLADataConfig(demos=str(demos), aux_columns=("squares",))
    with pytest.raises(UserError, match=r"aux_columns \['squares'\] have 6 numbers, the model's aux_dim is 0: set"):
        collated(data)
    with pytest.raises(UserError, match=r"statistics of 2-dimensional actions"):
        policy_of(data, action_dim=3)


def test_targets_execute_the_demonstrated_actions_by_the_convention_of_the_models_gripper(demos, tmp_path):
    ones = np.ones(2, np.float32)
    stats = ActionStats(action=Spread.between(-ones, ones), gripper=Gripper(dim=-1, invert=True))
    stats.save(tmp_path)
    data = VLADataConfig(demos=str(demos))
    (microbatch,) = collated(data, stats=str(tmp_path)).microbatches
    targets, expected = microbatch.inputs["actions"][0, 0].numpy(), play(Reach(image_size=16), "red", 0).actions[0]
    np.testing.assert_allclose(targets, expected * [1, -1], atol=1e-6)
    np.testing.assert_allclose(stats.unnormalise(targets), expected, atol=1e-6)


def test_statistics_of_demonstrations_that_move_less_are_refused(demos, tmp_path):
    ActionStats(action=Spread.of(np.zeros((2, 2)))).save(tmp_path)
    with pytest.raises(UserError, match=r"demos = '.*': dimension 0 of the actions is 0 throughout the model's stat"):
        collated(VLADataConfig(demos=str(demos)), stats=str(tmp_path))


RECIPE = {
    "run": {"domain": "vla", "placement": "inline", "max_steps": 25},
    "model": MODEL,
    "algorithm": {"name": "sft"},
    "policy": {"prompts_per_step": 16, "microbatch_terms": 16, "optimizer": {"name": "adamw", "learning_rate": 2e-3}},
    "logging": {"sinks": ["jsonl"]},
}


def test_imitation_learns_and_what_is_exported_acts_in_the_simulator(demos, tmp_path):
    recipe = {**RECIPE, "data": {"demos": str(demos)}}
    run(recipe, [f"run.output_dir={tmp_path / 'sft'}"])
    losses = [json.loads(line)["loss"] for line in (tmp_path / "sft/metrics.jsonl").read_text().splitlines()]
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5])
    export(tmp_path / "sft", tmp_path / "model")
    with pytest.raises(UserError, match="only models of the public size fit"):
        export(tmp_path / "sft", tmp_path / "other", format="lerobot")
    assert not (tmp_path / "other").exists()
    held = json.loads((tmp_path / "model/action_stats.json").read_text())
    assert set(held) == {"action", "state"}
    acting = {
        "run": {"domain": "vla", "placement": "inline", "max_steps": 1},
        "model": {"path": str(tmp_path / "model")},
        "data": {"simulator": "reach", "tasks": ["red", "blue"], "options": {"image_size": 16}},
        "algorithm": {"name": "ppo"},
        "data_regularization": {"coef": 0.1, "rows_per_step": 4, "data": {"demos": str(demos)}},
        "rollout": {"group_size": 1, "sampling": {"max_steps": 6}, "options": {"processes": 1, "slots": 2}},
        "reward": {"functions": [{"name": "success"}]},
        "policy": {"prompts_per_step": 2, "microbatch_terms": 256},
        "logging": {"sinks": ["jsonl"]},
    }
    run(acting, [f"run.output_dir={tmp_path / 'ppo'}"])
    (step,) = [json.loads(line) for line in (tmp_path / "ppo/metrics.jsonl").read_text().splitlines()]
    assert step["grad_norm"] > 0
    assert step["loss_data_term"] > 0 and step["data_term/rows_dropped"] == 0
    assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_a_run_that_goes_on_trains_as_if_it_had_never_stopped(demos, tmp_path):
    recipe = {**RECIPE, "data": {"demos": str(demos)}, "checkpoint": {"every_steps": 2}}

    def losses(name, steps, **keys):
        run(recipe, [f"run.output_dir={tmp_path / name}", f"run.max_steps={steps}"], **keys)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    losses("halves", 2)
    assert losses("halves", 4, resume="auto")[-2:] == losses("whole", 4)[-2:]


@pytest.mark.ci
@pytest.mark.parametrize("family", ["pi05", "openvla_oft"])
def test_what_adapters_were_trained_on_is_exported_whole(demos, tmp_path, family):
    pytest.importorskip("peft", reason="an extra of the package")

    def trained(name, **model):
        recipe = {**RECIPE, "model": model, "data": {"demos": str(demos)}}
        run(recipe, [f"run.output_dir={tmp_path / name}", "run.max_steps=2"])
        return str(tmp_path / name)

    sizes = {"action_dim": 2, "state_dim": 2, "horizon": 3}
    export(trained("whole", family=family, **sizes), tmp_path / "base")
    source = trained("adapters", path=str(tmp_path / "base"), lora={"rank": 2, "alpha": 6.0})
    export(source, tmp_path / "merged")
    base, merged = (load(VLAModelConfig(path=str(tmp_path / name))).weights() for name in ("base", "merged"))
    assert base.keys() == merged.keys()
    assert any(not torch.equal(base[name], merged[name]) for name in base)
