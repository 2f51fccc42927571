"""Readable lines about every wait in the run, for `cosmos-rl status`."""

from __future__ import annotations

from cosmos_rl_core.control.ledger.leasing import is_generated
from cosmos_rl_core.control.ledger.membership import MemberState
from cosmos_rl_core.control.ledger.samples import PENDING, READY
from cosmos_rl_core.control.ledger.state import LedgerState


def lines(ledger: LedgerState) -> list[str]:
    """Return one line per wait: "policy-0 waits for batch 7: 3 of 8 groups ready, 5 leased to rollout-0"."""
    found = [f"the run has halted: {ledger.halted}"] if ledger.halted is not None else []
    return [*found, *_mesh(ledger), *_batches(ledger), *_votes(ledger), *_leases(ledger), *_suspects(ledger)]


def _mesh(ledger: LedgerState) -> list[str]:
    members = ledger.members
    if ledger.is_orphaned:
        version = ledger.checkpoint_version
        return [f"the run waits for a rollback to version {version}: all policy replicas were lost"]
    if members.mesh:
        return []
    wanted, ready = ledger.config.policy_members, members.ready_policies()
    return [f"the run waits for policy replicas: {len(ready)} of {wanted} ready"]


def _batches(ledger: LedgerState) -> list[str]:
    samples = ledger.samples
    why = f"{samples.count(READY)} of {ledger.config.groups_per_step} groups ready"
    for name, held in sorted(samples.held.items()):
        why += f", {len(held)} leased to {name}"
    if samples.count(PENDING):
        why += f", {samples.count(PENDING)} to be leased again"
    return [f"{name} waits for batch {ledger.version}: {why}" for name in ledger.sessions.batch_requests]


def _votes(ledger: LedgerState) -> list[str]:
    missing = [name for name in ledger.members.mesh if name not in ledger.votes]
    if ledger.assignment is None or not ledger.votes or not missing:
        return []
    return [f"{name} waits for the votes of {', '.join(missing)} on step {ledger.version}" for name in ledger.votes]


def _leases(ledger: LedgerState) -> list[str]:
    found = []
    for (lineage, version), capacities in ledger.sessions.lease_requests.items():
        if lineage != ledger.lineage:
            why = f"it holds weights of lineage {lineage}, the run is on {ledger.lineage}"
        elif ledger.window.deadline(version) < ledger.next_step:
            why = f"its weights, version {version}, are too old for step {ledger.next_step}"
        elif is_generated(ledger):
            why = "every group the run needs is generated"
        else:
            why = f"{ledger.samples.num_outstanding} of {ledger.window.capacity} groups are in flight"
        found += [f"{name} waits for leases: {why}" for name in capacities]
    return found


def _suspects(ledger: LedgerState) -> list[str]:
    return [
        f"the run waits for {name} to reconnect: {'connection closed' if session.is_closed else 'silent'}"
        for name, session in ledger.sessions.by_name.items()
        if ledger.members.by_name[name].state is MemberState.SUSPECT
    ]
