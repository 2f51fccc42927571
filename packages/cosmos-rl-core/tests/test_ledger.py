"""The ledger's behaviours. `Play` feeds events and checks after each that the books balance and replay."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledger_play import Play, granted

from cosmos_rl_core.control import protocol as m
from cosmos_rl_core.control.ledger import events, records
from cosmos_rl_core.control.ledger.events import To
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.state import LedgerConfig


def play(**config) -> Play:
    """One policy and one rollout replica, ready."""
    started = Play(**config)
    started.join("policy-0")
    started.join("rollout-0")
    return started


def kinds(said) -> list[str]:
    return [type(output.message if isinstance(output, To) else output).__name__ for output in said]


# --- leases ---------------------------------------------------------------------------------------


def test_without_staleness_exactly_one_batch_is_leased():
    p = play(groups_per_step=3)
    assert [(lease.sample, lease.deadline) for lease in granted(p.ask("rollout-0"))] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    assert p.ask("rollout-0") == []


def test_staleness_leases_that_many_batches_ahead():
    p = play(max_staleness=2)
    assert [lease.deadline for lease in granted(p.ask("rollout-0", capacity=100))] == [2] * 6


def test_a_waiting_request_is_answered_when_there_is_room():
    p = play()
    p.ask("rollout-0")
    assert p.ask("rollout-0", capacity=1) == []
    assert [lease.sample for lease in granted(p.fail("rollout-0", 0, final=True))] == [2]


def test_weights_too_old_for_the_next_step_get_nothing():
    p = play()
    p.train()
    assert p.ask("rollout-0", version=0) == []
    assert "its weights, version 0, are too old for step 1" in p.ledger.waits()[0]
    assert len(granted(p.ask("rollout-0", version=1))) == 2


def test_replicas_that_wait_are_served_in_turns():
    p = Play(groups_per_step=4)
    p.join("policy-0")
    for name in ("rollout-0", "rollout-1"):
        p.join(name)
    assert [lease.sample for lease in granted(p.ask("rollout-0"))] == [0, 1]
    assert [lease.sample for lease in granted(p.ask("rollout-1"))] == [2, 3]


def test_the_end_of_the_stream_is_told_when_no_group_can_be_needed_again():
    p = play(total_samples=2, max_staleness=3)
    p.ask("rollout-0")
    assert p.ask("rollout-0") == []
    p.deliver("rollout-0", 0)
    assert kinds(p.deliver("rollout-0", 1)) == ["Ack"]
    assert p.ledger.waits() == ["rollout-0 waits for leases: every group the run needs is generated"]
    p.batch()
    assert p.vote()[-1] == To("rollout-0", m.NoMore("the stream of 2 samples has ended"))


def test_no_more_is_leased_than_the_steps_need():
    p = play(max_steps=1, max_staleness=3)
    assert len(granted(p.ask("rollout-0"))) == 2


# --- results --------------------------------------------------------------------------------------


def test_a_result_is_acknowledged_and_its_repetition_changes_nothing():
    p = play()
    p.ask("rollout-0")
    assert p.deliver("rollout-0", 0) == [To("rollout-0", m.Ack(0))]
    before = p.ledger.snapshot()
    assert p.deliver("rollout-0", 0) == [To("rollout-0", m.Ack(0))]
    assert p.ledger.snapshot() == before


def test_the_first_result_wins_and_the_other_lease_is_cancelled():
    p = play(groups_per_step=1, lease_ttl_s=5)
    p.join("rollout-1")
    p.ask("rollout-0", capacity=1)
    p.tick(after=6)
    assert granted(p.ask("rollout-1"))[0] == m.LeasedPrompt(sample=0, attempt=2, deadline=0)
    assert p.deliver("rollout-0", 0) == [To("rollout-1", m.Cancel(0)), To("rollout-0", m.Ack(0))]
    assert p.deliver("rollout-1", 0, attempt=2) == [To("rollout-1", m.Ack(0))]


def test_a_late_result_of_a_returned_sample_is_taken():
    p = play(lease_ttl_s=5)
    p.ask("rollout-0", capacity=1)
    p.tick(after=6)
    assert kinds(p.deliver("rollout-0", 0)) == ["Ack"]
    assert p.ledger.counts()["ready"] == 1


def test_a_late_result_that_is_too_old_is_refused():
    p = play(groups_per_step=1, lease_ttl_s=5)
    p.join("rollout-1")
    p.ask("rollout-0", capacity=1)
    p.tick(after=6)
    p.ask("rollout-1", capacity=1)
    p.deliver("rollout-1", 0, attempt=2)
    p.batch()
    p.vote()
    p.ask("rollout-1", version=1, capacity=1)
    p.send("rollout-0", m.Heartbeat(1))
    p.tick(after=6)
    (refused,) = p.deliver("rollout-0", 1, version=0)
    refusal = refused.message
    assert isinstance(refusal, m.Reject) and "too late" in refusal.reason and refusal.sample == 1


def test_terms_older_than_the_lease_allows_are_refused_and_the_sample_returns():
    p = play()
    p.train()
    (first, _) = granted(p.ask("rollout-0", version=1))
    (refused,) = p.deliver("rollout-0", first.sample, version=0, newest=1)
    refusal = refused.message
    assert isinstance(refusal, m.Reject) and "protocol" in refusal.reason
    assert p.ledger.counts()["pending"] == 1


def test_a_sample_never_issued_is_refused():
    p = play()
    assert kinds(p.deliver("rollout-0", 99)) == ["Reject"]


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_is_tried_again_first_and_dropped_after_max_attempts():
    p = play(max_attempts=2)
    p.ask("rollout-0", capacity=1)
    p.fail("rollout-0", 0)
    assert granted(p.ask("rollout-0", capacity=2))[0] == m.LeasedPrompt(sample=0, attempt=2, deadline=0)
    p.fail("rollout-0", 0, attempt=2)
    assert p.ledger.counts()["dropped"] == 1
    assert p.ledger.samples.drop_reasons == {"boom": 1}


def test_a_replica_that_leaves_returns_leases_without_a_failure_and_gets_no_more():
    p = play(max_attempts=1, groups_per_step=2)
    p.join("rollout-1")
    p.ask("rollout-0", capacity=1)
    p.ask("rollout-1", capacity=1)
    p.ask("rollout-0", capacity=1)  # waits: the window is full
    p.send("rollout-0", m.Return(samples=(0, 1, 99)))  # 1 is another replica's, 99 nobody's
    assert p.ledger.samples.leased == {"rollout-1": {1}}
    assert p.ledger.counts()["pending"] == 1, "the waiting request was granted after the return"
    p.ask("rollout-1", capacity=1)  # waits: it has its share of two replicas
    said = p.send("rollout-0", m.Goodbye())
    assert [(lease.sample, lease.attempt) for lease in granted(said)] == [(0, 2)]
    p.deliver("rollout-1", 0, attempt=2)
    assert p.ledger.counts()["ready"] == 1


def test_a_final_error_drops_at_once():
    p = play()
    p.ask("rollout-0")
    assert kinds(p.fail("rollout-0", 0, reason="prompt too long", final=True)) == ["Ack"]
    assert p.ledger.counts()["dropped"] == 1


def test_only_the_holder_can_fail_a_sample():
    p = play()
    p.join("rollout-1")
    p.ask("rollout-0")
    p.fail("rollout-1", 0, final=True)
    assert p.ledger.counts()["dropped"] == 0


def drop_in_turn(p: Play, count: int, reason: str) -> list[events.Output]:
    said: list[events.Output] = []
    for _ in range(count):
        (lease,) = granted(p.ask("rollout-0", capacity=1))
        said = p.fail("rollout-0", lease.sample, attempt=lease.attempt, reason=reason, final=True)
    return said


def test_too_many_errors_in_a_row_halt_the_run_and_name_the_reason():
    p = play(max_failed=2)
    drop_in_turn(p, 2, "no such tool")
    halt = drop_in_turn(p, 1, "no such tool")[0]
    assert isinstance(halt, events.Halt) and "no such tool" in halt.message and "max_failed = 2" in halt.message
    assert p.ask("rollout-0") == []
    assert "halted" in p.ledger.waits()[0]


def test_a_completed_group_forgives_the_errors_before():
    p = play(max_failed=2, max_staleness=9)
    drop_in_turn(p, 2, "boom")
    (lease,) = granted(p.ask("rollout-0", capacity=1))
    p.deliver("rollout-0", lease.sample)
    assert "Halt" not in kinds(drop_in_turn(p, 2, "boom"))


def test_filtered_groups_have_their_own_budget():
    p = play(max_failed=0, max_filtered=2)
    assert "Halt" not in kinds(drop_in_turn(p, 2, "filtered:zero_variance"))
    halt = drop_in_turn(p, 1, "filtered:zero_variance")[0]
    assert isinstance(halt, events.Halt) and "filtered:zero_variance" in halt.message


# --- membership -----------------------------------------------------------------------------------


def test_a_closed_connection_makes_suspect_at_once_and_gone_after_the_grace():
    p = play(suspect_grace_s=2)
    p.ask("rollout-0")
    p.disconnect("rollout-0")
    assert p.ledger.members.by_name["rollout-0"].state == "suspect"
    p.tick(after=1.9)
    assert p.ledger.counts()["leased"] == 2
    p.tick(after=0.2)
    assert p.ledger.members.by_name["rollout-0"].state == "gone"
    assert p.ledger.counts()["pending"] == 2


def test_a_reconnection_within_the_grace_keeps_incarnation_and_leases():
    p = play()
    p.ask("rollout-0")
    p.disconnect("rollout-0")
    (welcome,) = p.on(events.Join("rollout-0", "rollout", 1, (0, 1)), after=1)
    assert welcome == To("rollout-0", m.Welcome(incarnation=1, lineage=0, version=0))
    p.tick(after=5)
    assert p.ledger.counts()["leased"] == 2
    assert p.ledger.members.by_name["rollout-0"].state == "ready"


def test_a_reconnected_replica_keeps_only_what_it_says_it_holds():
    p = play()
    p.ask("rollout-0")
    p.on(events.Join("rollout-0", "rollout", 1, (1,)))
    assert (p.ledger.counts()["leased"], p.ledger.counts()["pending"]) == (1, 1)


def test_a_policy_that_waits_says_that_no_rollout_worker_is_left():
    p = play()
    p.batch()
    p.send("rollout-0", m.Goodbye())
    assert p.ledger.waits() == ["policy-0 waits for batch 0: 0 of 2 groups ready, no rollout worker is connected"]


def test_leases_of_the_lost_are_issued_first_lowest_id_first():
    p = play(max_staleness=3)
    p.join("rollout-1")
    p.ask("rollout-0", capacity=2)
    p.ask("rollout-1", capacity=1)
    p.send("rollout-0", m.Goodbye())
    leases = granted(p.ask("rollout-1", capacity=3))
    assert [(lease.sample, lease.attempt) for lease in leases] == [(0, 2), (1, 2), (3, 1)]


def test_deaths_of_replicas_never_drop_a_sample():
    p = play(max_attempts=1)
    for _ in range(5):
        p.ask("rollout-0")
        p.join("rollout-0")
    assert p.ledger.counts()["dropped"] == 0


def test_words_of_an_older_incarnation_are_fenced():
    p = play()
    p.ask("rollout-0")
    p.join("rollout-0")
    (refused,) = p.send("rollout-0", m.Deliver(0, 1, 0, 0, 10), incarnation=1)
    refusal = refused.message
    assert isinstance(refusal, m.Reject) and refusal.fenced and refusal.sample == 0
    assert p.ledger.counts()["ready"] == 0


def test_a_gone_replica_must_join_anew():
    p = play()
    p.send("rollout-0", m.Goodbye())
    (refused,) = p.on(events.Join("rollout-0", "rollout", 1))
    refusal = refused.message
    assert isinstance(refusal, m.Reject) and refusal.fenced
    assert p.join("rollout-0", ready=False)[0].message.incarnation == 2


def test_silence_makes_suspect_and_a_word_clears():
    p = play(silence_s=10, suspect_grace_s=2)
    p.tick(after=11)
    assert p.ledger.members.by_name["rollout-0"].state == "suspect"
    p.send("rollout-0", m.Heartbeat(1))
    assert p.ledger.members.by_name["rollout-0"].state == "ready"


def test_a_policy_that_was_silent_gets_the_batch_that_it_has_requested():
    p = play(silence_s=10, suspect_grace_s=2)
    p.batch()
    leases = granted(p.ask("rollout-0"))
    p.tick(after=11)  # nobody has sent a heartbeat
    said = [output for lease in leases for output in p.deliver("rollout-0", lease.sample)]
    assert "Batch" in kinds(said)
    p.send("policy-0", m.Heartbeat(1))
    assert p.vote() and p.ledger.version == 1


def test_a_rollout_that_was_silent_gets_the_leases_that_it_has_requested():
    p = play(silence_s=10, suspect_grace_s=2)
    p.ask("rollout-0")
    p.ask("rollout-0", capacity=1)  # no room
    p.tick(after=11)
    assert [lease.sample for lease in granted(p.fail("rollout-0", 0, final=True))] == [2]


def test_a_member_that_stays_silent_is_removed_as_one_that_may_still_run():
    p = play(silence_s=10, suspect_grace_s=2)
    p.tick(after=11)
    p.tick(after=3)
    assert "rollout-0" in p.removed
    assert p.silent == p.removed


def test_a_lease_expires_without_progress_and_lives_with_it():
    p = play(lease_ttl_s=5)
    p.ask("rollout-0")
    p.send("rollout-0", m.Heartbeat(1, holding=(0,)), after=3)
    assert p.tick(after=3) == [To("rollout-0", m.Cancel(1))]
    p.send("rollout-0", m.Heartbeat(1, holding=(0,)))  # the same progress again
    assert p.tick(after=3) == [To("rollout-0", m.Cancel(0))]


def test_a_rollout_that_hangs_gets_no_leases_until_it_makes_progress():
    p = play(lease_ttl_s=5)
    p.ask("rollout-0", capacity=1)
    p.send("rollout-0", m.Heartbeat(1, holding=(0,)), after=1)
    assert kinds(p.tick(after=5)) == ["Cancel"]
    assert p.ask("rollout-0", capacity=2) == []  # its event loop is alive
    assert p.send("rollout-0", m.Heartbeat(1)) == []
    assert p.ledger.waits()[-1] == "rollout-0 gets no leases: it has made no progress for 5 s"
    said = p.send("rollout-0", m.Heartbeat(2), after=4)
    assert [lease.sample for lease in granted(said)] == [0, 1]
    assert p.tick(after=4) == []


def test_a_request_that_waits_for_room_is_held_while_the_rollout_hangs():
    p = play(lease_ttl_s=5)
    p.ask("rollout-0", capacity=2)
    p.ask("rollout-0", capacity=1)  # no room
    p.tick(after=6)
    assert p.ledger.counts()["pending"] == 2
    assert [lease.sample for lease in granted(p.send("rollout-0", m.Heartbeat(1), after=1))] == [0]


def test_a_rollout_that_hangs_is_removed_and_told():
    p = play(lease_ttl_s=5)
    p.join("rollout-1")
    p.ask("rollout-0", capacity=1)
    p.send("rollout-0", m.Heartbeat(0))
    p.tick(after=6)
    for second in range(4):
        p.send("rollout-0", m.Heartbeat(0))
        p.send("rollout-1", m.Heartbeat(second + 1))
        assert p.tick(after=1) == []
    [told] = p.tick(after=1)
    assert told.replica == "rollout-0"
    assert told.message.fenced
    assert told.message.reason.startswith("rollout-0 is removed from the run: it made no progress for 5 s")
    assert p.removed == ["rollout-0"]


def test_a_rollout_that_hangs_in_an_evaluation_is_removed():
    p = play(lease_ttl_s=5)
    for _ in range(11):
        assert p.removed == []
        p.send("rollout-0", m.Heartbeat(0, rows=2), after=1)
        p.tick(after=0)
    assert p.removed == ["rollout-0"]


def test_a_rollout_whose_lease_expires_beside_others_is_not_stuck():
    p = play(lease_ttl_s=5)
    p.ask("rollout-0", capacity=1)
    p.send("rollout-0", m.Heartbeat(1), after=3)  # it makes progress, and does not hold the lease
    assert kinds(p.tick(after=3)) == ["Cancel"]
    assert [lease.sample for lease in granted(p.ask("rollout-0", capacity=1))] == [0]


def test_a_replica_that_is_not_ready_gets_no_leases():
    p = play()
    p.join("rollout-1", ready=False)
    (refused,) = p.ask("rollout-1")
    refusal = refused.message
    assert "joining" in refusal.reason


# --- steps ----------------------------------------------------------------------------------------


def test_the_batch_comes_when_its_last_group_is_ready():
    p = play()
    p.ask("rollout-0")
    assert p.batch() == []
    assert p.ledger.waits() == ["policy-0 waits for batch 0: 0 of 2 groups ready, 2 leased to rollout-0"]
    p.deliver("rollout-0", 1)
    assert p.deliver("rollout-0", 0)[-1] == To("policy-0", m.Batch(0, 1, (0, 1)))


def test_asking_again_gives_the_same_batch():
    p = play(max_staleness=1)
    for lease in granted(p.ask("rollout-0")):
        p.deliver("rollout-0", lease.sample)
    assert p.batch() == p.batch() == [To("policy-0", m.Batch(0, 1, (0, 1)))]


def test_a_step_is_committed_with_the_last_vote():
    p = Play(policy_members=2)
    for name in ("policy-0", "policy-1", "rollout-0"):
        p.join(name)
    for lease in granted(p.ask("rollout-0")):
        p.deliver("rollout-0", lease.sample)
    p.batch()
    assert p.vote("policy-0") == p.vote("policy-0") == []
    assert p.ledger.waits() == ["policy-0 waits for the votes of policy-1 on step 0"]
    assert p.vote("policy-1") == [To("policy-0", m.Committed(0, 2, ())), To("policy-1", m.Committed(0, 2, ()))]
    assert p.ledger.version == 1
    assert p.batch("policy-0", step=0) == [To("policy-0", m.Committed(0, 2, ()))]


def test_training_waits_for_the_expected_policies():
    p = Play(policy_members=2)
    p.join("policy-0")
    assert p.ledger.waits() == ["the run waits for policy replicas: 1 of 2 ready"]
    said = p.join("policy-1")
    assert To("policy-0", m.Remesh(1, ("policy-0", "policy-1"), 0, 0)) in said


def test_a_policy_lost_before_the_commit_starts_a_new_epoch_with_the_same_samples():
    p = Play(policy_members=2)
    for name in ("policy-0", "policy-1", "rollout-0"):
        p.join(name)
    for lease in granted(p.ask("rollout-0")):
        p.deliver("rollout-0", lease.sample)
    p.batch()
    p.vote("policy-0")
    p.disconnect("policy-1")
    assert p.tick(after=3) == [To("policy-0", m.Remesh(2, ("policy-0",), 0, 0))]
    assert kinds(p.send("policy-0", m.Vote(0, 1))) == ["Remesh", "Reject"]
    assert p.batch() == [To("policy-0", m.Batch(0, 2, (0, 1)))]
    assert kinds(p.vote()) == ["Committed"]


# --- policies that leave others ---------------------------------------------------------------------


def test_a_policy_that_leaves_others_need_not_save_and_the_last_one_must():
    p = together(2)
    assert p.send("policy-0", m.Leaving()) == []
    assert p.send("policy-1", m.Heartbeat(1)) == [], "it may have died since it was sent"
    p.tick(after=0.5)
    said = p.send("policy-1", m.Heartbeat(1))
    assert said == [To("policy-0", m.Leave(save=False)), To("policy-1", m.Remesh(2, ("policy-1",), 0, 0))]
    assert p.send("policy-1", m.Leaving()) == [To("policy-1", m.Leave(save=True))]
    assert p.ledger.members.mesh == ("policy-1",), "it stays until it has saved"
    p.send("policy-1", m.Goodbye())
    assert p.ledger.members.mesh == ()


def test_of_policies_that_leave_at_once_the_last_one_saves():
    p = together(3)
    for name in p.ledger.members.mesh:
        assert p.send(name, m.Leaving()) == []
    p.tick(after=1)
    said = p.send("policy-1", m.Heartbeat(1))
    answers = {each.replica: each.message.save for each in said if isinstance(each.message, m.Leave)}
    assert answers == {"policy-0": False, "policy-1": True, "policy-2": False}
    assert p.ledger.members.mesh == ("policy-1",)


def test_a_policy_that_leaves_must_save_if_the_other_one_dies_or_is_a_newcomer():
    p = together(2)
    p.send("policy-1", m.Leaving())
    p.disconnect("policy-0")
    assert p.tick(after=0.5) == [To("policy-1", m.Leave(save=True))]
    p = together(1)
    p.vote()
    p.join("policy-1")
    assert p.ledger.members.mesh == ("policy-0", "policy-1")
    assert p.send("policy-0", m.Leaving()) == [To("policy-0", m.Leave(save=True))]


def test_a_checkpoint_of_a_policy_that_has_left_counts():
    p = together(2)
    for name in p.ledger.members.mesh:
        p.vote(name)
    p.send("policy-0", m.Leaving())
    p.tick(after=1)
    p.send("policy-1", m.Heartbeat(1))
    assert p.ledger.members.mesh == ("policy-1",)
    p.send("policy-0", m.CheckpointDone(step=1, path="step_1"))
    assert p.ledger.checkpoint_version == 1
    assert kinds(p.send("policy-0", m.Heartbeat(1))) == ["Reject"]


# --- policies that hang, or cannot reach one another ------------------------------------------------


def together(count: int, **config) -> Play:
    """A mesh of policies that have the first batch."""
    p = Play(policy_members=count, **config)
    for name in (*(f"policy-{i}" for i in range(count)), "rollout-0"):
        p.join(name)
    for lease in granted(p.ask("rollout-0")):
        p.deliver("rollout-0", lease.sample)
    for i in range(count):
        p.batch(f"policy-{i}")
    return p


def beat(p: Play, progress: dict[str, int], *, waiting=(), after: float = 0.0) -> list[events.Output]:
    """Let time pass, then a heartbeat of each policy, then a tick."""
    p.tick(after=after)
    for name, number in progress.items():
        p.send(name, m.Heartbeat(number, waits_for_peers=name in waiting))
    return p.tick(after=0)


def accuse(p: Play, accuser: str, *suspects: str):
    return p.send(accuser, m.PeersLost(p.ledger.members.epoch, "no connection", suspects))


def test_a_policy_without_progress_is_removed_though_it_sends_heartbeats():
    p = together(2, stall_s=10, silence_s=100, peer_s=100)
    for second in range(1, 10):
        assert beat(p, {"policy-0": second, "policy-1": 1}, after=1) == []
    beat(p, {"policy-0": 10, "policy-1": 1}, after=1)
    removed, meshed = p.tick(after=1)
    assert removed.replica == "policy-1" and removed.message.fenced
    assert removed.message.reason == "policy-1 is removed from the run: it made no progress for 10 s"
    assert meshed == To("policy-0", m.Remesh(2, ("policy-0",), 0, 0))
    assert kinds(p.send("policy-1", m.Heartbeat(2))) == ["Reject"]
    assert kinds(p.batch()) == ["Batch"]


def test_a_policy_that_waits_for_its_peers_is_not_removed():
    p = together(2, stall_s=10, silence_s=100, peer_s=1000)
    for second in range(20):
        beat(p, {"policy-0": 1, "policy-1": second}, waiting=("policy-0",), after=1)
    assert p.ledger.members.mesh == ("policy-0", "policy-1")


def test_a_mesh_whose_members_all_wait_for_one_another_connects_anew():
    p = together(2, stall_s=1000, silence_s=100, peer_s=10)
    both = ("policy-0", "policy-1")

    def seconds_of_epoch():
        epoch = p.ledger.members.epoch
        for second in range(1, 100):
            beat(p, dict.fromkeys(both, p.ledger.members.epoch), waiting=both, after=1)
            if p.ledger.members.epoch > epoch:
                return second
        return None

    assert seconds_of_epoch() == 1 + 5, "a cut in a step is found after half of peer_s"
    assert p.ledger.members.mesh == both
    assert seconds_of_epoch() == 1 + 5 + 3, "members that connect report first, after the other half"
    for name in both:
        p.batch(name)
    assert seconds_of_epoch() == 1 + 5


def test_of_two_policies_that_accuse_each_other_the_newer_one_is_removed():
    p = together(2)
    assert accuse(p, "policy-1", "policy-0") == accuse(p, "policy-0", "policy-1") == []
    assert p.tick(after=0.5) == []
    said = p.tick(after=1)
    assert said[0].replica == "policy-1" and said[0].message.fenced
    assert "policy-0 cannot reach it" in said[0].message.reason
    assert p.ledger.members.mesh == ("policy-0",)


def test_a_policy_that_most_others_accuse_is_removed():
    p = together(4)
    for accuser, accused in (("policy-0", "policy-1"), ("policy-1", "policy-0"), ("policy-2", "policy-0")):
        accuse(p, accuser, accused)
    p.tick(after=2)
    assert p.ledger.members.mesh == ("policy-1", "policy-2", "policy-3")


def test_accusations_end_with_the_epoch():
    p = together(3)
    accuse(p, "policy-0", "policy-1")
    p.disconnect("policy-2")
    p.tick(after=3)
    assert p.ledger.members.mesh == ("policy-0", "policy-1")
    p.tick(after=3)
    assert p.ledger.members.mesh == ("policy-0", "policy-1")


def test_a_mesh_that_connects_anew_again_and_again_goes_on_without_its_newest_member():
    p = together(3)
    for epoch in (2, 3, 4):
        accuse(p, "policy-0")
        assert p.ledger.members.epoch == epoch
    said = accuse(p, "policy-0")
    assert said[0].replica == "policy-2" and "no step with the others succeeds" in said[0].message.reason
    assert p.ledger.members.mesh == ("policy-0", "policy-1")


def test_a_mesh_that_connects_anew_again_and_again_goes_on_without_the_member_that_hangs():
    p = together(2, stall_s=1000, silence_s=100, peer_s=1000)
    for second in range(4):
        beat(p, {"policy-0": 1, "policy-1": second}, waiting=("policy-1",), after=1)
        said = accuse(p, "policy-1")
    assert said[0].replica == "policy-0" and "no step with the others succeeds" in said[0].message.reason
    assert p.ledger.members.mesh == ("policy-1",)


def test_a_new_policy_joins_between_two_steps():
    p = play()
    for lease in granted(p.ask("rollout-0")):
        p.deliver("rollout-0", lease.sample)
    p.batch()
    assert kinds(p.join("policy-1")) == ["Welcome"]
    assert kinds(p.vote()) == ["Committed", "Remesh", "Remesh"]


def test_steps_end_with_max_steps():
    p = play(max_steps=2)
    p.train(steps=2)
    assert p.batch() == [To("policy-0", m.NoMore("all 2 steps are done"))]
    assert p.send("policy-0", m.Goodbye()) == []


def test_a_stream_that_cannot_fill_a_batch_ends_the_run():
    p = play(total_samples=3)
    p.train()
    p.ask("rollout-0", version=1)
    p.deliver("rollout-0", 2, version=1)
    assert p.batch() == [To("policy-0", m.NoMore("the stream of 3 samples has ended"))]


def test_staleness_of_the_last_batch_is_told():
    p = play(max_staleness=1)
    for lease in granted(p.ask("rollout-0")):
        p.deliver("rollout-0", lease.sample)
    p.batch()
    p.vote()
    p.batch()
    assert p.ledger.staleness == (1.0, 1)


def test_supervised_batches_need_no_rollouts():
    p = Play(rollouts=False, total_samples=5)
    p.join("policy-0")
    assert p.batch() == [To("policy-0", m.Batch(0, 1, (0, 1)))]
    p.vote()
    p.batch()
    p.vote()
    assert kinds(p.batch()) == ["NoMore"]
    assert p.ledger.counts()["committed"] == 4


# --- groups that cannot be read -------------------------------------------------------------------


def assigned(**config) -> Play:
    """A batch of samples 0 and 1 in work."""
    p = play(**config)
    for lease in granted(p.ask("rollout-0", capacity=2)):
        p.deliver("rollout-0", lease.sample)
    p.batch()
    return p


def test_a_group_that_cannot_be_read_is_generated_again_and_the_step_made_up_anew():
    p = assigned()
    assert p.lose(1) == [To("policy-0", m.Remesh(2, ("policy-0",), 0, 0))]
    counts = p.ledger.counts()
    assert (counts["pending"], counts["ready"], counts["assigned"]) == (1, 1, 0)
    assert p.batch() == []
    assert p.ledger.waits() == ["policy-0 waits for batch 0: 1 of 2 groups ready, 1 to be leased again"]
    assert granted(p.ask("rollout-0")) == [m.LeasedPrompt(1, 2, 0)]
    assert p.deliver("rollout-0", 1, attempt=2)[-1] == To("policy-0", m.Batch(0, 2, (0, 1)))
    assert kinds(p.vote()) == ["Committed"]
    assert p.ledger.num_lost == 1


def test_a_request_that_waits_gets_the_lost_sample_at_once():
    p = assigned(max_steps=1)
    assert p.ask("rollout-0") == []
    assert granted(p.lose(0)) == [m.LeasedPrompt(0, 2, 0)]


def test_another_group_that_is_ready_takes_the_place_of_the_lost_one():
    p = play(max_staleness=1)
    for lease in granted(p.ask("rollout-0")):
        p.deliver("rollout-0", lease.sample)
    p.batch()
    p.lose(0)
    assert p.batch() == [To("policy-0", m.Batch(0, 2, (1, 2)))]


def test_a_loss_voids_the_votes_of_all_members():
    p = Play(policy_members=2)
    for name in ("policy-0", "policy-1", "rollout-0"):
        p.join(name)
    for lease in granted(p.ask("rollout-0")):
        p.deliver("rollout-0", lease.sample)
    p.batch()
    p.vote("policy-1")
    members = ("policy-0", "policy-1")
    assert p.lose(0) == [To(name, m.Remesh(2, members, 0, 0)) for name in members]
    assert kinds(p.send("policy-1", m.Vote(0, 1))) == ["Remesh", "Reject"]
    assert p.ledger.votes == ()


def test_a_loss_told_twice_counts_once():
    p = assigned()
    p.lose(1)
    assert kinds(p.lose(1, epoch=1)) == ["Remesh", "Reject"]
    assert p.ledger.num_lost == 1


def test_what_is_not_in_the_batch_cannot_be_lost():
    p = assigned()
    assert [output.message.reason for output in p.lose(7)] == ["samples [7] are not in the batch of step 0"]
    assert p.ledger.counts()["assigned"] == 2


def test_losses_in_a_row_halt_the_run_and_name_the_reason():
    p = assigned(max_losses=1)
    p.lose(0)
    [lease] = granted(p.ask("rollout-0"))
    p.deliver("rollout-0", lease.sample, attempt=lease.attempt)
    p.batch()
    halt = p.lose(0, reason="no route to host")[-1]
    assert isinstance(halt, events.Halt)
    assert "no route to host" in halt.message and "max_losses = 1" in halt.message


def test_a_commit_ends_a_row_of_losses():
    p = assigned(max_losses=1)
    p.lose(0)
    p.train()
    for lease in granted(p.ask("rollout-0", version=1)):
        p.deliver("rollout-0", lease.sample, attempt=lease.attempt, version=1)
    p.batch()
    assert kinds(p.lose(p.ledger.assignment.samples[0])) == ["Remesh"]


# --- checkpoints, rollback, restart ---------------------------------------------------------------


def test_a_checkpoint_settles_the_steps_below_its_version():
    p = play()
    p.train(steps=3)
    p.checkpoint(2)
    assert (p.ledger.counts()["checkpointed"], p.ledger.counts()["committed"]) == (4, 2)
    assert kinds(p.deliver("rollout-0", 0)) == ["Ack"]


def test_losing_all_policies_rolls_back_to_the_checkpoint():
    p = play(max_staleness=1)
    p.train(steps=3)
    p.checkpoint(1)
    assert p.send("policy-0", m.Goodbye()) == [events.PoliciesLost(1)]
    assert p.removed == ["policy-0"]
    assert "rollback to version 1" in p.ledger.waits()[0]
    p.roll_back(1)
    assert (p.ledger.version, p.ledger.lineage) == (1, 1)
    p.join("policy-0")
    again = granted(p.ask("rollout-0", version=1, lineage=1))
    assert [lease.sample for lease in again] == [2, 3, 4, 5]
    for lease in again:
        p.deliver("rollout-0", lease.sample, attempt=lease.attempt, version=1, lineage=1)
    first = p.batch()[0].message
    assert isinstance(first, m.Batch) and (first.step, first.samples) == (1, (2, 3))


def test_losing_all_policies_right_after_a_checkpoint_keeps_the_groups():
    p = play(max_staleness=1)
    p.train(steps=1)
    p.checkpoint(1)
    p.batch()
    assert p.ledger.counts()["assigned"] == 2
    p.roll_back(1)
    assert p.ledger.counts() == {**dict.fromkeys(p.ledger.counts(), 0), "issued": 4, "ready": 2, "checkpointed": 2}


def test_one_policy_continues_after_the_loss_of_all():
    p = Play(policy_members=2)
    for name in ("policy-0", "policy-1", "rollout-0"):
        p.join(name)
    for name in ("policy-0", "policy-1"):
        p.send(name, m.Goodbye())
    p.roll_back(0)
    assert p.ledger.waits()[0] == "the run waits for policy replicas: 0 of 1 ready"
    assert [message for message in p.join("policy-1") if isinstance(message.message, m.Remesh)]
    assert p.ledger.members.mesh == ("policy-1",)


def test_a_newcomer_that_may_lack_the_weights_does_not_continue_alone():
    p = play()
    p.train(steps=2)
    p.join("policy-1")
    assert p.ledger.members.mesh == ("policy-0", "policy-1")
    assert p.on(events.Gone("policy-0", p.incarnations["policy-0"])) == [events.PoliciesLost(0)]
    assert p.ledger.members.mesh == ()


def test_a_newcomer_is_not_in_the_mesh_after_the_last_step():
    """The others leave, and it would wait for their weights."""
    p = play(max_steps=2)
    p.train(steps=2)
    assert not [message for message in p.join("policy-1") if isinstance(message.message, m.Remesh)]
    assert p.ledger.members.mesh == ("policy-0",)


def test_a_newcomer_has_the_weights_after_a_commit():
    p = play()
    p.train(steps=2)
    p.join("policy-1")
    for lease in granted(p.ask("rollout-0", version=2)):
        p.deliver("rollout-0", lease.sample, version=2)
    for act in (p.batch, p.vote):
        for name in ("policy-0", "policy-1"):
            act(name, step=2)
    assert p.ledger.version == 3
    p.on(events.Gone("policy-0", p.incarnations["policy-0"]))
    assert p.ledger.members.mesh == ("policy-1",)


def test_a_rollback_behind_steps_issues_their_samples_again():
    p = play()
    p.train(steps=1)
    p.roll_back(0)
    assert p.ledger.counts() == dict.fromkeys(p.ledger.counts(), 0)
    assert [(lease.sample, lease.attempt) for lease in granted(p.ask("rollout-0", lineage=1))] == [(0, 2), (1, 2)]


def test_samples_dropped_after_a_checkpoint_are_issued_again_and_those_before_are_not():
    p = play()
    for version in (0, 1):
        [dropped, trained] = granted(p.ask("rollout-0", version=version))
        p.fail("rollout-0", dropped.sample, final=True)
        p.deliver("rollout-0", trained.sample, version=version)
        p.train(steps=1)
        p.checkpoint(1)
    assert (p.ledger.version, p.ledger.counts()["dropped"]) == (2, 2)
    p.roll_back(1)
    assert p.ledger.counts() | {"dropped": 1, "checkpointed": 2, "pending": 0} == p.ledger.counts()
    assert [lease.sample for lease in granted(p.ask("rollout-0", version=1, lineage=1))] == [3, 4]


@pytest.mark.parametrize("rollouts", [True, False], ids=["RL", "supervised"])
def test_without_checkpoints_the_ledger_does_not_grow_with_the_steps(rollouts):
    ledger = Ledger(LedgerConfig(groups_per_step=2, rollouts=rollouts))
    p = Play(ledger=ledger)
    p.join("policy-0")
    p.join("rollout-0")

    def sizes_after(steps: int) -> tuple[int, int]:
        for step in range(ledger.version, ledger.version + steps):
            request = events.From("rollout-0", 1, m.RequestLeases(step, 2))
            for lease in granted(ledger.on(0.0, request)[1]) if rollouts else []:
                group = m.Deliver(lease.sample, lease.attempt, step, step, 10)
                ledger.on(0.0, events.From("rollout-0", 1, group))
            for message in (m.RequestBatch(step, ledger.members.epoch), m.Vote(step, ledger.members.epoch)):
                ledger.on(0.0, events.From("policy-0", 1, message))
        return len(ledger.samples.active), len(ledger.snapshot())

    few, many = sizes_after(300), sizes_after(3000)
    assert ledger.counts()["committed"] == 6600
    assert many[0] == few[0] <= 2
    assert many[1] <= few[1] + 50  # larger numbers, not more of them
    ledger.on(0.0, events.Rollback(records.Position(version=0, next_sample=0)))
    assert ledger.counts() == dict.fromkeys(ledger.counts(), 0)


def test_weights_of_an_abandoned_lineage_get_no_leases():
    p = play()
    p.train(steps=2)
    p.roll_back(0)
    assert p.ask("rollout-0", version=2, lineage=0) == []
    assert "it holds weights of lineage 0" in p.ledger.waits()[0]
    assert len(granted(p.ask("rollout-0", version=0, lineage=1))) == 2


def test_groups_in_work_during_a_rollback_are_generated_again():
    p = play()
    p.train(steps=2)
    p.checkpoint(1)
    [four, _] = granted(p.ask("rollout-0", version=2))
    p.roll_back(1)
    assert p.ledger.counts()["leased"] == 0
    late = p.deliver("rollout-0", four.sample, version=2)
    assert kinds(late) == ["Reject"]
    again = granted(p.ask("rollout-0", version=1, lineage=1))
    assert [(lease.sample, lease.attempt) for lease in again] == [(2, 2), (3, 2)]


def test_a_process_that_has_ended_is_not_waited_for():
    p = play(suspect_grace_s=60)
    assert len(granted(p.ask("rollout-0"))) == 2
    p.join("rollout-1")
    p.on(events.Gone("rollout-0", 1))
    assert [lease.sample for lease in granted(p.ask("rollout-1"))] == [0, 1]


def test_a_checkpoint_of_an_abandoned_lineage_covers_nothing():
    p = play()
    p.train(steps=2)
    p.roll_back(0)
    p.checkpoint(0, lineage=0)
    assert p.ledger.counts()["checkpointed"] == 0


def test_a_rollback_behind_the_checkpoint_is_refused():
    p = play()
    p.train(steps=2)
    p.checkpoint(2)
    with pytest.raises(ValueError, match="older checkpoint"):
        p.roll_back(1)


def test_a_resumed_run_goes_on_where_the_checkpoint_stands():
    p = play(max_staleness=1)
    p.train(steps=1)
    position = p.ledger.position()
    assert position == records.Position(version=1, next_sample=4, unfinished=(2, 3))
    ledger, record = Ledger.resume(p.ledger.config, position)
    assert Ledger.restore(p.ledger.config, None, [record]) == ledger
    resumed = Play(ledger=ledger)
    resumed.join("rollout-0")
    assert [lease.sample for lease in granted(resumed.ask("rollout-0", version=1))] == [2, 3, 4, 5]


def test_a_restarted_controller_suspects_all_until_they_are_back():
    p = play()
    p.ask("rollout-0")
    p.batch()
    p.ledger, p.now = Ledger.restore(p.ledger.config, None, p.journal), 0.0
    p.on(events.Restart())
    assert p.ledger.generation == 1
    p.on(events.Join("rollout-0", "rollout", 1, (0, 1)))
    said = p.on(events.Join("policy-0", "policy", 1))
    assert kinds(said) == ["Welcome", "Remesh"]
    p.tick(after=5)
    p.deliver("rollout-0", 0)
    p.deliver("rollout-0", 1)
    assert kinds(p.batch()) == ["Batch"]


# --- any order of any words -----------------------------------------------------------------------

POLICIES, ROLLOUTS = ("policy-0", "policy-1"), ("rollout-0", "rollout-1")


class AnyOrder(RuleBasedStateMachine):
    """Sensible and senseless words in any order: the books balance, replay, and keep the staleness bound."""

    def __init__(self) -> None:
        super().__init__()
        self.p = Play(groups_per_step=2, max_staleness=1, max_steps=6, lease_ttl_s=5, silence_s=9)

    @rule(replica=st.sampled_from(POLICIES + ROLLOUTS), known=st.booleans())
    def join(self, replica, known):
        role = "policy" if replica in POLICIES else "rollout"
        self.p.on(events.Join(replica, role, self.p.incarnations.get(replica, 0) if known else 0))

    @precondition(lambda self: self.p.incarnations)
    @rule(
        data=st.data(),
        message=st.sampled_from([m.Ready(), m.Heartbeat(), m.Goodbye(), None]),
    )
    def member_word(self, data, message):
        replica = data.draw(st.sampled_from(sorted(self.p.incarnations)))
        if message is None:
            self.p.disconnect(replica)
        else:
            self.p.send(replica, message)

    @precondition(lambda self: self.p.incarnations)
    @rule(data=st.data(), version=st.integers(0, 6), capacity=st.integers(1, 4))
    def ask(self, data, version, capacity):
        replica = data.draw(st.sampled_from(sorted(self.p.incarnations)))
        self.p.ask(replica, version=version, capacity=capacity, lineage=self.p.ledger.lineage)

    @precondition(lambda self: self.p.incarnations)
    @rule(data=st.data(), sample=st.integers(0, 12), attempt=st.integers(1, 3), age=st.integers(0, 3))
    def deliver(self, data, sample, attempt, age):
        replica = data.draw(st.sampled_from(sorted(self.p.incarnations)))
        version = max(self.p.ledger.version - age, 0)
        self.p.deliver(replica, sample, attempt=attempt, version=version)

    @precondition(lambda self: self.p.incarnations)
    @rule(data=st.data(), sample=st.integers(0, 12), attempt=st.integers(1, 3), final=st.booleans())
    def fail(self, data, sample, attempt, final):
        replica = data.draw(st.sampled_from(sorted(self.p.incarnations)))
        self.p.fail(replica, sample, attempt=attempt, final=final)

    @precondition(lambda self: self.p.incarnations)
    @rule(data=st.data(), ahead=st.integers(-1, 1), votes=st.booleans())
    def step_word(self, data, ahead, votes):
        replica = data.draw(st.sampled_from(sorted(self.p.incarnations)))
        kind = m.Vote if votes else m.RequestBatch
        self.p.send(replica, kind(self.p.ledger.version + ahead, self.p.ledger.members.epoch))

    @precondition(lambda self: self.p.ledger.assignment and self.p.ledger.losses_in_a_row < 8)
    @rule(data=st.data())
    def lose(self, data):
        ledger = self.p.ledger
        replica = data.draw(st.sampled_from(ledger.members.mesh))
        samples = data.draw(st.sets(st.sampled_from(ledger.assignment.samples), min_size=1))
        self.p.lose(*samples, replica=replica)
        assert ledger.assignment is None

    @rule(after=st.floats(0, 6))
    def tick(self, after):
        self.p.tick(after=after)

    @precondition(lambda self: "policy-0" in self.p.incarnations)
    @rule(version=st.integers(0, 6))
    def checkpointed(self, version):
        self.p.checkpoint(version, lineage=self.p.ledger.lineage)

    @rule()
    def rollback(self):
        self.p.roll_back(self.p.ledger.checkpoint_version)

    @invariant()
    def staleness_is_bounded(self):
        assert self.p.ledger.staleness[1] <= 1

    @invariant()
    def every_outstanding_group_can_be_consumed_in_time(self):
        outstanding = self.p.ledger.samples.outstanding
        for bound in outstanding:
            due = sum(count for deadline, count in outstanding.items() if deadline <= bound)
            assert due <= (bound - self.p.ledger.next_step + 1) * 2


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
