"""Rows 2, 3 and 5 of the failure matrix: a rollout worker dies while it delivers, or is stopped and goes on later;
all of them leave; the whole run is stopped.

With max_staleness = 0 every sample has its own random numbers, so that a sample that was lost, doubled or taken from a
process that was removed would change the weights. They are equal to the bit.
"""

import os
import signal
import time
from pathlib import Path

import pytest
from lives import AT, processes_of

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

SPOOLED = {"rollout__spool": {"threshold_bytes": 0}}
SILENCE_S, GRACE_S = 4.0, 1.0


@pytest.mark.parametrize(
    ("point", "changes"),
    [
        pytest.param("deliver", {}, id="row 2: before it delivers a group", marks=pytest.mark.slow),
        pytest.param("delivered", {}, id="row 2: after it has delivered a group"),
        pytest.param("delivered", SPOOLED, id="row 3: with the group in its spool", marks=pytest.mark.slow),
    ],
)
def test_a_rollout_worker_that_dies(dying, undisturbed, finished, must_equal, print_pause, point, changes):
    process, run_dir, died = dying("rollout-0", point, rollout__replicas=2, **changes)
    out, _ = finished(process, timeout_s=240)
    assert died.exists(), "it did not die"
    assert "rollout-0 died (signal SIGKILL); starting it again" in out
    print_pause(run_dir)
    must_equal(run_dir, undisturbed(), most=0.0)


@pytest.mark.slow
def test_a_rollout_worker_that_is_stopped_loses_its_leases_and_is_killed_and_started_again(
    tmp_path, dying, undisturbed, wait_for, rows_of, finished, must_equal
):
    """Row 5."""
    elastic = {"silence_s": SILENCE_S, "suspect_grace_s": GRACE_S}
    process, run_dir, _ = dying("nobody", "nowhere", paced=True, rollout__replicas=2, elastic=elastic)
    metrics = run_dir / "metrics.jsonl"
    wait_for(lambda: len(rows_of(metrics)) >= AT, "the steps before the stop")
    [hung] = processes_of(run_dir, name="rollout-0")
    os.kill(hung, signal.SIGSTOP)
    before, stopped = len(rows_of(metrics)), time.monotonic()
    wait_for(lambda: len(rows_of(metrics)) > before + 2, "steps without it")
    waited_s = time.monotonic() - stopped
    print(f"next commits {waited_s:.2f} s after the stop")
    assert waited_s < SILENCE_S + GRACE_S + 5.0
    wait_for(lambda: processes_of(run_dir, name="rollout-0") not in ([], [hung]), "its next process")
    (tmp_path / "go").touch()
    out, _ = finished(process, timeout_s=240)
    assert "rollout-0 has not answered for too long and is killed" in " ".join(out.split())
    must_equal(run_dir, undisturbed(), most=0.0)


def test_the_run_goes_on_after_sigterm_at_all_rollout_workers(
    tmp_path, dying, undisturbed, wait_for, rows_of, finished, must_equal
):
    process, run_dir, _ = dying("nobody", "nowhere", paced=True, rollout__replicas=2)
    metrics = run_dir / "metrics.jsonl"
    wait_for(lambda: len(rows_of(metrics)) >= AT, "the steps before the signal")
    for name in ("rollout-0", "rollout-1"):
        [pid] = processes_of(run_dir, name=name)
        os.kill(pid, signal.SIGTERM)
    before = len(rows_of(metrics))
    wait_for(lambda: len(rows_of(metrics)) > before + 2, "steps of another process")
    (tmp_path / "go").touch()
    out, _ = finished(process, timeout_s=240)
    assert "no rollout worker is left: rollout-" in out and "has left on request; starting it again" in out
    must_equal(run_dir, undisturbed(), most=0.0)


def all_below(pid):
    """A process and those below it."""
    children = [child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return [pid, *(below for child in children for below in all_below(int(child)))]


def test_a_run_that_is_stopped_for_longer_than_silence_s_goes_on_where_it_was(
    tmp_path, dying, undisturbed, wait_for, rows_of, finished, must_equal
):
    """Ctrl-Z and fg."""
    elastic = {"silence_s": SILENCE_S, "suspect_grace_s": GRACE_S}
    process, run_dir, _ = dying("nobody", "nowhere", paced=True, elastic=elastic)
    metrics = run_dir / "metrics.jsonl"
    wait_for(lambda: len(rows_of(metrics)) >= AT, "the steps before the stop")
    pids = all_below(process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SILENCE_S + GRACE_S + 1.0)  # the time is the point of the test
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    before = len(rows_of(metrics))
    wait_for(lambda: len(rows_of(metrics)) > before, "the next step", timeout_s=30.0)
    (tmp_path / "go").touch()
    out, _ = finished(process, timeout_s=240)
    assert "starting it again" not in out and "removed" not in out
    must_equal(run_dir, undisturbed(), most=0.0)
