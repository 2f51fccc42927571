"""The recipes of LIBERO, each as it is shipped but for sizes: the same families, tiny, end to end on a CPU."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmos_rl_core import Request, evaluate, run
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.data.recording.writer import Demonstration, DemoWriter
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.sims.libero import find_task

COOKBOOK = Path(__file__).parents[3] / "cookbook"
pytestmark = [
    pytest.mark.ci,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not COOKBOOK.is_dir(), reason="the wheel comes without the cookbook"),
]

TASKS = [f"libero_10/{number}" for number in range(10)]
SIMULATOR = '''
"""Sizes, tasks and stored states of LIBERO, without robosuite: moving to the right does the task."""
import numpy as np
from cosmos_rl_vla.sims.base import SimObservation, SimSpec, Stepped, Worded
from cosmos_rl_vla.sims.shared import stored_state
from cosmos_rl_vla.sims.libero import find_task


class Table(Worded):
    def __init__(self, *, cameras, image_size, drawing, max_steps=520):
        assert drawing == "robosuite"
        self.spec = SimSpec(
            cameras=dict.fromkeys(cameras, (image_size, image_size)), state_dim=8, action_dim=7,
            action_low=(-1.0,) * 7, action_high=(1.0,) * 7, max_steps=max_steps, control_hz=20.0,
        )

    @classmethod
    def instruction(cls, task):
        return find_task(task).sentence

    def reset(self, task, init):
        find_task(task)
        self._steps, self._place = 0, np.full(3, stored_state(init, states=50, held_out=10) / 200)

    def step(self, action):
        self._steps += 1
        self._place = self._place + 0.1 * action[:3]
        done = self._steps >= 6 and bool(self._place[0] > 0.2)
        return Stepped(
            reward=float(done), terminated=done, truncated=self._steps >= self.spec.max_steps, success=done
        )

    def observe(self):
        level = int(np.clip(128 + 100 * self._place[0], 0, 255))
        images = {name: np.full((*size, 3), level, np.uint8) for name, size in self.spec.cameras.items()}
        return SimObservation(images=images, state=np.concatenate([self._place, np.zeros(5)]).astype(np.float32))

    def close(self):
        pass
'''


@pytest.fixture
def simulator(tmp_path, monkeypatch):
    (tmp_path / "tables.py").write_text(SIMULATOR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the processes of an evaluation
    return "tables:Table"


def base_of(directory, family, *, horizon):
    """A directory of a family at random weights, without a critic and `action_stats.json`, as bases are published."""
    words = tuple(find_task(task).sentence for task in TASKS)
    config = VLAModelConfig(family=family, action_dim=7, state_dim=8, horizon=horizon, words=words)
    made = load(config, stats=ActionStats.unit(7))
    made.save_config(directory)
    (directory / "action_stats.json").unlink()
    weights = {name: tensor.detach().contiguous() for name, tensor in made.weights().items()}
    public = {name: tensor for name, tensor in weights.items() if not name.startswith("value_head.")}
    save_file(public, directory / "model.safetensors")
    return directory


def recipe(name, file="run.toml"):
    return tomllib.loads((COOKBOOK / name / file).read_text(encoding="utf-8"))


def tiny(output, simulator):
    """Overrides that bring a recipe down to one process, two cameras of 16 pixels and episodes of 20 steps."""
    overrides = [f"run.output_dir={output}", "run.placement=inline", "run.max_steps=2", "model.dtype=float32"]
    overrides += ["policy.parallel={}", "policy.threads=1", "policy.microbatch_terms=64"]
    overrides += ["checkpoint.every_steps=1", "logging.media_every=0"]
    if simulator is None:
        return overrides
    overrides += [f"data.simulator={simulator}", "data.options.image_size=16", "rollout.sampling.max_steps=20"]
    overrides += [f"eval.data.simulator={simulator}", "eval.data.options.image_size=16", "eval.data.num_inits=1"]
    overrides += ["eval.max_length=20", "rollout.replicas=1", "rollout.threads=1", "sync.dtype=float32"]
    return [*overrides, "rollout.options.processes=1", "rollout.options.slots=4"]


def demonstrations(directory):
    """Two episodes under the names that LeRobot's LIBERO has for its columns."""
    rng = np.random.default_rng(0)
    pictures = {"image": (16, 16), "image2": (16, 16)}
    with DemoWriter(directory, fps=10, cameras=pictures, state_dim=8, action_dim=7) as writer:
        for task in TASKS[:2]:
            writer.add(
                Demonstration(
                    task=find_task(task).sentence,
                    images={name: rng.integers(0, 256, (12, *size, 3), np.uint8) for name, size in pictures.items()},
                    states=rng.normal(size=(12, 8)).astype(np.float32),
                    actions=rng.uniform(-0.5, 0.5, (12, 7)).astype(np.float32),
                )
            )
    return directory


def weights_in(directory):
    return load_file(directory / "model.safetensors")


def differing(before, after):
    """Names of the weights that changed."""
    assert before.keys() <= after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def assert_evaluates(name, overrides, folder):
    """The newest checkpoint of a run plays every task from an initial state that training never saw."""
    request = Request(checkpoint=str(folder / "run"), out=folder / "held_out", media=False)
    found = evaluate(load_config(recipe(name), overrides), request=request)
    assert found.rows == 10 and not found.failed
    assert found.metrics["reward/success task=libero_10/3"].count == 1


@pytest.fixture(scope="module")
def imitation(tmp_path_factory):
    """The folder that is exported after sft.toml, from a base without statistics."""
    folder = tmp_path_factory.mktemp("imitation")
    base, demos = base_of(folder / "base", "pi05", horizon=10), demonstrations(folder / "demos")
    overrides = [*tiny(folder / "sft", None), f"model.path={base}", f"data.demos={demos}"]
    sections = ["policy.prompts_per_step=8", "policy.schedule.warmup_steps=1"]
    imitated = run(recipe("vla_libero_pi05", "sft.toml"), [*overrides, *sections])
    assert all(np.isfinite(line["loss"]) for line in imitated.metrics)
    export(str(folder / "sft"), folder / "pi05_libero")
    return folder


def test_pi05_takes_the_statistics_of_the_demonstrations_it_imitates(imitation):
    stats = ActionStats.load(imitation / "pi05_libero")
    assert 0.4 < stats.action.q99.min() <= stats.action.q99.max() < 0.5
    changed = differing(weights_in(imitation / "base"), weights_in(imitation / "pi05_libero"))
    assert any("paligemma.model" in name for name in changed) and "action_out_proj.weight" in changed


def test_ppo_of_pi05_trains_expert_and_critic_and_leaves_the_rest_as_it_was(tmp_path, simulator, imitation):
    before = imitation / "pi05_libero"
    overrides = [*tiny(tmp_path / "run", simulator), f"model.path={before}"]
    sections = ["policy.prompts_per_step=6", "policy.epochs=1", "policy.minibatches=1", "sync.max_staleness=0"]
    first, _ = run(recipe("vla_libero_pi05"), [*overrides, *sections]).metrics
    assert first["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert first["terms"] <= 6 * 2  # a decision of ten actions is one
    assert first["grad_norm"] > 0 and first["loss_value"] > 0
    export(str(tmp_path / "run"), tmp_path / "after")
    changed = differing(weights_in(before), weights_in(tmp_path / "after"))
    assert {"action_out_proj.weight", "value_head.layers.0.weight"} <= changed
    assert not any("paligemma.model" in name for name in changed)
    assert load(VLAModelConfig(path=str(tmp_path / "after"))).model.horizon == 10
    assert_evaluates("vla_libero_pi05", overrides, tmp_path)


def test_openvla_oft_learns_from_groups_of_mixed_success_without_a_critic(tmp_path, simulator):
    base = base_of(tmp_path / "base", "openvla_oft", horizon=8)
    overrides = [*tiny(tmp_path / "run", simulator), f"model.path={base}", "model.unnorm_key="]
    sections = ["policy.prompts_per_step=2", "policy.minibatches=1", "rollout.group_size=4", "sync.max_staleness=0"]
    trained = run(recipe("vla_libero_openvla_oft"), [*overrides, *sections])
    first = trained.metrics[0]
    assert first["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert 0.1 <= first["reward_mean"] <= 0.9 and first["grad_norm"] > 0
    assert "loss_value" not in first
    export(str(tmp_path / "run"), tmp_path / "after")
    again = load(VLAModelConfig(path=str(tmp_path / "after")))
    assert again.model.horizon == 8 and again.model.value_dim == 0
    assert_evaluates("vla_libero_openvla_oft", overrides, tmp_path)
