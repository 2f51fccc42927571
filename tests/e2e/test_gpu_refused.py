"""On a machine with GPUs, by a stand-in of NVML in each process, whose torch has no CUDA: nothing runs on the CPU."""

import os
import re
from pathlib import Path

import pytest

from cosmos_rl_core.launch.run import run

STAND_IN = Path(__file__).parents[1] / "shared" / "pretend_gpus"
UUIDS = [f"GPU-{number}f2a1b3c-3ce6-6fda" for number in range(8)]
CPU_BUILD = re.compile(r"torch 2\.\S+ is built for the CPU")
ADVICE = "`pip install --force-reinstall torch==2."


@pytest.fixture
def eight_gpus(monkeypatch):
    """Give child processes, and this one, eight H100s."""
    path = os.pathsep.join(filter(None, [str(STAND_IN), os.environ.get("PYTHONPATH")]))
    for name, value in {"PYTHONPATH": path, "PRETEND_GPUS": ",".join(UUIDS)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def recipe(tmp_path, bandit, write_recipe):
    return lambda **changes: write_recipe(tmp_path / "run.toml", bandit(tmp_path / "run", run__max_steps=2, **changes))


def test_a_plan_for_eight_gpus_gives_no_card_to_two_workers(eight_gpus, recipe, start, finished):
    changes = {"policy__parallel": {"dp_shard": 2}, "policy__replicas": 2, "rollout__replicas": 3}
    out, _ = finished(start("plan", recipe(**changes)))
    (line,) = re.findall("GPUs: (policy-0 .*)", out)
    cards = re.findall(r"GPU-\w+", line)
    assert len(cards) == len(set(cards)) == 8, line
    assert [len(re.findall("GPU", text)) for text in re.split(", |; ", line)] == [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("command", ["check", "run"])
def test_torch_for_the_cpu_is_refused_before_anything_starts(eight_gpus, recipe, start, finished, command):
    out, errors = finished(start(command, recipe()), 2 if command == "run" else 0)  # a recipe may be for other machines
    assert CPU_BUILD.search(out + errors), out + errors
    assert ADVICE in out + errors and '[run] device = "cpu", to run on the CPU' in out + errors


@pytest.mark.parametrize("hidden", ["recipe", "variable"])
def test_the_cpu_by_choice_is_said_and_runs(eight_gpus, recipe, start, finished, monkeypatch, hidden):
    if hidden == "variable":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    changes = {"run__device": "cpu"} if hidden == "recipe" else {}
    out, errors = finished(start("run", recipe(**changes, logging__sinks=["console"])))
    cause = '[run] device = "cpu"' if hidden == "recipe" else "CUDA_VISIBLE_DEVICES names none of them"
    assert f"the run uses the CPU: {cause} (GPU-0f2a1b3c" in out + errors


def test_a_worker_with_gpus_that_torch_cannot_use_ends_with_the_reason(
    controller, start, finished, monkeypatch, eight_gpus
):
    process, _, (policy, _) = controller()  # no check of a machine that has no worker
    _, errors = finished(start(*policy), 2)
    assert CPU_BUILD.search(errors) and ADVICE in errors, errors
    process.terminate()


def test_a_run_in_this_process_on_the_cpu_leaves_the_variable_as_it_was(bandit, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run(bandit(tmp_path / "run", run__max_steps=1, run__placement="inline", run__device="cpu"))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
