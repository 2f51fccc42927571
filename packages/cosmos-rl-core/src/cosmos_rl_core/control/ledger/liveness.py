"""Rules of membership: replicas join, go silent, hang and leave; policy replicas form a mesh and train together.

A closed connection or a long silence makes a replica suspect. A suspect that does not return in time is gone, and its
leases return to the front of the queue. The mesh changes only between steps unless a member is lost.

A replica whose heartbeats go on may hang all the same:

    rollout   no progress for a lease's time to live, with a lease or a row of an evaluation
                -> stuck: its request is deferred -> progress                -> granted as before
                                                  -> none for as long again  -> removed
    policy    no progress for `stall_s`, unless it waits for others          -> removed
    mesh      all members wait for one another                               -> it connects anew
              a member that others cannot connect to (PeersLost)             -> removed

Of two members that accuse each other the newer one is removed: it may not have the current weights yet. A mesh that
has connected anew several times without a commit also continues without a member: the one that alone made no progress
meanwhile, else the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events, leasing, records
from cosmos_rl_core.control.ledger.membership import Accusations, MemberState
from cosmos_rl_core.control.ledger.state import LedgerState

ON_ITS_WAY_S = 0.5
"""Seconds in which a message of a process may come that has died since it was sent."""
DECISION_S = 1.0
"""Seconds from the first accusation of an epoch to the decision: others may be accused by more members."""
OWN_REPORT_S = 3.0
"""Seconds that members which connect have, beyond their limit, to report by themselves whom they cannot reach."""
MAX_RECONNECTIONS = 3
"""Connections of the same mesh without a commit between."""


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
    if message.progress > session.progress:
        session.progress, session.progressed_at = message.progress, ledger.now
        if leased := ledger.samples.leased.get(replica):
            ledger.sessions.renew([sample for sample in message.holding if sample in leased], ledger.now)
    if message.rows == 0:
        session.rows_since = None
    elif session.rows_since is None:
        session.rows_since = ledger.now
    if session.stuck_since is not None and session.progressed_at >= session.stuck_since:
        session.stuck_since, request, session.deferred = None, session.deferred, None
        if request is not None:
            leasing.request_leases(ledger, replica, request)
            if ledger.halted is None:
                leasing.answer_lease_requests(ledger)


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
    """Apply the rules of time: for silent replicas, then for rollouts that hang, then for the mesh."""
    _answer_the_last(ledger)
    _check_silence(ledger)
    _check_rollouts(ledger)
    _check_mesh(ledger)


def _check_silence(ledger: LedgerState) -> None:
    """Remove suspects whose grace has expired, and mark silent replicas as suspect."""
    config, now, members = ledger.config, ledger.now, ledger.members.by_name
    for name, session in list(ledger.sessions.by_name.items()):
        if session.suspect_since is not None:
            if now - session.suspect_since >= (session.grace_s or config.suspect_grace_s):
                lose(ledger, name, reason=f"{name} is gone", is_silent=True)
        elif now - session.last_message >= config.silence_s and members[name].state is MemberState.READY:
            _suspect(ledger, name)


def _check_rollouts(ledger: LedgerState) -> None:
    """Return expired leases, and remove rollout replicas that were stuck for too long."""
    now, limit_s, sessions = ledger.now, ledger.config.lease_ttl_s, ledger.sessions
    for sample in sessions.expired(now - limit_s):
        # The lease may have expired alone, beside others of the replica that are renewed: then it is not stuck.
        replica = ledger.samples.active[sample].replica
        sessions.end_lease(sample, replica)
        ledger.decide(records.Returned(sample, f"{replica} made no progress for {limit_s:g} s"))
        ledger.send(replica, p.Cancel(sample))
        sessions.defer_if_stuck(replica, now, limit_s)
    for name, session in list(sessions.by_name.items()):
        if session.rows_since is not None and now - session.rows_since >= limit_s:
            sessions.defer_if_stuck(name, now, limit_s)
        if session.stuck_since is not None and now - session.stuck_since >= limit_s:
            reason = (
                f"{name} is removed from the run: it made no progress for {limit_s:g} s and, after its work was given "
                f"to others, for as long again ([elastic] lease_ttl_s)"
            )
            expel(ledger, name, reason=reason)


def _check_mesh(ledger: LedgerState) -> None:
    """Remove policies that hang or that others cannot reach; connect a mesh anew that waits for itself."""
    limit_s = ledger.config.stall_s
    for name in [name for name in ledger.members.policies if _is_stalled(ledger, name)]:
        _remove(ledger, name, reason=f"{name} is removed from the run: it made no progress for {limit_s:g} s")
    if (accusations := _accusations(ledger)) is not None:
        if ledger.now - accusations.since >= DECISION_S:
            _judge(ledger, accusations)
    elif _waits_for_itself(ledger):
        _reconnect(ledger)


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


def is_of_mesh(ledger: LedgerState, replica: str, epoch: int) -> bool:
    """Return whether a message comes from the current mesh; a member with an older epoch gets the current mesh."""
    members = ledger.members
    if replica in members.mesh:
        if epoch == members.epoch:
            return True
        send_mesh(ledger, replica)
    ledger.reject(replica, f"epoch {epoch} is over, or {replica} is not in the mesh of epoch {members.epoch}")
    return False


def peers_lost(ledger: LedgerState, replica: str, message: p.PeersLost) -> None:
    """Continue without those that the controller has lost too; otherwise connect the mesh anew, or note whom a member
    cannot reach, about whom `tick` decides."""
    if not is_of_mesh(ledger, replica, message.epoch):
        return
    closed = [name for name in ledger.members.mesh if ledger.sessions.by_name[name].is_closed]
    for name in closed:  # both its connections are lost
        lose(ledger, name, reason=f"{name} is gone: {message.reason}")
    if closed:
        return
    if not message.suspects:
        return _reconnect(ledger)
    accusations = _accusations(ledger) or Accusations(message.epoch, since=ledger.now)
    accusations.by[replica] = message.suspects
    ledger.sessions.accusations = accusations


def _is_stalled(ledger: LedgerState, policy: str) -> bool:
    session = ledger.sessions.by_name.get(policy)
    if session is None or ledger.members.by_name[policy].state is not MemberState.READY or session.waits_for_peers:
        return False
    return ledger.now - session.progressed_at >= ledger.config.stall_s


def _waits_for_itself(ledger: LedgerState) -> bool:
    """Whether every member of the mesh waits for others of it, and has for too long.

    That is half of `peer_s`: those that were cut off use the other half to find out whom they cannot connect to.
    """
    mesh = [ledger.sessions.by_name.get(name) for name in ledger.members.mesh]
    waiting = [session for session in mesh if session is not None and session.waits_for_peers]
    if len(mesh) < 2 or len(waiting) < len(mesh):
        return False
    is_connected = all(session.joined_epoch == ledger.members.epoch for session in waiting)
    limit_s = ledger.config.peer_s / 2 + (0.0 if is_connected else OWN_REPORT_S)
    return ledger.now - max(session.progressed_at for session in waiting) >= limit_s


def _accusations(ledger: LedgerState) -> Accusations | None:
    """Return the accusations of the present epoch."""
    accusations = ledger.sessions.accusations
    return accusations if accusations is not None and accusations.epoch == ledger.members.epoch else None


def _judge(ledger: LedgerState, accusations: Accusations) -> None:
    """Remove the member that most others cannot reach, of several the newest."""
    mesh = ledger.members.mesh
    number = Counter(name for suspects in accusations.by.values() for name in set(suspects) if name in mesh)
    if not number:
        return _reconnect(ledger)
    removed = max(mesh, key=lambda name: (number[name], mesh.index(name)))
    accusers = ", ".join(sorted(name for name, suspects in accusations.by.items() if removed in suspects))
    _remove(ledger, removed, reason=f"{removed} is removed from the run: {accusers} cannot reach it")


def _reconnect(ledger: LedgerState) -> None:
    """Begin a new epoch of the same mesh, whose members connect anew."""
    sessions, mesh = ledger.sessions, ledger.members.mesh
    if sessions.reconnections == 0:
        sessions.progress_before = {name: sessions.by_name[name].progress for name in mesh}
    sessions.reconnections += 1
    if sessions.reconnections > MAX_RECONNECTIONS and len(mesh) > 1:
        removed = _stuck(ledger) or mesh[-1]
        return _remove(ledger, removed, reason=f"{removed} is removed from the run: no step with the others succeeds")
    remesh(ledger, ledger.members.mesh)
    form_mesh(ledger)


def _stuck(ledger: LedgerState) -> str:
    """Return the newest member without progress since the mesh first connected anew; empty if that is all or none."""
    before, mesh = ledger.sessions.progress_before, ledger.members.mesh
    sessions = {
        name: ledger.sessions.by_name[name] for name in mesh if not ledger.sessions.by_name[name].waits_for_peers
    }
    still = [name for name, session in sessions.items() if session.progress == before.get(name)]
    return still[-1] if 0 < len(still) < len(mesh) else ""


def _remove(ledger: LedgerState, policy: str, *, reason: str) -> None:
    ledger.sessions.reconnections = 0
    expel(ledger, policy, reason=reason)


RULES: Mapping[type, Callable[..., None]] = {
    events.Join: join,
    events.Disconnected: disconnected,
    events.Gone: gone,
    events.Restart: restart,
    events.Tick: tick,
    p.Ready: ready,
    p.Heartbeat: heartbeat,
    p.PeersLost: peers_lost,
    p.Leaving: leaving,
    p.Goodbye: leave,
}
