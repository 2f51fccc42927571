"""One of two policies dies at a named point, hangs, or is cut off from the other: the run goes on, and nothing is
trained twice."""

import os
import re
import signal
import time
from pathlib import Path

import faults
import pytest
from lives import must_have_trained_once

pytestmark = pytest.mark.ci

PROMPTS, LIMIT_S, PEER_S = 6, 10.0, 3.0
POINTS = (
    ("in the forward pass", "policy-1"),
    ("in the reduce", "policy-1"),
    ("before the vote", faults.LEADER),
    ("after the vote", "policy-1"),
    ("after the commit", faults.LEADER),
    ("between updates", "policy-1"),
    ("while it saves", faults.LEADER),
    ("while it serves weights", faults.LEADER),
)
WHILE_HEALING = (("while it is healed", "policy-1"),)


@pytest.fixture
def two_policies(tmp_path, bandit, write_recipe, start, rows_of, wait_for, monkeypatch):
    """Start a run of two policies with faults; return it, its directory, and a wait for both policies to be there."""
    run_dir = tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", str(Path(faults.__file__).parent))
    monkeypatch.setenv("FAULTS_OF", str(run_dir))

    def begin():
        tables = bandit(
            run_dir,
            run__domain="faults:DOMAIN",
            run__max_steps=10_000,  # it is stopped
            policy__prompts_per_step=PROMPTS,
            policy__replicas=2,
            policy__minibatches=2,
            sync__max_staleness=0,
            checkpoint__every_steps=3,
            rollout__options={"delay_s": 0.02},
            elastic={"restart_workers": 30, "stall_s": LIMIT_S, "peer_s": PEER_S},
            logging__sinks=["console", "jsonl"],
        )
        return start("run", write_recipe(tmp_path / "run.toml", tables)), run_dir

    def both_train(process):
        done = len(rows_of(run_dir / "metrics.jsonl"))

        def both():
            assert process.poll() is None, process.communicate()
            return any(row["members"] == 3 for row in rows_of(run_dir / "metrics.jsonl")[done:])

        wait_for(both, "both policies")

    return begin, both_train


@pytest.fixture
def wait_for_steps(rows_of, wait_for):
    """Wait until a run has trained more steps; return the seconds until then."""

    def wait(process, run_dir, what, *, more=1):
        before, since = len(rows_of(run_dir / "metrics.jsonl")), time.monotonic()

        def there():
            assert process.poll() is None, process.communicate()
            return len(rows_of(run_dir / "metrics.jsonl")) >= before + more

        try:
            wait_for(there, what)
        except AssertionError:
            for name in ("events.jsonl", "status.json", *(f"logs/policy-{number}.log" for number in range(2))):
                print(f"--- {name}\n{(run_dir / name).read_text()[-4000:]}")
            raise
        return time.monotonic() - since

    return wait


@pytest.fixture
def trained_once():
    """Stop a run; check that every sample was trained exactly once, in the order of a run that nobody disturbed.

    Returns what it printed.
    """

    def check(process, run_dir):
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 130, errors
        must_have_trained_once(run_dir, prompts=PROMPTS)
        return " ".join(output.split())

    return check


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "points", [POINTS[2:4], pytest.param(POINTS + WHILE_HEALING, marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_a_policy_that_dies_at_a_named_point_leaves_no_trace(
    two_policies, trained_once, wait_for, wait_for_steps, pid_of, points
):
    begin, both_train = two_policies
    process, run_dir = begin()
    for point, victim in points:
        both_train(process)
        faults.arm(run_dir, point, victim)
        if (point, victim) in WHILE_HEALING:
            os.kill(pid_of(run_dir, "policy-1"), signal.SIGKILL)  # what starts again is healed by the other one
        wait_for(lambda: faults.fired(run_dir), point)
        waited_s = wait_for_steps(process, run_dir, "the next step")
        print(f"{point}: metrics of the next step {waited_s:.2f} s later")
    trained_once(process, run_dir)


def test_a_policy_that_hangs_with_heartbeats_is_removed_and_ends(two_policies, trained_once, wait_for, wait_for_steps):
    begin, both_train = two_policies
    process, run_dir = begin()
    both_train(process)
    faults.arm(run_dir, "in the forward pass", faults.LEADER, faults.HANG)
    wait_for(lambda: faults.fired(run_dir), "the hang")
    waited_s = wait_for_steps(process, run_dir, "a step without it")
    print(f"the next step came {waited_s:.2f} s after the hang, the limit is {LIMIT_S:g} s")
    assert waited_s < LIMIT_S + 5.0
    both_train(process)
    said = trained_once(process, run_dir)
    assert re.search(r"policy-\d is removed from the run: it made no progress for 10 s", said)
    assert re.search(r"policy-\d died \(exit code 1\); starting it again", said)


def test_two_policies_that_are_cut_off_go_on_without_the_newer_one(two_policies, trained_once, wait_for_steps):
    begin, both_train = two_policies
    process, run_dir = begin()
    both_train(process)
    faults.cut(run_dir)
    waited_s = wait_for_steps(process, run_dir, "steps of one alone", more=2)
    print(f"the next steps came {waited_s:.2f} s after the cut, the limit is {PEER_S:g} s")
    assert waited_s < PEER_S + 5.0
    faults.mend(run_dir)
    both_train(process)
    said = trained_once(process, run_dir)
    assert re.search(r"policy-(\d) is removed from the run: policy-(?!\1)\d cannot reach it", said)


def test_a_policy_that_hangs_while_the_other_one_dies_is_removed_and_the_run_goes_on(
    two_policies, trained_once, wait_for, wait_for_steps, pid_of
):
    begin, both_train = two_policies
    process, run_dir = begin()
    both_train(process)
    faults.arm(run_dir, "in the forward pass", "policy-0", faults.HANG)
    wait_for(lambda: faults.fired(run_dir), "the hang")
    os.kill(pid_of(run_dir, "policy-1"), signal.SIGKILL)
    waited_s = wait_for_steps(process, run_dir, "a step of the one that started again")
    print(f"the next step came {waited_s:.2f} s after the hang, the limit is {LIMIT_S:g} s")
    both_train(process)
    assert "policy-0 is removed from the run: it made no progress for 10 s" in trained_once(process, run_dir)
