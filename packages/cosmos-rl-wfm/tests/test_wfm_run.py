"""Whole runs of every algorithm, in one process, on mock data."""

import pytest
import torch
from wfm_fixtures import lines_of, recipe

from cosmos_rl_core import run
from cosmos_rl_core.checkpoint.contents import MODEL
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_core.checkpoint.reader import CheckpointReader
from cosmos_rl_core.storage.folder import Folder

RECIPE = recipe()
CLEAN = {"num_steps": 4, "rule": "ode", "old_decay": "slow"}
ARMS = {
    "flow_grpo": {"algorithm": {"name": "flow_grpo"}},
    "ddrl": {"algorithm": {"name": "ddrl"}, "data_regularization": {"coef": 0.01, "rows_per_step": 4}},
    "nft": {"algorithm": {"name": "nft"}, "rollout": {"group_size": 3, "sampling": CLEAN}},
    "lora": {
        "algorithm": {"name": "nft"},
        "rollout": {"group_size": 3, "sampling": CLEAN},
        "model": {**RECIPE["model"], "lora": {"rank": 2}},
    },
}


def trained(directory, changes, *overrides, **keys):
    """The metrics of a run's steps."""
    run({**RECIPE, **changes}, [f"run.output_dir={directory}", *overrides], **keys)
    return lines_of(directory / "metrics.jsonl")


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_trains(tmp_path, arm):
    if arm == "lora":
        pytest.importorskip("peft", reason="an extra of the package")
    steps = trained(tmp_path / arm, ARMS[arm])
    assert len(steps) == 3
    first, last = steps[0], steps[-1]
    assert last["grad_norm"] > 0
    assert last["rollouts"] == 6
    match arm:
        case "flow_grpo":
            assert (first["ratio_mean"], first["clip_fraction"], first["kl"]) == (1.0, 0.0, 0.0)
            assert last["kl"] > 0
        case "ddrl":
            assert first["ratio_mean"] == 1.0
            assert first["loss_data_term"] > 0
        case _:
            assert first["old_distance"] == 0.0 < last["old_distance"]
            assert first["kl"] == 0.0 < last["kl"]


def test_a_run_that_goes_on_trains_as_if_it_had_never_stopped(tmp_path):
    whole = trained(tmp_path / "whole", ARMS["nft"], "checkpoint.every_steps=1")
    trained(tmp_path / "cut", ARMS["nft"], "run.max_steps=2")
    cut = trained(tmp_path / "cut", ARMS["nft"], "run.max_steps=3", resume="auto")
    metrics = ("loss", "reward_mean", "grad_norm", "old_distance", "preference")
    assert [cut[-1][name] for name in metrics] == [whole[-1][name] for name in metrics]


def test_real_clips_are_learnt(tmp_path):
    recipe = {name: section for name, section in RECIPE.items() if name not in ("rollout", "reward", "sync")}
    recipe["logging"] = {"sinks": ["jsonl"]}
    overrides = [f"run.output_dir={tmp_path / 'sft'}", "run.max_steps=40", "policy.prompts_per_step=6"]
    run({**recipe, "algorithm": {"name": "sft"}}, [*overrides, "policy.optimizer.learning_rate=5e-3"])
    losses = [line["loss"] for line in lines_of(tmp_path / "sft" / "metrics.jsonl")]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_what_is_exported_is_a_network_of_diffusers(tmp_path):
    pytest.importorskip("accelerate", reason="what diffusers loads a Wan network with")
    from diffusers import WanTransformer3DModel

    trained(tmp_path / "run", ARMS["nft"], "run.max_steps=1")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    export(str(checkpoint), tmp_path / "exported")
    network, loading = WanTransformer3DModel.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(loading.values())
    with CheckpointReader(Folder.at(checkpoint)) as saved:
        for name, parameter in network.named_parameters():
            assert torch.equal(parameter, saved.whole(MODEL + name)), name
