"""One run of two policies and two rollout workers, in which each test kills or stops a process at a named point.

The run goes on each time. In the end every sample was trained once, at the step of a run that nobody disturbed: with
max_staleness = 0 a sample that was lost, doubled or trained late would be at another step.
"""

import faults
import pytest

pytestmark = pytest.mark.xdist_group("live_run")


def test_a_policy_dies_in_the_reduce(live):
    live.strike_policy("in the reduce", "policy-1")


def test_a_rollout_dies_while_it_generates(live):
    live.strike_rollout("while it generates", "rollout-0")


def test_the_controller_dies_before_a_commit_is_written(live):
    live.strike_controller("before Commit is written")


def test_the_controller_dies_with_a_commit_that_nobody_knows_of(live):
    live.strike_controller("before Committed is sent")


def test_the_first_policy_dies_before_its_vote(live):
    live.strike_policy("before the vote", faults.LEADER)


def test_a_rollout_dies_while_it_is_idle(live):
    live.strike_rollout("while it is idle", "rollout-1")


def test_the_controller_dies_after_a_grant(live):
    live.strike_controller("after Grant is sent")


def test_a_rollout_dies_with_its_group_delivered(live):
    live.strike_rollout("after it has delivered", "rollout-0")


def test_a_policy_dies_after_its_vote(live):
    live.strike_policy("after the vote", "policy-1")


def test_a_rollout_that_is_stopped_is_removed_killed_and_started_again(live, pid_of):
    live.wait_for_members("rollout", 2)
    stopped = pid_of(live.directory, "rollout-1")
    live.strike_rollout("while it generates", "rollout-1", faults.STOP)
    live.wait(lambda: pid_of(live.directory, "rollout-1") not in (None, stopped), "its next process")


def test_the_controller_dies_when_one_of_two_policies_knows_of_a_commit(live):
    live.wait_for_members("policy", 2)
    live.strike_controller("after Committed is sent")


def test_in_the_end_every_sample_was_trained_once(live):
    live.must_have_trained_once()
