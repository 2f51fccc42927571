"""Rollout replicas whose engine hangs while their heartbeats go on.

no progress for a lease's time to live, with a lease or a row of an evaluation
                               -> stuck: its request is held -> progress                -> granted as before
                                                             -> none for as long again  -> removed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import leasing, liveness, records
from cosmos_rl_core.control.ledger.state import LedgerState


def heartbeat(ledger: LedgerState, replica: str, message: p.Heartbeat) -> None:
    """Renew leases; after progress a stuck replica is granted what it has requested."""
    liveness.heartbeat(ledger, replica, message)
    session = ledger.sessions.by_name.get(replica)
    if session is None:
        return
    if message.rows == 0:
        session.rows_since = None
    elif session.rows_since is None:
        session.rows_since = ledger.now
    if session.stuck_since is not None and session.progressed_at >= session.stuck_since:
        session.stuck_since, request = None, session.held_request
        session.held_request = None
        if request is not None:
            leasing.request_leases(ledger, replica, request)
            if ledger.halted is None:
                leasing.answer_lease_requests(ledger)


def tick(ledger: LedgerState) -> None:
    """Return expired leases, and remove replicas that were stuck for too long."""
    now, limit_s = ledger.now, ledger.config.lease_ttl_s
    for sample in ledger.sessions.expired(now - limit_s):
        replica = ledger.samples.active[sample].replica
        ledger.sessions.end_lease(sample, replica)
        ledger.decide(records.Returned(sample, f"{replica} made no progress for {limit_s:g} s"))
        ledger.send(replica, p.Cancel(sample))
        _check(ledger, replica)
    for name, session in list(ledger.sessions.by_name.items()):
        if session.rows_since is not None and now - session.rows_since >= limit_s:
            _check(ledger, name)
        if session.stuck_since is not None and now - session.stuck_since >= limit_s:
            reason = (
                f"{name} is removed from the run: it made no progress for {limit_s:g} s and, after its work was given "
                f"to others, for as long again ([elastic] lease_ttl_s)"
            )
            liveness.expel(ledger, name, reason=reason)


def _check(ledger: LedgerState, replica: str) -> None:
    """Hold the request of a replica that made no progress for too long."""
    if ledger.now - ledger.sessions.by_name[replica].progressed_at >= ledger.config.lease_ttl_s:
        ledger.sessions.hold(replica, ledger.now)


RULES: Mapping[type, Callable[..., None]] = {p.Heartbeat: heartbeat}
