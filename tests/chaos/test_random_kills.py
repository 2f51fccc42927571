"""Random kills of the policies and rollout workers of a run: SIGKILL, SIGSTOP with SIGCONT, SIGTERM.

    pytest -s -m slow tests/chaos/test_random_kills.py      twelve runs with 30 kills each; counts are printed

Each run has three policies and two rollout workers. The records that it leaves must show no sample that was trained
twice or lost, no step that policies of one mesh ended with different weights, no rollout of a version that the step
must not train on, and a run that did not end by itself. With max_staleness = 0 the samples, responses and rewards of
all steps are those of a run of one policy that nobody disturbed, and weights and optimizer state after COMPARED steps
are its own to 1e-12 in float64. Sums over one, two and three policies round differently, and learning amplifies that:
runs of one and of two policies that nobody disturbed differed by 9e-11 after 309 steps.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from itertools import groupby

import pytest
from lives import SUPPORT, journal_of, must_have_equal_weights, weights_of, workers_of

from cosmos_rl_core.checkpoint.manifest import list_steps, read_state
from cosmos_rl_core.control.ledger import records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS, PROMPTS = 30, 6
POLICIES, ROLLOUTS = 3, 2
COMPARED = 100
KINDS = {"SIGKILL": 0.7, "SIGSTOP for less than silence_s": 0.12, "SIGSTOP until removed": 0.06, "SIGTERM": 0.12}
"""Share of each kind."""
AFTER_RECOVERY = 0.7
"""Share of the kills that come when all policies are ready again, however long one takes to start: only the steps that
two policies made together have weights to compare. The others may come in the middle of a recovery."""
SILENCE_S, GRACE_S = 4.0, 0.5
COUNTS = Counter()
"""Kills of all runs of this process, by kind."""


class Campaign:
    """Disturbs one run at random moments."""

    def __init__(self, process, run_dir, *, seed, scale, wait_for):
        """scale: starts the workers that are missing, and returns when they are ready."""
        self.process, self.run_dir, self.scale, self.wait_for = process, run_dir, scale, wait_for
        self.chance = random.Random(seed)
        self.counts = Counter()

    def run(self, kills):
        kinds, shares = list(KINDS), list(KINDS.values())
        while self.counts.total() < kills:
            if self.chance.random() < AFTER_RECOVERY:
                self.wait_for(lambda: len(self.ready("policy")) == POLICIES, "all policies", timeout_s=300)
            time.sleep(self.chance.choice((0.0, 0.05, 0.5, 1.0, 2.0)) * self.chance.random())
            self.must_be_alive()
            role = self.chance.choice(("policy", "policy", "rollout"))
            kind = self.chance.choices(kinds, shares)[0]
            if kind == "SIGTERM":
                time.sleep(1.5)  # status.json of after the last kill: when the last policy leaves, the run ends
            workers = workers_of(self.run_dir, role)
            if workers and (kind != "SIGTERM" or len(self.ready(role)) > 1):
                name = self.chance.choice(sorted(workers))
                try:
                    self.disturb(kind, workers[name])
                except ProcessLookupError:  # it has just died of an earlier kill
                    continue
                self.counts[f"{role} {kind}"] += 1

    def must_be_alive(self):
        if self.process.poll() is not None:
            out, errors = self.process.communicate()
            pytest.fail(f"the run ended with exit code {self.process.returncode}\n{out[-3000:]}\n{errors[-6000:]}")

    def disturb(self, kind, pid):
        if kind == "SIGKILL":
            os.kill(pid, signal.SIGKILL)
        elif kind == "SIGTERM":
            os.kill(pid, signal.SIGTERM)  # it finishes its step, and counts as a worker of the run until it has left
            self.wait_for(lambda: pid not in self.pids(), f"process {pid} to leave")
            self.must_be_alive()
            self.scale()
        else:
            os.kill(pid, signal.SIGSTOP)
            removed = kind == "SIGSTOP until removed"
            time.sleep(SILENCE_S + GRACE_S + 1.5 if removed else self.chance.uniform(0.0, 0.4 * SILENCE_S))
            with contextlib.suppress(ProcessLookupError):  # a worker that was removed is killed
                os.kill(pid, signal.SIGCONT)

    def pids(self):
        return {pid for role in ("policy", "rollout") for pid in workers_of(self.run_dir, role).values()}

    def ready(self, role):
        members = json.loads((self.run_dir / "status.json").read_text())["members"]
        return [member["name"] for member in members if member["role"] == role and member["state"] == "ready"]


@pytest.fixture
def disturbed(tmp_path, monkeypatch, recipe, start, wait_for, rows_of, finished):
    """Run a campaign to its end; return the directory and the number of steps."""

    def run(seed, **changes):
        (tmp_path / "digests").mkdir()
        monkeypatch.setenv("DIGESTS", str(tmp_path / "digests"))
        monkeypatch.setenv("PYTHONPATH", SUPPORT)
        elastic = {"silence_s": SILENCE_S, "suspect_grace_s": GRACE_S, "restart_workers": 100_000, "leave_s": 5.0}
        file = recipe(
            tmp_path,
            run__max_steps=1_000_000,
            replicas=POLICIES,
            rollout__replicas=ROLLOUTS,
            elastic=elastic,
            rollout__options={"delay_s": 0.02},
            **changes,
        )
        process, run_dir = start("run", file), tmp_path / "run"
        wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 2, "the first steps", timeout_s=300)

        def scale():
            finished(start("scale", run_dir, f"policy={POLICIES}", f"rollout={ROLLOUTS}"), timeout_s=300)

        campaign = Campaign(process, run_dir, seed=seed, scale=scale, wait_for=wait_for)
        campaign.run(KILLS)
        steps = len(rows_of(run_dir / "metrics.jsonl"))
        wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= steps + 3, "steps after the kills", timeout_s=300)
        process.send_signal(signal.SIGINT)
        finished(process, 130, timeout_s=300)
        COUNTS.update(campaign.counts)
        return run_dir, list_steps(run_dir / "checkpoints")[-1]

    return run


def must_have_trained_each_sample_once(run_dir, steps, rows_of, *, max_staleness):
    assert [row["step"] for row in rows_of(run_dir / "metrics.jsonl")] == list(range(steps))
    trained = []
    for step in range(steps):
        rows = rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")
        samples = {row["sample"] for row in rows}
        assert len(samples) == PROMPTS
        trained += samples
        for row in rows:
            oldest, newest = row["versions"]
            assert step - max_staleness <= oldest <= newest <= step, f"step {step} has a rollout of {row['versions']}"
    assert len(set(trained)) == len(trained), "a sample was trained twice"
    state = read_state(run_dir / "checkpoints" / f"step_{steps}")
    assert sorted([*trained, *state.unfinished]) == list(range(state.next_sample)), "a sample was lost"


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_kills(seed, updates, max_staleness, disturbed, tmp_path, undisturbed, rows_of):
    changes = {"sync__max_staleness": max_staleness, "policy__minibatches": updates, "checkpoint__keep": 100_000}
    run_dir, steps = disturbed(seed, **changes)
    must_have_trained_each_sample_once(run_dir, steps, rows_of, max_staleness=max_staleness)
    compared = must_have_equal_weights(tmp_path / "digests")
    assert compared > steps / 2
    rollbacks = sum(isinstance(record, records.RolledBack) for record in journal_of(run_dir))
    if max_staleness == 0:
        whole = undisturbed(run__max_steps=steps, **changes)
        for step in range(steps):
            assert content(run_dir, step, rows_of) == content(whole, step, rows_of), f"step {step}"
        at = min(COMPARED, steps)
        mine, other = weights_of(run_dir, at), weights_of(whole, at)
        assert mine.keys() == other.keys()
        difference = max((mine[name] - other[name]).abs().max().item() for name in mine)
        print(f"\nlargest difference of weights and optimizer state after {at} steps: {difference:.1e}")
        assert difference < 1e-12
    print(f"\n{steps} steps, {rollbacks} rollbacks, {compared} weights compared; kills so far: {COUNTS.total()}")
    for role, kinds in groupby(sorted(COUNTS), key=lambda kind: kind.partition(" ")[0]):
        print(f"  {role}: " + ", ".join(f"{COUNTS[kind]} {kind.partition(' ')[2]}" for kind in kinds))


def content(run_dir, step, rows_of):
    rows = rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")
    return sorted((row["sample"], row["response"], row["reward"]) for row in rows)
