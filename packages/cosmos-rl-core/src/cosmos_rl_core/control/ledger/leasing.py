"""Rules of leasing: from the stream to READY.

While the staleness window is full, requests for leases wait; no group is ever evicted. The first result of a sample
is accepted, from any replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import records
from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.ledger.samples import LEASED, PENDING, Sample
from cosmos_rl_core.control.ledger.state import LedgerState


def request_leases(ledger: LedgerState, replica: str, message: p.RequestLeases) -> None:
    """Queue the request; `answer_lease_requests` grants it directly afterwards as far as possible."""
    member = ledger.members.by_name[replica]
    if member.role != "rollout" or member.state is not MemberState.READY or message.capacity < 1:
        reason = f"{replica} is a {member.state} {member.role} and requests {message.capacity} leases"
        return ledger.reject(replica, reason)
    session = ledger.sessions.by_name[replica]
    if session.stuck_since is not None:
        session.deferred = message
        return
    ledger.sessions.queue_lease_request(
        replica,
        lineage=message.lineage,
        version=min(message.version, ledger.version),
        capacity=message.capacity,
    )


def answer_lease_requests(ledger: LedgerState) -> None:
    """Grant the leases that the window admits, newest weights first, round-robin over the waiting replicas."""
    sessions = ledger.sessions
    if not sessions.waiting:
        return
    if (finished := ledger.why_finished()) is not None:
        for name in list(sessions.waiting):
            sessions.withdraw(name)
            ledger.send(name, p.NoMore(finished))
    if leases_to_grant(ledger, ledger.version) <= 0:  # the newest weights have the most room
        return
    sessions.use_share(-(-ledger.window.capacity // max(ledger.members.num_ready_rollouts, 1)))
    for lineage, version in sorted(sessions.lease_requests, reverse=True):
        if lineage == ledger.lineage:
            room = leases_to_grant(ledger, version)
            if room > 0:
                requested = _first_in_queue(ledger, sessions.lease_requests[lineage, version], room)
                _grant_in_turns(ledger, requested, ledger.window.deadline(version), room)


def leases_to_grant(ledger: LedgerState, version: int) -> int:
    """Return the number of leases that may be granted now to replicas with weights of `version`."""
    deadline = ledger.window.deadline(version)
    room = ledger.window.room(ledger.samples.outstanding, deadline, next_step=ledger.next_step)
    supply = ledger.samples.by_state[PENDING] + ledger.stream_left()
    return min(room, supply, ledger.groups_needed())


def is_generated(ledger: LedgerState) -> bool:
    """Return whether no lease is open and none is needed, unless a group turns out to be unreadable."""
    if ledger.samples.by_state[LEASED]:
        return False
    return ledger.groups_needed() <= 0 or not (ledger.samples.by_state[PENDING] or ledger.stream_left())


def _first_in_queue(ledger: LedgerState, queue: dict[str, int], room: int) -> dict[str, int]:
    """Return how many leases each of the first `room` replicas that can take some wants.

    A replica wants its capacity, up to its fair share of the window: the share prevents the first requester from
    taking a whole small window. Those that hold their share are set aside, so that no later event visits them.
    """
    counts: dict[str, int] = {}
    full: list[str] = []
    for name, capacity in queue.items():
        if len(counts) == room:
            break
        left = ledger.sessions.share - len(ledger.samples.leased.get(name, ()))
        if left > 0:
            counts[name] = min(capacity, left)
        else:
            full.append(name)
    for name in full:
        ledger.sessions.set_aside(name)
    return counts


def _grant_in_turns(ledger: LedgerState, counts: dict[str, int], deadline: int, room: int) -> None:
    """Grant one lease per replica and turn. A replica that finishes requests again."""
    grants: dict[str, list[p.LeasedPrompt]] = {}
    while room > 0 and (takers := [name for name, count in counts.items() if count > 0]):
        for name in takers[:room]:
            if (lease := _lease(ledger, name, deadline)) is None:
                room = 0
                break
            grants.setdefault(name, []).append(lease)
            counts[name] -= 1
            room -= 1
    for name, leases in grants.items():
        ledger.sessions.withdraw(name)
        ledger.send(name, p.Grant(tuple(leases)))


def _lease(ledger: LedgerState, replica: str, deadline: int) -> p.LeasedPrompt | None:
    """Lease the lowest pending sample, or the stream's next one that is selected; None where the stream ends before."""
    sample = ledger.samples.first_pending()
    if sample is None and not _skip_rows(ledger):
        return None
    attempts = ledger.samples.attempts_before if sample is None else ledger.samples.active[sample].attempt
    attempt = attempts + 1
    lease = p.LeasedPrompt(ledger.samples.next_sample if sample is None else sample, attempt, deadline)
    ledger.decide(records.Leased(lease.sample, replica, attempt, deadline))
    ledger.sessions.renew([lease.sample], ledger.now)
    return lease


def _skip_rows(ledger: LedgerState) -> bool:
    """Skip the samples before the next one that the curriculum selects; return whether the stream has one."""
    curriculum, samples = ledger.config.curriculum, ledger.samples
    while curriculum is not None and ledger.stream_left():
        if curriculum.selects(ledger.successes, samples.next_sample):
            break
        ledger.decide(records.Skipped(samples.next_sample))
    return ledger.stream_left() > 0


def deliver(ledger: LedgerState, replica: str, group: p.Deliver) -> None:
    """Accept the first result of a sample; a late one only if the window has room for its age."""
    sample = group.sample
    is_issued = 0 <= sample < ledger.samples.next_sample
    if not (is_issued and 0 <= group.min_version <= group.max_version):
        return ledger.reject(replica, "no such sample or version", sample)
    entry = ledger.samples.active.get(sample)
    if entry is None or entry.state not in (PENDING, LEASED):
        return ledger.send(replica, p.Ack(sample))
    if group.lineage != ledger.lineage:
        reason = f"sampled from weights of lineage {group.lineage}; the run is on lineage {ledger.lineage}"
        return ledger.reject(replica, reason, sample)
    if _is_holder(entry, replica, group):
        if ledger.window.deadline(group.min_version) < entry.deadline:
            reason = f"protocol: a term of version {group.min_version} in a group due at step {entry.deadline}"
            _fail(ledger, sample, entry, reason, final=False)
            return ledger.reject(replica, reason, sample)
        deadline = entry.deadline
    else:
        deadline = ledger.window.deadline(min(group.min_version, ledger.version))
        if not _admits_late(ledger, entry, deadline):
            return ledger.reject(replica, "too late: no step has room for a group of this age", sample)
        if entry.state is LEASED:
            ledger.send(entry.replica, p.Cancel(sample))
    ledger.sessions.end_lease(sample, entry.replica)
    versions = (group.min_version, group.max_version)
    ledger.decide(records.Delivered(sample, replica, deadline, *versions, group.num_terms, group.mean_reward))
    ledger.send(replica, p.Ack(sample))


def _admits_late(ledger: LedgerState, entry: Sample, deadline: int) -> bool:
    """Return whether a group of `deadline` fits the window in place of the sample's current lease, if any."""
    others = dict(ledger.samples.outstanding)
    if entry.state is LEASED:
        others[entry.deadline] -= 1
    return ledger.window.admits(others, deadline, next_step=ledger.next_step)


def fail(ledger: LedgerState, replica: str, message: p.Failed) -> None:
    """Return the sample for another attempt, or drop it; only the holder of its lease can fail it."""
    entry = ledger.samples.active.get(message.sample)
    if entry is not None and _is_holder(entry, replica, message):
        _fail(ledger, message.sample, entry, message.reason, final=message.final, mean_reward=message.mean_reward)
    ledger.send(replica, p.Ack(message.sample))


def return_leases(ledger: LedgerState, replica: str, message: p.Return) -> None:
    """Return leases of a replica that leaves, and withdraw its waiting request."""
    ledger.sessions.withdraw(replica)
    if (session := ledger.sessions.by_name.get(replica)) is not None:
        session.deferred = None
    for sample in sorted(ledger.samples.leased.get(replica, set()).intersection(message.samples)):
        ledger.sessions.end_lease(sample, replica)
        ledger.decide(records.Returned(sample, f"{replica} leaves"))


def _fail(
    ledger: LedgerState, sample: int, entry: Sample, reason: str, *, final: bool, mean_reward: float | None = None
) -> None:
    ledger.sessions.end_lease(sample, entry.replica)
    if final or entry.failures + 1 >= ledger.config.max_attempts:
        ledger.decide(records.Dropped(sample, reason, mean_reward))
        _check_budgets(ledger, reason)
    else:
        ledger.decide(records.Returned(sample, reason, failed=True))


def _check_budgets(ledger: LedgerState, reason: str) -> None:
    """Halt after too many drops in a row: the run would use up its stream without training."""
    config = ledger.config
    if ledger.halted is not None:
        return
    if ledger.filtered_in_a_row > config.max_filtered:
        message = (
            f"{ledger.filtered_in_a_row} groups in a row were left out, the last as {reason}; "
            f"max_filtered = {config.max_filtered} are allowed"
        )
    elif ledger.failed_in_a_row > config.max_failed:
        message = (
            f"{ledger.failed_in_a_row} samples in a row failed, the last with: {reason}; "
            f"max_failed = {config.max_failed} are allowed"
        )
    else:
        return
    ledger.halt(message)


def _is_holder(entry: Sample, replica: str, message: p.Deliver | p.Failed) -> bool:
    return entry.state is LEASED and entry.replica == replica and entry.attempt == message.attempt


RULES: Mapping[type, Callable[..., None]] = {
    p.RequestLeases: request_leases,
    p.Deliver: deliver,
    p.Failed: fail,
    p.Return: return_leases,
}
