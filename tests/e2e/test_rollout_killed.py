"""kill -9: a process is started again and no sample is lost or trained twice; without restarts the run ends."""

import json
import os
import re
import select
import signal
import time

import pytest

from cosmos_rl_core.launch.local import ROLLOUT_GRACE_S
from cosmos_rl_core.processes import kill_tree

pytestmark = pytest.mark.ci

STEPS, PROMPTS, GROUP = 12, 4, 4
TALKING = """
from cosmos_rl_core.testing.tiny import Tiny

class Talking(Tiny):
    def build_policy(self, *arguments, **keywords):
        print("the policy is built")
        return super().build_policy(*arguments, **keywords)

DOMAIN = Talking()
"""

HANGING = """
import asyncio
import os
import time
from pathlib import Path

from cosmos_rl_core.testing.tiny import Tiny

ARMED = Path(os.environ["ARMED"])

class Hanging(Tiny):
    def build_engine(self, *arguments, **keywords):
        engine = super().build_engine(*arguments, **keywords)
        engine.generate = Hung(engine.generate)
        return engine

class Hung:
    def __init__(self, generate):
        self.generate, self.hangs = generate, False

    async def __call__(self, prompt, **keywords):
        if ARMED.exists():
            ARMED.rename(ARMED.with_name("fired"))
            self.hangs = True
        if self.hangs:
            await asyncio.to_thread(time.sleep, 600)
        return await self.generate(prompt, **keywords)

DOMAIN = Hanging()
"""


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_rollout_process_costs_no_sample(
    replicas, tmp_path, bandit, write_recipe, start, wait_for, pid_of, rows_of
):
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=STEPS,
        policy__prompts_per_step=PROMPTS,
        rollout__group_size=GROUP,
        rollout__replicas=replicas,
        rollout__options={"delay_s": 0.1},
        logging__sinks=["console", "jsonl"],
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 2, "two steps")
    os.kill(pid_of(run_dir, "rollout-0"), signal.SIGKILL)
    told, errors = process.communicate(timeout=120)

    assert process.returncode == 0, errors
    assert "rollout-0 died (signal SIGKILL); starting it again" in told
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
    trained = []
    for step in range(STEPS):
        rollouts = rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")
        samples = {rollout["sample"] for rollout in rollouts}
        assert len(samples) == PROMPTS
        assert len(rollouts) == PROMPTS * GROUP
        trained += samples
    assert len(set(trained)) == len(trained)
    counts = json.loads((run_dir / "status.json").read_text())["samples"]
    assert counts["issued"] == sum(number for state, number in counts.items() if state != "issued")
    assert sorted(trained) == list(range(STEPS * PROMPTS))


def test_a_rollout_process_that_dies_too_often_is_given_up_and_the_others_go_on(
    tmp_path, bandit, write_recipe, start, wait_for, pid_of, rows_of
):
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=10_000,
        rollout__replicas=2,
        rollout__options={"delay_s": 0.05},
        elastic__restart_workers=1,
        logging__sinks=["console", "jsonl"],
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl"), "the first step")
    first = pid_of(run_dir, "rollout-1")
    os.kill(first, signal.SIGKILL)
    second = wait_for(lambda: (pid := pid_of(run_dir, "rollout-1")) != first and pid, "the second process")
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: pid_of(run_dir, "rollout-1") is None, "its end")
    before = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= before + 3, "steps without it")
    process.send_signal(signal.SIGINT)
    told, errors = process.communicate(timeout=120)

    assert process.returncode == 130, errors
    assert "rollout-1 died (signal SIGKILL); starting it again" in told
    assert "rollout-1 died (signal SIGKILL); it is given up, and the run continues with policy" not in told
    assert "rollout-1 died (signal SIGKILL); it is given up, and the run continues with rollout-0" in told


def test_a_killed_policy_process_ends_the_run_with_its_last_words(
    tmp_path, bandit, write_recipe, start, wait_for, pid_of, rows_of
):
    run_dir = tmp_path / "run"
    (tmp_path / "talking.py").write_text(TALKING)
    tables = bandit(run_dir, run__domain="talking:DOMAIN", run__max_steps=10_000, elastic__restart_workers=0)
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl"), "the first step")
    os.kill(pid_of(run_dir, "policy-0"), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)

    assert process.returncode == 1
    assert "policy-0 died (signal SIGKILL); the run cannot continue without it" in errors
    assert "\nthe policy is built\n" in errors.partition("logs/policy-0.log:")[2]
    assert "Traceback" not in errors
    assert pid_of(run_dir, "rollout-0") is None


def test_a_rollout_that_cannot_end_by_itself_does_not_outlive_the_command(
    tmp_path, bandit, write_recipe, start, wait_for, pid_of, rows_of
):
    """SIGSTOP is as a call that keeps Python's lock: no thread of it notices the end of the command."""
    run_dir = tmp_path / "run"
    process = start("run", write_recipe(tmp_path / "run.toml", bandit(run_dir, run__max_steps=10_000)))
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl"), "the first step")
    stopped = pid_of(run_dir, "rollout-0")
    ended = os.pidfd_open(stopped)
    os.kill(stopped, signal.SIGSTOP)
    process.kill()
    process.wait()
    try:
        assert select.select([ended], [], [], ROLLOUT_GRACE_S + 20.0)[0]
    finally:
        os.close(ended)
        kill_tree(stopped)


LEASE_TTL_S = 4.0


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rollout_whose_engine_hangs_is_started_again(
    replicas, tmp_path, bandit, write_recipe, start, wait_for, pid_of, rows_of, monkeypatch
):
    """Its heartbeats go on."""
    run_dir, armed = tmp_path / "run", tmp_path / "armed"
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.setenv("ARMED", str(armed))
    tables = bandit(
        run_dir,
        run__domain="hanging:DOMAIN",
        run__max_steps=10_000,
        policy__prompts_per_step=PROMPTS,
        rollout__replicas=replicas,
        rollout__options={"delay_s": 0.05},
        elastic__lease_ttl_s=LEASE_TTL_S,
        logging__sinks=["console", "jsonl"],
    )
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    wait_for(lambda: rows_of(run_dir / "metrics.jsonl"), "the first step")
    names = [f"rollout-{number}" for number in range(replicas)]
    first = {pid_of(run_dir, name) for name in names}
    armed.touch()
    wait_for(lambda: not armed.exists(), "the hang")
    hung = time.monotonic()
    wait_for(lambda: {pid_of(run_dir, name) for name in names} - first - {None}, "its next process")
    print(f"its next process began {time.monotonic() - hung:.1f} s after the hang")
    before = len(rows_of(run_dir / "metrics.jsonl"))
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= before + 3, "steps with it")
    process.send_signal(signal.SIGINT)
    told, errors = process.communicate(timeout=120)

    assert process.returncode == 130, errors
    assert re.search(r"rollout-\d is removed from the run: it made no progress for 4 s", " ".join(told.split()))
    trained = [
        rollout["sample"]
        for row in rows_of(run_dir / "metrics.jsonl")
        for rollout in rows_of(run_dir / "rollouts" / f"step_{row['step']:06d}.jsonl")
    ]
    assert sorted(trained) == [sample for sample in range(len(trained) // GROUP) for _ in range(GROUP)]
