"""Row 19 of the failure matrix: the controller dies before each kind of record is written, and before and after each
kind of message that follows from records is sent. The next one takes the run over, and nothing is lost or doubled."""

import os
import signal

import pytest

from cosmos_rl_core.control.ledger import records

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("dispatch_points")]

OF_A_STEP = (
    "before Leased is written",
    "before Delivered is written",
    "before Assigned is written",
    "before Voted is written",
    "before Commit is written",
    "before Covered is written",
    "before Grant is sent",
    "after Grant is sent",
    "before Ack is sent",
    "after Ack is sent",
    "before Batch is sent",
    "after Batch is sent",
    "before Committed is sent",
    "after Committed is sent",
)
OF_A_MEMBER = (
    "before Moved is written",
    "before Joined is written",
    "before Meshed is written",
    "before Welcome is sent",
    "after Welcome is sent",
    "before Remesh is sent",
    "after Remesh is sent",
)


@pytest.mark.parametrize("point", OF_A_STEP)
def test_the_controller_dies_in_a_step(live, point):
    live.wait_for_members("policy", 2)
    live.strike_controller(point)


@pytest.mark.parametrize("point", OF_A_MEMBER)
def test_the_controller_dies_when_a_policy_goes_or_comes(live, pid_of, point):
    live.wait_for_members("policy", 2)
    live.strike_controller(point, meanwhile=lambda: os.kill(pid_of(live.directory, "policy-1"), signal.SIGKILL))


def test_nothing_was_lost_or_doubled(live, journal_of):
    steps = live.must_have_trained_once()
    commits = [record.step for record in journal_of(live.directory) if isinstance(record, records.Commit)]
    assert commits == list(range(steps))
