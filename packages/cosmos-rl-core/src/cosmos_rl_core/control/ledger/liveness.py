"""Rules of membership.

A closed connection or a long silence makes a replica suspect. A suspect that does not return in time is gone, and its
leases return to the front of the queue. Policy replicas train in a mesh, which changes only between steps unless a
member is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events, records
from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.ledger.state import LedgerState

ON_ITS_WAY_S = 0.5
"""Seconds in which a message of a process may come that has died since it was sent."""


def is_current(ledger: LedgerState, event: events.From) -> bool:
    """Return whether to process a message; reject one of a process that was replaced or removed.

    A message ends the suspicion of a silent sender.
    """
    name = event.replica
    member = ledger.members.by_name.get(name)
    if isinstance(event.message, p.CheckpointDone) and member is not None and member.incarnation == event.incarnation:
        return True  # the checkpoint is whole, though the policy may have left meanwhile
    if not ledger.members.is_current(name, event.incarnation):
        sample = event.message.sample if isinstance(event.message, p.Deliver) else -1
        _fence(ledger, name, event.incarnation, sample)
        return False
    session = ledger.sessions.by_name.get(name)
    if session is None or session.is_closed:  # the message was on its way when the connection closed
        return True
    session.last_message = ledger.now
    if session.suspect_since is not None:
        session.suspect_since = None
        _clear(ledger, name)
    return True


def _fence(ledger: LedgerState, replica: str, incarnation: int, sample: int = -1) -> None:
    reason = f"{replica} incarnation {incarnation} was replaced or removed; rejoin"
    ledger.send(replica, p.Reject(incarnation, reason, sample, fenced=True))


def join(ledger: LedgerState, event: events.Join) -> None:
    """Welcome a new process with a new incarnation, or the same process on a new connection."""
    member = ledger.members.by_name.get(event.replica)
    if event.incarnation:
        if not ledger.members.is_current(event.replica, event.incarnation):
            _fence(ledger, event.replica, event.incarnation)
            return
        assert member is not None
        if member.state is MemberState.SUSPECT:
            _clear(ledger, event.replica)
        return_leases(ledger, event.replica, reason="not held after reconnecting", but=event.holding)
    else:
        if member is not None and member.is_live:
            lose(ledger, event.replica, reason="replaced by a new process")
        incarnation = member.incarnation + 1 if member is not None else 1
        ledger.decide(records.Joined(event.replica, event.role, incarnation))
    ledger.sessions.open(event.replica, ledger.now)
    incarnation = ledger.members.by_name[event.replica].incarnation
    ledger.send(event.replica, p.Welcome(incarnation, ledger.lineage, ledger.version, ledger.generation))
    if event.replica in ledger.members.mesh:
        send_mesh(ledger, event.replica)


def ready(ledger: LedgerState, replica: str, message: p.Ready) -> None:
    """Mark a joined replica as ready to work."""
    if ledger.members.by_name[replica].state is MemberState.JOINING:
        ledger.sessions.starts_anew(replica, ledger.now)
        ledger.decide(records.Moved(replica, MemberState.READY))
        form_mesh(ledger)


def heartbeat(ledger: LedgerState, replica: str, message: p.Heartbeat) -> None:
    """Renew the leases named by a replica, if it made progress since its last heartbeat."""
    session = ledger.sessions.by_name.get(replica)
    if session is None:
        return
    session.waits_for_peers = message.waits_for_peers
    if ledger.sessions.leaving:
        _answer_others(ledger, replica)
    if message.progress <= session.progress:
        return
    session.progress, session.progressed_at = message.progress, ledger.now
    if leased := ledger.samples.leased.get(replica):
        ledger.sessions.renew([sample for sample in message.holding if sample in leased], ledger.now)


def disconnected(ledger: LedgerState, event: events.Disconnected) -> None:
    """Mark a disconnected replica as suspect immediately."""
    session = ledger.sessions.by_name.get(event.replica)
    if session is None or not ledger.members.is_current(event.replica, event.incarnation):
        return
    session.is_closed = True
    ledger.sessions.withdraw(event.replica)  # it repeats its requests on the next connection
    _suspect(ledger, event.replica)


def gone(ledger: LedgerState, event: events.Gone) -> None:
    """Remove a replica whose process has ended, without waiting for it."""
    if ledger.members.is_current(event.replica, event.incarnation):
        lose(ledger, event.replica, reason=f"{event.replica} has ended")


def leaving(ledger: LedgerState, replica: str, message: p.Leaving) -> None:
    """Let a policy leave before it saves, if another one stays that has the weights: after a sign of life of that one.

    Of several that leave at once the last one saves, and at the end of the run the first of the mesh.
    """
    ledger.sessions.leaving[replica] = ledger.now
    _answer_the_last(ledger)


def _answer_the_last(ledger: LedgerState) -> None:
    """Answer those that leave and must save: nobody stays."""
    for name in list(ledger.sessions.leaving):
        if ledger.why_finished() is not None:
            _answer_leaving(ledger, name, save=ledger.members.mesh[:1] == (name,))
        elif not any(_may_stay(ledger, other) for other in ledger.members.mesh if other != name):
            _answer_leaving(ledger, name, save=True)


def _answer_others(ledger: LedgerState, alive: str) -> None:
    """Let all others leave that have asked long enough before this sign of life, and save nothing."""
    if _may_stay(ledger, alive):
        for name, since in list(ledger.sessions.leaving.items()):
            if name != alive and ledger.now - since >= ON_ITS_WAY_S:
                _answer_leaving(ledger, name, save=False)
        _answer_the_last(ledger)


def _may_stay(ledger: LedgerState, policy: str) -> bool:
    member = ledger.members.by_name[policy]
    return policy in ledger.members.mesh and member.has_weights and member.state is MemberState.READY


def _answer_leaving(ledger: LedgerState, policy: str, *, save: bool) -> None:
    del ledger.sessions.leaving[policy]
    ledger.send(policy, p.Leave(save=save))
    if not save:
        lose(ledger, policy, reason="left", in_good_order=True)


def leave(ledger: LedgerState, replica: str, message: p.Goodbye) -> None:
    lose(ledger, replica, reason="left", in_good_order=True)


def restart(ledger: LedgerState, event: events.Restart) -> None:
    """Mark all replicas as suspect until they reconnect, and restart the leases' time to live.

    The journal may end between two records of one event; the missing consequences are completed here.
    """
    ledger.decide(records.Restarted(max(event.generation, ledger.generation + 1)))
    for name in ledger.members.live():
        ledger.sessions.open(name, ledger.now)
        session = ledger.sessions.by_name[name]
        session.is_closed, session.grace_s = True, ledger.config.restart_grace_s
        _suspect(ledger, name)
    for leased in ledger.samples.leased.values():
        ledger.sessions.renew(sorted(leased), ledger.now)
    if ledger.is_orphaned:
        ledger.output(events.PoliciesLost(ledger.checkpoint_version))
    elif ledger.why_finished() is None:  # otherwise the last policy may have left in good order
        form_mesh(ledger)


def tick(ledger: LedgerState, event: events.Tick) -> None:
    """Remove suspects whose grace has expired, and mark silent replicas as suspect."""
    _answer_the_last(ledger)
    config, now, members = ledger.config, ledger.now, ledger.members.by_name
    for name, session in list(ledger.sessions.by_name.items()):
        if session.suspect_since is not None:
            if now - session.suspect_since >= (session.grace_s or config.suspect_grace_s):
                lose(ledger, name, reason=f"{name} is gone", is_silent=True)
        elif now - session.last_message >= config.silence_s and members[name].state is MemberState.READY:
            _suspect(ledger, name)


def lose(
    ledger: LedgerState, replica: str, *, reason: str, in_good_order: bool = False, is_silent: bool = False
) -> None:
    """Remove a replica: its leases return, and the mesh continues without it."""
    return_leases(ledger, replica, reason=reason)
    ledger.sessions.close(replica)
    ledger.decide(records.Moved(replica, MemberState.GONE))
    ledger.output(events.Removed(replica, is_silent))
    if not (in_good_order and ledger.why_finished() is not None):
        form_mesh(ledger)


def expel(ledger: LedgerState, replica: str, *, reason: str) -> None:
    """Remove a replica that is alive, and send it the reason."""
    ledger.send(replica, p.Reject(ledger.members.by_name[replica].incarnation, reason, fenced=True))
    lose(ledger, replica, reason=reason)


def form_mesh(ledger: LedgerState) -> None:
    """Form the mesh of all ready policy replicas; called after changes of members or of the step.

    A loss changes the mesh at once; without a member that has the weights it is the loss of all. New members join
    after the step; after the last step none does, as those with the weights leave. The first mesh of a run waits for
    `policy_members`, the one after the loss of all for one.
    """
    members = ledger.members
    ready = members.ready_policies()
    survivors = tuple(name for name in members.mesh if name in ready)
    if survivors != members.mesh:
        has_weights = any(members.by_name[name].has_weights for name in survivors)
        remesh(ledger, survivors if has_weights else ())
    elif not members.mesh:
        if not ledger.is_orphaned and len(ready) >= ledger.mesh_size:
            remesh(ledger, ready)
    elif set(ready) != set(members.mesh) and ledger.assignment is None and ledger.why_finished() is None:
        newcomers = tuple(name for name in ready if name not in members.mesh)
        remesh(ledger, (*members.mesh, *newcomers))  # the first has the current weights


def remesh(ledger: LedgerState, members: tuple[str, ...]) -> None:
    ledger.decide(records.Meshed(ledger.members.epoch + 1, members))
    ledger.sessions.batch_requests.clear()
    for name in members:
        ledger.sessions.starts_anew(name, ledger.now)
        send_mesh(ledger, name)
    if not members:
        ledger.output(events.PoliciesLost(ledger.checkpoint_version))


def send_mesh(ledger: LedgerState, replica: str) -> None:
    members = ledger.members
    ledger.send(replica, p.Remesh(members.epoch, members.mesh, ledger.version, ledger.lineage))


def _suspect(ledger: LedgerState, replica: str) -> None:
    """Expect a sign of life. The requests of a silent replica stay: it does not repeat them on an open connection."""
    session = ledger.sessions.by_name[replica]
    if session.suspect_since is None:
        session.suspect_since = ledger.now
        if ledger.members.by_name[replica].state is not MemberState.SUSPECT:
            ledger.decide(records.Moved(replica, MemberState.SUSPECT))


def _clear(ledger: LedgerState, replica: str) -> None:
    was_ready = ledger.members.by_name[replica].was_ready
    ledger.decide(records.Moved(replica, MemberState.READY if was_ready else MemberState.JOINING))
    form_mesh(ledger)


def return_leases(ledger: LedgerState, replica: str, *, reason: str, but: Collection[int] = ()) -> None:
    """Make the samples leased to a replica pending again, without counting an attempt."""
    for sample in sorted(ledger.samples.leased.get(replica, set()).difference(but)):
        ledger.sessions.end_lease(sample, replica)
        ledger.decide(records.Returned(sample, reason))


RULES: Mapping[type, Callable[..., None]] = {
    events.Join: join,
    events.Disconnected: disconnected,
    events.Gone: gone,
    events.Restart: restart,
    p.Ready: ready,
    p.Leaving: leaving,
    p.Goodbye: leave,
}
