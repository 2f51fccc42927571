"""Rules: how a sample gets from the stream to READY.

A lease is a credit: when the staleness window is full, nothing more is granted and requests wait; nothing
is ever evicted. The first result of a sample wins, whoever brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cosmos_rl_core.control.ledger import events, outputs, records
from cosmos_rl_core.control.ledger.liveness import heeds
from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.ledger.samples import LEASED, PENDING, Sample

if TYPE_CHECKING:
    from cosmos_rl_core.control.ledger.ledger import Ledger


def request_leases(ledger: Ledger, event: events.RequestLeases) -> None:
    """Let the request wait; whatever can be granted is granted in `answer_lease_requests`, right after."""
    if not heeds(ledger, event):
        return
    member = ledger.members.by_name[event.replica]
    if member.role != "rollout" or member.state is not MemberState.READY or event.capacity < 1:
        reason = f"{event.replica} is a {member.state} {member.role} and asks for {event.capacity} leases"
        ledger.say(outputs.Reject(event.replica, event.incarnation, reason))
        return
    ledger.sessions.ask_leases(
        event.replica,
        lineage=event.lineage,
        version=min(event.version, ledger.version),
        capacity=event.capacity,
    )


def answer_lease_requests(ledger: Ledger) -> None:
    """Grant what the window admits, newest weights first, in turns among the replicas that wait."""
    requests = ledger.sessions.lease_requests
    if not requests:
        return
    if (finished := ledger.why_finished()) is not None:
        for name in ledger.sessions.waiting_rollouts():
            ledger.sessions.withdraw(name)
            ledger.say(outputs.NoMore(name, finished))
    if leases_to_grant(ledger, ledger.version) <= 0:  # the newest weights have the most room
        return
    for lineage, version in sorted(requests, reverse=True):
        if lineage == ledger.lineage:
            room = leases_to_grant(ledger, version)
            if room > 0:
                _grant_in_turns(ledger, requests[lineage, version], ledger.window.deadline(version), room)


def leases_to_grant(ledger: Ledger, version: int) -> int:
    """Return how many leases may be granted now to replicas with weights of `version`."""
    deadline = ledger.window.deadline(version)
    room = ledger.window.room(ledger.samples.outstanding, deadline, next_step=ledger.next_step)
    supply = ledger.samples.count(PENDING) + ledger.stream_left()
    return min(room, supply, ledger.places_left())


def is_generated(ledger: Ledger) -> bool:
    """Return whether no lease is out and none is needed, unless a group turns out to be unreadable."""
    if ledger.samples.count(LEASED):
        return False
    return ledger.places_left() <= 0 or not (ledger.samples.count(PENDING) or ledger.stream_left())


def _grant_in_turns(ledger: Ledger, waiting: dict[str, int], deadline: int, room: int) -> None:
    """One lease each in every turn, up to a replica's capacity and its fair share of the window.

    The share keeps the first to ask from taking a whole small window; who has finished his part asks again.
    """
    share = -(-ledger.window.capacity // max(ledger.members.num_ready_rollouts, 1))
    wants = {name: min(capacity, share - len(ledger.samples.held.get(name, ()))) for name, capacity in waiting.items()}
    grants: dict[str, list[outputs.Lease]] = {}
    while room > 0 and (takers := [name for name, wanted in wants.items() if wanted > 0]):
        for name in takers[:room]:
            grants.setdefault(name, []).append(_lease(ledger, name, deadline))
            wants[name] -= 1
        room -= len(takers[:room])
    for name, leases in grants.items():
        ledger.sessions.withdraw(name)
        ledger.say(outputs.Grant(name, tuple(leases)))


def _lease(ledger: Ledger, replica: str, deadline: int) -> outputs.Lease:
    """Lease the lowest pending sample, or the next of the stream."""
    sample = ledger.samples.first_pending()
    attempt = 1 if sample is None else ledger.samples.active[sample].attempt + 1
    lease = outputs.Lease(ledger.samples.next_sample if sample is None else sample, attempt, deadline)
    ledger.decide(records.Leased(lease.sample, replica, attempt, deadline))
    ledger.sessions.renew(lease.sample, ledger.now)
    return lease


def deliver(ledger: Ledger, event: events.Deliver) -> None:
    """Take the first result of a sample, late ones included as far as the window has room for their age."""
    if not heeds(ledger, event):
        return
    if not (ledger.samples.is_issued(event.sample) and 0 <= event.min_version <= event.max_version):
        return _refuse(ledger, event, "no such sample or version")
    entry = ledger.samples.active.get(event.sample)
    if entry is None or entry.state not in (PENDING, LEASED):
        ledger.say(outputs.Ack(event.replica, event.sample))
        return
    if _is_holder(entry, event):
        if ledger.window.deadline(event.min_version) < entry.deadline:
            reason = f"protocol: a term of version {event.min_version} in a group due at step {entry.deadline}"
            _fail(ledger, event.sample, entry, reason, final=False)
            return _refuse(ledger, event, reason)
        deadline = entry.deadline
    else:
        deadline = ledger.window.deadline(min(event.min_version, ledger.version))
        if not _admits_late(ledger, entry, deadline):
            return _refuse(ledger, event, "too late: no step has room for a group of this age")
        if entry.state is LEASED:
            ledger.say(outputs.Cancel(entry.replica, event.sample))
    ledger.sessions.end_lease(event.sample)
    ledger.decide(
        records.Delivered(event.sample, event.replica, deadline, event.min_version, event.max_version, event.num_terms)
    )
    ledger.say(outputs.Ack(event.replica, event.sample))


def _admits_late(ledger: Ledger, entry: Sample, deadline: int) -> bool:
    """Return whether a group of `deadline` fits the window in place of the sample's present lease, if any."""
    others = dict(ledger.samples.outstanding)
    if entry.state is LEASED:
        others[entry.deadline] -= 1
    return ledger.window.admits(others, deadline, next_step=ledger.next_step)


def fail(ledger: Ledger, event: events.Fail) -> None:
    """Try again or drop the sample; only its holder can say so."""
    if not heeds(ledger, event):
        return
    entry = ledger.samples.active.get(event.sample)
    if entry is not None and entry.state is LEASED and _is_holder(entry, event):
        _fail(ledger, event.sample, entry, event.reason, final=event.final)
    ledger.say(outputs.Ack(event.replica, event.sample))


def _fail(ledger: Ledger, sample: int, entry: Sample, reason: str, *, final: bool) -> None:
    ledger.sessions.end_lease(sample)
    if final or entry.failures + 1 >= ledger.config.max_attempts:
        ledger.decide(records.Dropped(sample, reason))
        _check_budgets(ledger, reason)
    else:
        ledger.decide(records.Returned(sample, reason, failed=True))


def _check_budgets(ledger: Ledger, reason: str) -> None:
    """Halt when nothing but drops come: the run would read its stream to the end without training."""
    config = ledger.config
    if ledger.halted is not None:
        return
    if ledger.filtered_in_a_row > config.max_filtered:
        told = (
            f"{ledger.filtered_in_a_row} groups in a row were left out, the last as {reason}; "
            f"max_filtered = {config.max_filtered} are allowed"
        )
    elif ledger.failed_in_a_row > config.max_failed:
        told = (
            f"{ledger.failed_in_a_row} samples in a row failed, the last with: {reason}; "
            f"max_failed = {config.max_failed} are allowed"
        )
    else:
        return
    ledger.decide(records.Halted(told))
    ledger.say(outputs.Halt(told))


def _is_holder(entry: Sample, event: events.Deliver | events.Fail) -> bool:
    return entry.state is LEASED and entry.replica == event.replica and entry.attempt == event.attempt


def _refuse(ledger: Ledger, event: events.Deliver, reason: str) -> None:
    ledger.say(outputs.Reject(event.replica, event.incarnation, reason, event.sample))


RULES: dict[type[events.Event], Callable[..., None]] = {
    events.RequestLeases: request_leases,
    events.Deliver: deliver,
    events.Fail: fail,
}
