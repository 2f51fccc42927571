"""Policy replicas that hang, or cannot reach one another, while their heartbeats go on.

    Tick        a policy without progress is removed; a mesh whose members all wait for one another connects anew
    PeersLost   the mesh connects anew; a member that others cannot connect to is removed

Of two members that accuse each other the newer one is removed: it may not have the current weights yet. A mesh that
has connected anew several times without a commit also continues without a member: the one that alone made no progress
meanwhile, else the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events, hung, liveness
from cosmos_rl_core.control.ledger.membership import Accusations, MemberState
from cosmos_rl_core.control.ledger.state import LedgerState
from cosmos_rl_core.control.ledger.stepping import is_of_mesh

DECISION_S = 1.0
"""Seconds from the first accusation of an epoch to the decision: others may be accused by more members."""
OWN_REPORT_S = 3.0
"""Seconds that members which connect have, beyond their limit, to report by themselves whom they cannot reach."""
MAX_RECONNECTIONS = 3
"""Connections of the same mesh without a commit between."""


def peers_lost(ledger: LedgerState, replica: str, message: p.PeersLost) -> None:
    """Continue without those that the controller has lost too; otherwise connect the mesh anew, or note whom a member
    cannot reach, about whom `tick` decides."""
    if not is_of_mesh(ledger, replica, message.epoch):
        return
    closed = [name for name in ledger.members.mesh if ledger.sessions.by_name[name].is_closed]
    for name in closed:  # both its connections are lost
        liveness.lose(ledger, name, reason=f"{name} is gone: {message.reason}")
    if closed:
        return
    if not message.suspects:
        return _reconnect(ledger)
    accusations = _accusations(ledger) or Accusations(message.epoch, since=ledger.now)
    accusations.by[replica] = message.suspects
    ledger.sessions.accusations = accusations


def tick(ledger: LedgerState, event: events.Tick) -> None:
    """The rules of time for all members, then those for rollout replicas and policies that hang."""
    liveness.tick(ledger, event)
    hung.tick(ledger)
    limit_s = ledger.config.stall_s
    for name in [name for name in ledger.members.policies if _is_stalled(ledger, name)]:
        _remove(ledger, name, reason=f"{name} is removed from the run: it made no progress for {limit_s:g} s")
    if (accusations := _accusations(ledger)) is not None:
        if ledger.now - accusations.since >= DECISION_S:
            _judge(ledger, accusations)
    elif _waits_for_itself(ledger):
        _reconnect(ledger)


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
    liveness.remesh(ledger, ledger.members.mesh)
    liveness.form_mesh(ledger)


def _stuck(ledger: LedgerState) -> str:
    """Return the newest member without progress since the mesh first connected anew; empty if that is all or none."""
    before, mesh = ledger.sessions.progress_before, ledger.members.mesh
    sessions = {
        name: ledger.sessions.by_name[name] for name in mesh if not ledger.sessions.by_name[name].waits_for_peers
    }
    still = [name for name, session in sessions.items() if session.progress == before.get(name)]
    return still[-1] if 0 < len(still) < len(mesh) else ""


def _remove(ledger: LedgerState, policy: str, *, reason: str) -> None:
    """Remove a policy that is alive, and send it the reason."""
    ledger.sessions.reconnections = 0
    liveness.expel(ledger, policy, reason=reason)


RULES: Mapping[type, Callable[..., None]] = {events.Tick: tick, p.PeersLost: peers_lost}
