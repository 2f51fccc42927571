"""kill -9 in the middle of a run, then `--resume auto`: to the bit the run that nobody killed.

Data, noise, rewards and the data term's clips are functions of seeds and of the step, so that with max_staleness = 0 a
life that begins at a checkpoint does what the killed one did, whatever that had begun.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from wfm_fixtures import lines_of, pixel_model, recipe

from cosmos_rl_core.launch.run import run

STEPS, SAVED_EVERY, KILLED_AFTER = 6, 2, 3
DEADLINE_S = 120.0
PRELOAD = [
    "cosmos_rl_core.workers.policy",
    "cosmos_rl_core.workers.rollout",
    "cosmos_rl_transfer.publish.publisher",
    "cosmos_rl_transfer.pull.subscriber",
    "cosmos_rl_wfm.build",
    "diffusers.models.transformers.transformer_wan",
]
AVERAGED = pixel_model(ema={"decay": 0.5}).model_dump(mode="json", exclude_none=True)
ARMS = {
    "ddrl": {
        "algorithm": {"name": "ddrl"},
        "data_regularization": {"coef": 0.1, "rows_per_step": 4},
        "model": AVERAGED,
    },
    "nft": {
        "algorithm": {"name": "nft"},
        "rollout": {"group_size": 3, "sampling": {"num_steps": 4, "rule": "ode", "old_decay": "late"}},
    },
}
FIGURES = ("loss", "reward_mean", "reward_std", "grad_norm", "policy_version", "terms")


def tables(arm, directory, *, placement="inline"):
    sections = recipe(**ARMS[arm])
    sections["run"] = {
        "domain": "wfm",
        "placement": placement,
        "max_steps": STEPS,
        "output_dir": str(directory),
    }
    sections["checkpoint"] = {"every_steps": SAVED_EVERY}
    sections["policy"]["threads"] = 1
    sections["rollout"]["threads"] = 1
    return sections


def live(sections):
    """Start or go on, in a process of its own that is forked from one with all imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=run, args=(sections,), kwargs={"resume": "auto"})
    process.start()
    return process


def live_to_the_end(sections):
    process = live(sections)
    process.join(DEADLINE_S)
    assert process.exitcode == 0


def wait_for_step(process, directory):
    """Return when the metrics of the step before the kill are on disk."""
    metrics, deadline = directory / "metrics.jsonl", time.monotonic() + DEADLINE_S
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= KILLED_AFTER):
        assert process.is_alive(), f"the run ended by itself (exit code {process.exitcode})"
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.001)


def policy_of(directory):
    """The process that trains, from the process table."""
    token = str(directory / "token").encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if token in words and b"policy-0" in words:
                    return int(entry.name)
    raise AssertionError("no policy process")


def steps_of(directory):
    return [[line[name] for name in FIGURES] for line in lines_of(directory / "metrics.jsonl")]


def trained_on(directory):
    """What each step was trained on: (sample, reward) of its rollouts."""
    files = sorted((directory / "rollouts").glob("step_*.jsonl"))
    return [sorted((line["sample"], line["reward"]) for line in lines_of(file)) for file in files]


def bits(directory):
    """Weights, averages, old weights and optimizer state at the end."""
    files = sorted((directory / "checkpoints" / f"step_{STEPS}").rglob("*.safetensors"))
    return {(file.name, name): array.tobytes() for file in files for name, array in load_file(file).items()}


def must_equal(killed, whole):
    assert steps_of(killed) == steps_of(whole)
    assert trained_on(killed) == trained_on(whole)
    assert len(trained_on(whole)) == STEPS
    assert bits(killed) == bits(whole)
    assert len(bits(whole)) > 40, "weights, two moments of each, and a second set of weights"


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["ddrl", "nft"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(arm, tmp_path):
    live_to_the_end(tables(arm, tmp_path / "whole"))
    process = live(tables(arm, tmp_path / "killed"))
    wait_for_step(process, tmp_path / "killed")
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    live_to_the_end(tables(arm, tmp_path / "killed"))
    must_equal(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arm", ARMS)
def test_a_killed_policy_process_ends_the_run_which_then_goes_on(arm, tmp_path):
    live_to_the_end(tables(arm, tmp_path / "whole", placement="local"))
    sections = tables(arm, tmp_path / "killed", placement="local")
    process = live(sections)
    wait_for_step(process, tmp_path / "killed")
    os.kill(policy_of(tmp_path / "killed"), signal.SIGKILL)
    process.join(DEADLINE_S)
    assert process.exitcode == 1
    live_to_the_end(sections)
    must_equal(tmp_path / "killed", tmp_path / "whole")
