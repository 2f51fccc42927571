"""kill -9 at random moments, then `--resume auto`, again and again: as if nothing had happened.

A life is a whole run in one process, forked from a server that has imported torch, so that a kill takes everything at
once and the next life starts in a tenth of a second. After the last life

    every sample was trained exactly once      rollouts/step_*.jsonl of the lineage, against the last checkpoint
    the weights are those of a run that nobody killed, to the bit, where max_staleness = 0
    and the rewards are as high, where rollouts may be stale, and chance has its part
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from statistics import fmean

import pytest
from lives import journal_of, live_to_the_end, live_until, num_lines, processes_of
from safetensors.numpy import load_file

from cosmos_rl_core.checkpoint.manifest import read_state
from cosmos_rl_core.control.ledger import records

pytestmark = pytest.mark.ci

PROMPTS, GROUP = 4, 4
PRELOAD = [
    "cosmos_rl_core.workers.policy",
    "cosmos_rl_core.workers.rollout",
    "cosmos_rl_core.testing.tiny_model",
    "cosmos_rl_transfer.publish.publisher",
    "cosmos_rl_transfer.pull.subscriber",
]
DEADLINE_S = 120.0
"""Longest that a life may take to the moment it is killed at, or to its end."""


def recipe(run_dir, *, steps, max_staleness):
    return {
        "run": {
            "domain": "cosmos_rl_core.testing.tiny:TINY",
            "name": "bandit",
            "output_dir": str(run_dir),
            "max_steps": steps,
            "placement": "inline",
        },
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": PROMPTS, "optimizer": {"learning_rate": 0.1}},
        "rollout": {"group_size": GROUP, "sampling": {"max_tokens": 3}, "options": {"delay_s": 0.002}},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"max_staleness": max_staleness},
        "checkpoint": {"every_steps": 2},
        "logging": {"sinks": ["jsonl"]},
    }


def rows_of(path):
    """The objects of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def live(tables, *arguments, target=live_to_the_end):
    """Start or go on in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=target, args=(tables, *arguments), daemon=True)
    process.start()
    return process


def wait_until(condition, process):
    """Wait until a life has come to a point; a life that ends before that is an error."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.is_alive(), f"the run ended by itself (exit code {process.exitcode})"
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.001)


def kill_when(process, condition, *, after_s):
    """Kill a life `after_s` after it has come to a point."""
    wait_until(condition, process)
    time.sleep(after_s)  # the moment is the point of the test
    process.kill()
    process.join()
    assert process.exitcode == -9


def kill_again_and_again(tables, *, kills, steps, seed):
    """Let the run live `kills` + 1 times; each life but the last is killed at some moment."""
    chance = random.Random(seed)
    for life in range(kills):
        wanted = chance.randint(0, (life + 1) * (steps - 20) // kills)  # now and then before anything has happened
        process = live(tables, wanted, chance.uniform(0.0, 0.05), target=live_until)
        process.join(DEADLINE_S)
        assert process.exitcode == -9
    process = live(tables)
    process.join(DEADLINE_S)
    assert process.exitcode == 0


def must_have_trained_each_sample_once(run_dir, *, steps, lost_lines=0):
    """`lost_lines`: steps whose metrics the controller may have died before it heard of them."""
    told = [line["step"] for line in rows_of(run_dir / "metrics.jsonl")]
    assert told == sorted(set(told)) and set(told) <= set(range(steps))
    assert len(told) >= steps - lost_lines
    trained = []
    for step in range(steps):
        rollouts = rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")
        assert len(rollouts) == PROMPTS * GROUP
        trained += {rollout["sample"] for rollout in rollouts}
    assert len(trained) == steps * PROMPTS
    assert len(set(trained)) == len(trained), "a sample was trained twice"
    state = read_state(run_dir / "checkpoints" / f"step_{steps}")
    assert sorted([*trained, *state.unfinished]) == list(range(state.next_sample)), "a sample was lost"


def check(directory, *, kills, steps, max_staleness, seed):
    killed, whole = directory / "killed", directory / "whole"
    tables = recipe(killed, steps=steps, max_staleness=max_staleness)
    kill_again_and_again(tables, kills=kills, steps=steps, seed=seed)
    must_have_trained_each_sample_once(killed, steps=steps)

    process = live(recipe(whole, steps=steps, max_staleness=max_staleness))
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    must_have_trained_each_sample_once(whole, steps=steps)
    if max_staleness == 0:
        assert bits(killed / "checkpoints" / f"step_{steps}") == bits(whole / "checkpoints" / f"step_{steps}")
    rewards = [[line["reward_mean"] for line in rows_of(run_dir / "metrics.jsonl")] for run_dir in (killed, whole)]
    assert fmean(rewards[1][-5:]) > fmean(rewards[1][:5]) + 0.2, "nothing was learnt, so that equality would say little"
    assert fmean(rewards[0][-5:]) == pytest.approx(fmean(rewards[1][-5:]), abs=0.1)


def bits(checkpoint):
    """Weights and optimizer state, to the bit, by file and name."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    assert len(files) >= 2
    return {
        (file.relative_to(checkpoint).as_posix(), name): array.tobytes()
        for file in files
        for name, array in load_file(file).items()
    }


@pytest.mark.timeout(400)
@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ten_kills_leave_no_trace(max_staleness, tmp_path):
    check(tmp_path, kills=10, steps=80, max_staleness=max_staleness, seed=max_staleness)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_hundred_kills_leave_no_trace(max_staleness, tmp_path):
    check(tmp_path, kills=100, steps=200, max_staleness=max_staleness, seed=100 + max_staleness)


# -- a run in several processes


@pytest.mark.timeout(400)
@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_controller_and_a_killed_machine_leave_no_trace(max_staleness, tmp_path):
    """The controller alone, whose workers save on their way out while the next life begins; then all at once."""
    run_dir, steps = tmp_path / "run", 12
    tables = recipe(run_dir, steps=steps, max_staleness=max_staleness)
    tables["run"]["placement"] = "local"
    tables["policy"]["threads"] = tables["rollout"]["threads"] = 1
    tables["rollout"]["options"]["delay_s"] = 0.04
    for all_of_them, wanted in ((False, 3), (True, 6)):
        process = live(tables)
        kill_when(process, lambda: num_lines(run_dir / "metrics.jsonl") >= wanted, after_s=0.01)  # noqa: B023
        for pid in processes_of(run_dir) if all_of_them else ():
            with contextlib.suppress(ProcessLookupError):  # it left by itself
                os.kill(pid, signal.SIGKILL)
    process = live(tables)
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    must_have_trained_each_sample_once(run_dir, steps=steps, lost_lines=2)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_policy_goes_on_from_its_checkpoint(max_staleness, tmp_path):
    """All policies die, at random steps: a new lineage from the newest checkpoint, within one run."""
    killed, whole, steps = tmp_path / "killed", tmp_path / "whole", 26
    tables = recipe(killed, steps=steps, max_staleness=max_staleness)
    tables["run"]["placement"] = "local"
    tables["policy"]["threads"] = tables["rollout"]["threads"] = 1
    tables["rollout"]["options"]["delay_s"] = 0.02
    chance, metrics = random.Random(max_staleness), killed / "metrics.jsonl"
    process = live(tables)
    for wanted in (chance.randint(0, 1), chance.randint(5, 9), chance.randint(12, 16)):
        wait_until(lambda: num_lines(metrics) >= wanted, process)  # noqa: B023
        time.sleep(chance.uniform(0.0, 0.1))  # the moment is the point of the test
        wait_until(lambda: processes_of(killed, name="policy-0"), process)
        [pid] = processes_of(killed, name="policy-0")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: processes_of(killed, name="policy-0") not in ([], [pid]), process)  # noqa: B023
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    must_have_trained_each_sample_once(killed, steps=steps)
    lineages = [record.lineage for record in journal_of(killed) if isinstance(record, records.RolledBack)]
    assert lineages in ([1, 2], [1, 2, 3])  # a policy that dies before its first step leaves nothing to undo

    process = live(recipe(whole, steps=steps, max_staleness=max_staleness))
    process.join(DEADLINE_S)
    if max_staleness == 0:
        assert bits(killed / "checkpoints" / f"step_{steps}") == bits(whole / "checkpoints" / f"step_{steps}")
