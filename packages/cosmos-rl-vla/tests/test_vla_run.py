"""Whole runs in a simulator: PPO, GRPO, determinism, kills, faults of simulators, evaluation."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import pytest
import tomli_w
from safetensors.numpy import load_file

from cosmos_rl_core import Request, evaluate, run
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.inference.request import Instances
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_vla.actions import ActionStats

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, PROMPTS = 3, 4
COMMAND = [sys.executable, "-c", "from cosmos_rl_core.cli.main import main; main()"]


@pytest.fixture(scope="module")
def stats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stats")
    ActionStats.unit(2).save(folder)
    return str(folder / "action_stats.json")


def recipe_of(stats, **sections):
    """PPO of a tiny pi0.5 on episodes of 12 steps; `sections` are laid over it."""
    recipe = {
        "run": {"domain": "vla", "placement": "inline", "max_steps": STEPS},
        "model": {
            "action_dim": 2,
            "state_dim": 2,
            "horizon": 4,
            "words": ["reach the red green square"],
            "stats": stats,
        },
        "data": {"simulator": "reach", "tasks": ["red", "green"], "options": {"image_size": 16, "max_steps": 20}},
        "algorithm": {"name": "ppo"},
        "policy": {
            "prompts_per_step": PROMPTS,
            "microbatch_terms": 64,
            "threads": 1,
            "optimizer": {"learning_rate": 1e-3},
        },
        "rollout": {
            "group_size": 1,
            "threads": 1,
            "sampling": {"max_steps": 12},
            "options": {"processes": 1, "slots": 3, "steady": True},
        },
        "reward": {"functions": [{"name": "success"}]},
        "sync": {"max_staleness": 0},
        "logging": {"sinks": ["jsonl"], "media_every": 0},
    }
    return laid_over(recipe, sections)


def laid_over(below, above):
    found = deepcopy(below)
    for name, value in above.items():
        inner = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = laid_over(found[name], value) if inner else value
    return found


def ran(directory, recipe, *overrides, **keys):
    """The metrics of a run's steps."""
    run(recipe, [f"run.output_dir={directory}", *overrides], **keys)
    return rows_of(directory / "metrics.jsonl")


def rows_of(path):
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # a last line may be half written
    return [json.loads(line) for line in lines]


def samples_of(directory, steps=STEPS):
    """The sample of every rollout that was trained, step by step."""
    files = [directory / "rollouts" / f"step_{step:06d}.jsonl" for step in range(steps)]
    return [row["sample"] for file in files for row in rows_of(file)]


def learnt(directory, step=STEPS):
    """Weights and optimizer state, to the bit."""
    folder = directory / "checkpoints" / f"step_{step}"
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return {(file.name, name): array.tobytes() for file in files for name, array in load_file(file).items()}


TIMES = ("time_s", "step_s", "_per_s", "sync_", "idle", "members")


def untimed(steps):
    return [{name: x for name, x in step.items() if not any(part in name for part in TIMES)} for step in steps]


def test_ppo_trains_every_sample_once(tmp_path, stats):
    steps = ran(tmp_path, recipe_of(stats, run={"placement": "local"}))
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert all(step["ratio_mean"] == pytest.approx(1.0, abs=1e-4) and step["grad_norm"] > 0 for step in steps)
    assert sorted(samples_of(tmp_path)) == list(range(STEPS * PROMPTS))


GRPO = {
    "run": {"max_steps": 2},
    "algorithm": {"name": "grpo", "filter_low": 0.1, "filter_high": 0.9},
    "rollout": {"group_size": 4},
    "policy": {"prompts_per_step": 2},
}


@pytest.mark.ci
def test_grpo_trains_on_groups_of_mixed_success_and_is_the_same_twice(tmp_path, stats):
    sections = laid_over(GRPO, {"data": {"options": {"image_size": 16, "max_steps": 40}}})
    once, twice = (ran(tmp_path / name, recipe_of(stats, **sections)) for name in ("once", "twice"))
    assert all(0 < step["reward_mean"] < 1 and step["reward_std"] > 0 for step in once)
    samples = samples_of(tmp_path / "once")
    assert len(samples) == 2 * 2 * 4 and all(samples.count(sample) == 4 for sample in samples)
    assert untimed(once) == untimed(twice)
    assert learnt(tmp_path / "once", 2) == learnt(tmp_path / "twice", 2)


def start(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def pid_of(directory, *words):
    """The process of a run whose command has these words, from the process table; None where there is none."""
    needed = {str(word).encode() for word in (directory / "token", *words)}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found = set((entry / "cmdline").read_bytes().split(b"\0"))
            except OSError:
                continue  # it ended while we looked
            if needed <= found:
                return int(entry.name)
    return None


def wait_for(condition, process, *, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


@pytest.mark.slow
def test_a_policy_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path, stats):
    steps = 6
    recipe = recipe_of(stats, run={"max_steps": steps}, checkpoint={"every_steps": 2})
    ran(tmp_path / "whole", recipe)
    cut = tmp_path / "cut"
    (tmp_path / "run.toml").write_text(tomli_w.dumps(recipe))
    process = start("run", tmp_path / "run.toml", f"run.output_dir={cut}", "run.placement=local")
    wait_for(lambda: len(rows_of(cut / "metrics.jsonl")) >= 3, process)
    os.kill(pid_of(cut, "policy-0"), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "policy-0 died (signal SIGKILL)" in errors
    ran(cut, recipe, resume="auto")
    assert learnt(cut, steps) == learnt(tmp_path / "whole", steps)
    assert sorted(samples_of(cut, steps)) == list(range(steps * PROMPTS))


FAULTY = "vla_faulty:Faulty"


@pytest.mark.parametrize("fault", ["exit", "hang", "nan_state"])
def test_a_simulator_that_fails_once_is_replaced_and_nothing_is_lost(tmp_path, stats, fault):
    options = {"max_steps": 12, "faults": {"1": fault}, "once": str(tmp_path / "happened")}
    sections = {
        "data": {"simulator": FAULTY, "options": options, "num_inits": 3},
        "rollout": {"options": {"processes": 2, "slots": 1, "step_timeout_s": 2.0}},
    }
    recipe = recipe_of(stats, **sections)
    del recipe["data"]["options"]["image_size"]
    steps = ran(tmp_path / "run", recipe)
    assert (tmp_path / "happened").exists()
    assert len(steps) == STEPS and sorted(samples_of(tmp_path / "run")) == list(range(STEPS * PROMPTS))


def test_a_simulator_that_fails_again_and_again_ends_the_run_with_its_last_words(tmp_path, stats):
    faults = {str(init): "exit" for init in range(3)}
    sections = {
        "data": {"simulator": FAULTY, "options": {"max_steps": 12, "faults": faults}, "num_inits": 3},
        "rollout": {"options": {"processes": 1, "slots": 1, "max_attempts": 10}},
    }
    recipe = recipe_of(stats, **sections)
    del recipe["data"]["options"]["image_size"]
    with pytest.raises(WorkerFailed, match=r"failed 4 times in a row(.|\n)*about to exit"):
        ran(tmp_path / "run", recipe)


@pytest.mark.ci
def test_evaluation_by_task_in_two_processes(tmp_path, stats):
    held_out = {"split": "held_out", "num_inits": 3, "perturb": ["none", "swap_instruction", "grey_images"]}
    recipe = recipe_of(stats)
    recipe["eval"] = {"by": ["task", "perturb"], "data": {**recipe["data"], **held_out}}
    recipe["logging"]["media_every"] = 1
    config = load_config(recipe, [f"run.output_dir={tmp_path / 'run'}"])
    found = evaluate(config, request=Request(instances=Instances(num_gpus=2)))
    assert found.rows == 18 and not found.failed
    names = set(found.metrics)
    for label in ("red", "green", "none", "swap_instruction", "grey_images"):
        (name,) = (each for each in names if each.startswith("reward/success") and label in each)
        estimate = found.metrics[name]
        assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
        assert estimate.count == (9 if label in ("red", "green") else 6)
    assert list(found.directory.rglob("*.mp4"))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"data": {"tasks": ["purple"]}}, "reach has no task 'purple'; tasks: red, green, blue"),
        ({"data": {"simulator": "reech"}}, "reech"),
        ({"data": {"options": {"colour": 3}}}, "colour"),
        ({"model": {"action_dim": 3}}, "3"),
        ({"rollout": {"sampling": {"steps": "action"}}}, 'set [model.critic] per = "action"'),
    ],
)
def test_what_does_not_fit_is_told_in_one_message(tmp_path, stats, sections, told):
    with pytest.raises(UserError) as found:
        ran(tmp_path, recipe_of(stats, **sections))
    assert told in str(found.value)
