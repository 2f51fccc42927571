"""The ledger in 200 simulated runs with faults, and proof that the simulation notices when a rule is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from ledger_simulation import Options, SimulationError, simulate

from cosmos_rl_core.control import inflight
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events, leasing, records, stepping
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.ledger.samples import LEASED, PENDING
from cosmos_rl_core.rollout.staleness import StalenessWindow

SUPPORT = str(Path(__file__).parent / "support")


@pytest.mark.parametrize("block", range(8))
def test_25_runs_with_faults_keep_every_rule(block):
    reports = [simulate(seed, Options.for_seed(seed)) for seed in range(25 * block, 25 * block + 25)]
    assert sum(report.kills for report in reports) > 10
    assert sum(report.crashes for report in reports) > 5
    assert sum(report.reissued for report in reports) > 10
    assert sum(report.losses for report in reports) > 10
    assert sum(report.unheld for report in reports) > 3
    assert sum(report.goodbyes for report in reports) > 10
    assert sum(report.accusations for report in reports) > 1


def test_a_thousand_replicas():
    options = Options(rollouts=1000, policies=4, groups_per_step=128, max_steps=4, faults_until_s=8.0)
    assert simulate(1, options).steps >= 4


SEEDS = int(os.environ.get("SIMULATED_SEEDS", "20000"))
LARGE_SEEDS = int(os.environ.get("LARGE_SIMULATED_SEEDS", "3"))
BLOCK = 500
FIRST = 200  # the default lane has the seeds before


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("start", range(FIRST, FIRST + SEEDS, BLOCK))
def test_four_policies_in_many_runs_with_faults(start):
    seeds = range(start, min(start + BLOCK, FIRST + SEEDS))
    reports = [simulate(seed, replace(Options.for_seed(seed), policies=4)) for seed in seeds]
    assert all(report.steps for report in reports)
    assert sum(report.crashes for report in reports) > len(reports) / 5
    assert sum(report.kills for report in reports) > len(reports) / 2


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(LARGE_SEEDS))
def test_four_policies_and_4096_rollouts(seed):
    options = Options(
        rollouts=4096, policies=4, groups_per_step=512, max_steps=4, faults_until_s=8.0, mean_between_faults_s=0.1
    )
    report = simulate(seed, options)
    assert report.steps >= 4 and report.crashes and report.kills and report.reissued


def test_a_run_replays_bit_for_bit_in_another_process():
    code = "from ledger_simulation import *; print(simulate(11, Options.for_seed(11)).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": SUPPORT},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {simulate(11, Options.for_seed(11)).digest}


def test_runs_differ_by_seed():
    assert simulate(1, Options()).digest != simulate(2, Options()).digest


def test_without_faults_every_group_is_generated_once():
    options = Options(drop=0, duplicate=0, long_delay=0, mean_between_faults_s=1e9, faults_until_s=0.0, max_staleness=0)
    report = simulate(5, options)
    assert (report.steps, report.rollbacks, report.kills) == (16, 0, 0)


def with_interval(seed, *, more_stale):
    options = Options.for_seed(seed)
    interval = 2 + seed % 3
    return replace(options, interval=interval, max_staleness=interval - 1 + more_stale)


@pytest.mark.parametrize("more_stale", [0, 1])
def test_24_runs_end_whose_rollouts_load_every_nth_version(more_stale):
    reports = [simulate(seed, with_interval(seed, more_stale=more_stale)) for seed in range(24)]
    assert sum(report.rollbacks for report in reports) and sum(report.kills for report in reports)


def test_an_interval_above_the_staleness_stands_still():
    with pytest.raises(SimulationError, match="too old for step"):
        simulate(1, Options(interval=3, max_staleness=1))


SENT_ONCE = {"repeats": False, "mean_between_pauses_s": 4.0}
"""Requests are sent once on a connection, and processes stop and go on."""
NO_OTHER_FAULTS = {"mean_between_faults_s": 1e9, "mean_between_losses_s": 1e9}


@pytest.mark.parametrize("counts_pauses", [False, True])
@pytest.mark.parametrize("others", [NO_OTHER_FAULTS, {}])
def test_24_runs_end_whose_processes_stop_and_go_on(others, counts_pauses):
    changes = {**SENT_ONCE, **others, "counts_pauses": counts_pauses}
    reports = [simulate(seed, replace(Options.for_seed(seed), **changes)) for seed in range(24)]
    assert sum(report.pauses for report in reports) > 24


def test_nobody_is_removed_while_the_controller_or_all_are_stopped():
    changes = {**SENT_ONCE, **NO_OTHER_FAULTS, "pauses_of": ("controller", "all", "clock")}
    reports = [simulate(seed, replace(Options.for_seed(seed), **changes)) for seed in range(24)]
    assert sum(report.removed for report in reports) == 0
    assert sum(report.pauses for report in reports) > 24


# --- rules taken away -------------------------------------------------------------------------------


class NoReissue(Ledger):
    """Leases of the lost and of the hung never return."""

    def decide(self, record):
        if not isinstance(record, records.Returned) or record.failed:
            super().decide(record)


class NoExpiry(Ledger):
    """A hung replica keeps its leases as long as its connection lives."""

    def __init__(self, config):
        super().__init__(replace(config, lease_ttl_s=1e9))


class CommitOnFirstVote(Ledger):
    """One vote is enough."""

    @staticmethod
    def vote(ledger, replica, vote):
        batch = ledger.assignment
        if batch is not None and vote.step == batch.step and stepping.is_of_mesh(ledger, replica, vote.epoch):
            ledger.decide(records.Voted(replica, vote.step, vote.epoch))
            stepping.commit(ledger, batch)


CommitOnFirstVote.rules = {**Ledger.rules, p.Vote: CommitOnFirstVote.vote}


class VotesOutliveTheEpoch(Ledger):
    """A vote of an earlier mesh counts for the present one."""

    @staticmethod
    def vote(ledger, replica, vote):
        stepping.vote(ledger, replica, p.Vote(vote.step, ledger.members.epoch))


VotesOutliveTheEpoch.rules = {**Ledger.rules, p.Vote: VotesOutliveTheEpoch.vote}


class NoDedupe(Ledger):
    """A result is taken again when its sample is ready already: the copy becomes a sample of its own."""

    @staticmethod
    def deliver(ledger, replica, group):
        entry = ledger.samples.active.get(group.sample)
        if entry is not None and entry.state not in (PENDING, LEASED):
            fields = (replica, group.min_version, group.min_version, group.max_version, group.num_terms)
            ledger._records.append(records.Delivered(group.sample, *fields))
        leasing.deliver(ledger, replica, group)


NoDedupe.rules = {**Ledger.rules, p.Deliver: NoDedupe.deliver}


class AnyAge(Ledger):
    """The window has room for everything."""

    def __init__(self, config):
        super().__init__(config)
        self.window = EndlessWindow(config.max_staleness, config.groups_per_step)


class EndlessWindow(StalenessWindow):
    def room(self, outstanding, deadline, *, next_step):
        return 10**6

    def select(self, ready, outstanding, *, next_step):
        ids = sorted(sample for samples in ready.values() for sample in samples)
        return tuple(ids[: self.groups_per_step]) if len(ids) >= self.groups_per_step else None


class NoFencing(Ledger):
    """Messages of a replaced process are taken for those of its successor."""

    def on(self, now, event):
        if isinstance(event, events.From | events.Disconnected) and event.replica in self.members.by_name:
            member = self.members.by_name[event.replica]
            if member.is_live:
                event = msgspec.structs.replace(event, incarnation=member.incarnation)
        return super().on(now, event)


class NoGrace(Ledger):
    """A replica whose connection closed stays suspect for ever."""

    def __init__(self, config):
        super().__init__(replace(config, suspect_grace_s=1e9))


class SuspicionTakesRequests(Ledger):
    """A replica that was silent does not get what it has requested."""

    def decide(self, record):
        super().decide(record)
        if isinstance(record, records.Moved) and record.state is MemberState.SUSPECT:
            self.sessions.withdraw(record.replica)


class RollbackKeepsSteps(Ledger):
    """A rollback takes the version back but not the samples of the undone steps."""

    def decide(self, record):
        if isinstance(record, records.RolledBack):
            record = msgspec.structs.replace(record, position=self.position())
        super().decide(record)


class OldLineagesDeliver(Ledger):
    """A group is taken whatever weights it was sampled from."""

    @staticmethod
    def deliver(ledger, replica, group):
        leasing.deliver(ledger, replica, msgspec.structs.replace(group, lineage=ledger.lineage))


OldLineagesDeliver.rules = {**Ledger.rules, p.Deliver: OldLineagesDeliver.deliver}


class RestartTrustsOldConnections(Ledger):
    """After a restart nobody is suspected."""

    @staticmethod
    def restart(ledger, event):
        ledger.decide(records.Restarted(ledger.generation + 1))


RestartTrustsOldConnections.rules = {**Ledger.rules, events.Restart: RestartTrustsOldConnections.restart}


class EveryEpochItsOwnBatch(Ledger):
    """The lost member's step is made up anew from other samples, and the old ones are forgotten."""

    def decide(self, record):
        super().decide(record)
        if isinstance(record, records.Meshed):
            self.assignment = None


class LossesKeepTheEpoch(Ledger):
    """A batch that was taken apart is followed by another one in the same epoch."""

    def decide(self, record):
        super().decide(record)
        if isinstance(record, records.PayloadsLost):
            self.members.epoch -= 1


class LostGroupsStayReady(Ledger):
    """A group that cannot be read is put into the next batch."""

    def decide(self, record):
        super().decide(record)
        if isinstance(record, records.PayloadsLost):
            self.samples.supply(record.samples, record.step)


class ALossTakesTheWholeBatch(Ledger):
    """What could be read is generated again too."""

    def decide(self, record):
        if isinstance(record, records.PayloadsLost):
            whole = records.PayloadsLost(record.step, self.assignment.samples, record.reason)
            self.apply(whole)
            self._records.append(record)
        else:
            super().decide(record)


class UnheldStaysReady(Ledger):
    """Groups that nobody has after a restart are put into batches."""


UnheldStaysReady.rules = {**Ledger.rules, events.GroupsUnheld: lambda ledger, event: None}


MUTANTS = [
    UnheldStaysReady,
    NoReissue,
    NoExpiry,
    CommitOnFirstVote,
    VotesOutliveTheEpoch,
    NoDedupe,
    AnyAge,
    NoFencing,
    NoGrace,
    RollbackKeepsSteps,
    OldLineagesDeliver,
    EveryEpochItsOwnBatch,
    RestartTrustsOldConnections,
    LossesKeepTheEpoch,
    LostGroupsStayReady,
    ALossTakesTheWholeBatch,
]


def first_failure(*, ledger: type[Ledger] = Ledger, **changes) -> int | None:
    for seed in range(60):
        try:
            simulate(seed, replace(Options.for_seed(seed), **changes), ledger=ledger)
        except SimulationError:
            return seed
    return None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_missing_rule_is_noticed_within_60_seeds(mutant):
    assert first_failure(ledger=mutant) is not None


def test_requests_that_a_suspicion_takes_are_noticed_within_60_seeds():
    assert first_failure(ledger=SuspicionTakesRequests, **SENT_ONCE, **NO_OTHER_FAULTS) is not None


def test_a_batch_without_payloads_is_noticed_within_60_seeds(monkeypatch):
    monkeypatch.setattr(inflight.Batches, "missing", lambda batches, samples: ())
    assert first_failure() is not None


def test_the_group_of_another_attempt_is_noticed_within_60_seeds(monkeypatch):
    monkeypatch.setattr(inflight, "_is_of", lambda entry, message, replica: entry is not None)
    assert first_failure() is not None


def test_acknowledging_before_the_journal_is_noticed_within_60_seeds():
    assert first_failure(ack_before_durable=True) is not None


def test_a_failure_says_how_to_see_it_again():
    seed = first_failure(ledger=NoReissue)
    with pytest.raises(SimulationError, match=rf"again: simulate\({seed}, Options\(.*max_staleness"):
        simulate(seed, Options.for_seed(seed), ledger=NoReissue)
