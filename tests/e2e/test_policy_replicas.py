"""SIGKILL of one of several policy replicas: the others redo the step in work and go on; nothing is trained twice."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from cosmos_rl_core.checkpoint.manifest import read_state

pytestmark = pytest.mark.ci

STEPS, PROMPTS, REPLICAS = 60, 6, 3
SILENCE_S = 6.0
TIMEOUT_S = 5.0
"""Of a collective between ranks: below `[elastic] stall_s`."""


def recipe(bandit, run_dir, *, replicas=REPLICAS, steps=STEPS, **changes):
    return bandit(
        run_dir,
        run__max_steps=steps,
        policy__prompts_per_step=PROMPTS,
        policy__replicas=replicas,
        sync__max_staleness=0,
        checkpoint__every_steps=20,
        rollout__options={"delay_s": 0.005},
        **changes,
    )


def trained(run_dir, rows_of):
    """The samples of each step."""
    return [
        sorted({row["sample"] for row in rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")})
        for step in range(STEPS)
    ]


def weights(run_dir, *, steps=STEPS):
    folder = run_dir / "checkpoints" / f"step_{steps}"
    assert read_state(folder).step == steps
    return {
        (file.name, name): tensor
        for file in sorted(Path(folder).rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if not name.startswith("rng/")
    }


def difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, bandit, write_recipe, start):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    process = start("run", write_recipe(run_dir.with_suffix(".toml"), recipe(bandit, run_dir, replicas=1)))
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return run_dir


@pytest.mark.parametrize("victim", range(REPLICAS))
def test_the_survivors_go_on(tmp_path, undisturbed, bandit, write_recipe, start, wait_for, pid_of, rows_of, victim):
    run_dir = tmp_path / "run"
    process = start("run", write_recipe(tmp_path / "run.toml", recipe(bandit, run_dir)))
    at = 5 + random.Random(victim).random() * 20
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= at, "the step of the kill")
    before = len(rows_of(run_dir / "metrics.jsonl"))
    os.kill(pid_of(run_dir, f"policy-{victim}"), signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > before + 1, "the next commit")
    waited_s = time.monotonic() - killed
    print(f"policy-{victim} killed after {before} steps; next commits {waited_s:.2f} s later")
    assert waited_s < 10.0, "a limit of time has found it, and not its connection"
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
    assert trained(run_dir, rows_of) == trained(undisturbed, rows_of)
    assert difference(weights(run_dir), weights(undisturbed)) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [{}, {"policy__minibatches": 2, "policy__epochs": 2}, {"policy__parallel": {"dp_shard": 2}}],
    ids=["one update", "four updates", "two ranks"],
)
def test_two_replicas_train_what_one_does(tmp_path, bandit, write_recipe, start, rows_of, changes):
    """With max_staleness = 0: the same samples in every step, weights and optimizer state equal to rounding."""
    found = {}
    for replicas in (1, 2):
        run_dir = tmp_path / f"replicas_{replicas}"
        tables = recipe(bandit, run_dir, replicas=replicas, steps=6, **changes)
        process = start("run", write_recipe(run_dir.with_suffix(".toml"), tables))
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        found[replicas] = weights(run_dir, steps=6), [row["reward_mean"] for row in rows_of(run_dir / "metrics.jsonl")]
    assert found[2][1] == found[1][1]
    assert difference(found[2][0], found[1][0]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_fails_takes_its_replica_alone(
    tmp_path, undisturbed, bandit, write_recipe, start, wait_for, rank_pids, rows_of, fault
):
    run_dir = tmp_path / "run"
    tables = recipe(
        bandit, run_dir, replicas=2, policy__parallel={"dp_shard": 2}, policy__collective_timeout_s=TIMEOUT_S
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 10, "ten steps")
    before = len(rows_of(run_dir / "metrics.jsonl"))
    killed = rank_pids(run_dir, "policy-0")
    os.kill(killed[1], fault)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) > before + 2, "steps without it")
    if fault == signal.SIGKILL:  # what hangs is found later, and the run may end before its return
        wait_for(lambda: len(set(rank_pids(run_dir, "policy-0").values()) - set(killed.values())) == 2, "its return")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
    assert trained(run_dir, rows_of) == trained(undisturbed, rows_of)


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_is_killed_while_a_rank_hangs(
    tmp_path, bandit, write_recipe, start, wait_for, rank_pids, rows_of
):
    run_dir = tmp_path / "run"
    tables = recipe(bandit, run_dir, replicas=1, steps=10_000, policy__parallel={"dp_shard": 2})
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps")
    ranks = rank_pids(run_dir, "policy-0")
    os.kill(ranks[1], signal.SIGSTOP)
    process.kill()
    wait_for(lambda: not rank_pids(run_dir, "policy-0"), "the end of the ranks")


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_policy_that_hangs_is_killed_and_started_again(
    replicas, tmp_path, bandit, write_recipe, start, wait_for, pid_of, rows_of
):
    run_dir = tmp_path / "run"
    tables = recipe(
        bandit,
        run_dir,
        replicas=replicas,
        elastic={"silence_s": SILENCE_S, "suspect_grace_s": 1.0},
        logging__sinks=["console", "jsonl"],
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    metrics = run_dir / "metrics.jsonl"
    wait_for(lambda: len(rows_of(metrics)) >= 10, "ten steps")
    hung = pid_of(run_dir, "policy-0")  # the one that publishes, saves and reports
    os.kill(hung, signal.SIGSTOP)
    before, stopped = len(rows_of(metrics)), time.monotonic()
    if replicas > 1:
        wait_for(lambda: len(rows_of(metrics)) > before + 2, "steps without it")
        waited_s = time.monotonic() - stopped
        print(f"next commits {waited_s:.2f} s after the stop")
        assert SILENCE_S < waited_s < SILENCE_S + 5.0
    wait_for(lambda: pid_of(run_dir, "policy-0") not in (None, hung), "its next process", timeout_s=60)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "policy-0 has not answered for too long and is killed" in " ".join(output.split())
    assert [row["step"] for row in rows_of(metrics)] == list(range(STEPS))
    assert read_state(run_dir / "checkpoints" / f"step_{STEPS}").step == STEPS
