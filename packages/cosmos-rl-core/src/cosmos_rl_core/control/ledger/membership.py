"""The members of a run: replicas with their incarnations, and the mesh of policy replicas that train together.

    (join) -> JOINING -> READY <-> SUSPECT -> GONE
                 \\---------------^     a suspect that returns within the grace keeps its incarnation

An incarnation is one process of a replica. A new process raises it; messages of an older one are rejected (fenced).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cosmos_rl_core.control.protocol import Role


class MemberState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    GONE = "gone"


class Member(msgspec.Struct, array_like=True):
    """One replica."""

    role: Role
    incarnation: int = 0
    state: MemberState = MemberState.JOINING
    was_ready: bool = False
    """Whether this incarnation was ever READY: the state to which a suspect returns."""

    @property
    def is_live(self) -> bool:
        return self.state is not MemberState.GONE


class MemberTable(msgspec.Struct, array_like=True):
    """All members as one value, for snapshots and comparisons."""

    by_name: dict[str, Member]
    epoch: int
    mesh: tuple[str, ...]


class Members:
    """All replicas of the run, past ones included. Changed only by `apply`."""

    def __init__(self) -> None:
        self.by_name: dict[str, Member] = {}
        self.epoch = 0
        """Rises with every new mesh and every rollback; messages of earlier epochs are void."""
        self.mesh: tuple[str, ...] = ()
        """Policy replicas that train together, sorted; empty before the first mesh and when all were lost."""
        self.num_ready_rollouts = 0

    def is_current(self, replica: str, incarnation: int) -> bool:
        """Return whether this is the replica's newest process and was not removed."""
        member = self.by_name.get(replica)
        return member is not None and member.incarnation == incarnation and member.is_live

    def live(self) -> list[str]:
        return [name for name, member in self.by_name.items() if member.is_live]

    def ready_policies(self) -> tuple[str, ...]:
        """Return the policy replicas that can train, sorted; suspects in the mesh are included, as they may return."""
        return tuple(
            sorted(
                name
                for name, member in self.by_name.items()
                if member.role == "policy"
                and (member.state is MemberState.READY or (member.is_live and name in self.mesh))
            )
        )

    def dump(self) -> MemberTable:
        """Return the complete state in canonical order."""
        return MemberTable(dict(sorted(self.by_name.items())), self.epoch, self.mesh)

    @classmethod
    def load(cls, table: MemberTable) -> Members:
        """Return the members of a dump."""
        members = cls()
        members.by_name, members.epoch, members.mesh = table.by_name, table.epoch, table.mesh
        members.num_ready_rollouts = sum(
            member.role == "rollout" and member.state is MemberState.READY for member in table.by_name.values()
        )
        return members

    def join(self, replica: str, role: Role, incarnation: int) -> None:
        if replica in self.by_name:
            self.move(replica, MemberState.GONE)
        self.by_name[replica] = Member(role, incarnation)

    def move(self, replica: str, state: MemberState) -> None:
        member = self.by_name[replica]
        member.was_ready |= state is MemberState.READY
        if member.role == "rollout":
            self.num_ready_rollouts += (state is MemberState.READY) - (member.state is MemberState.READY)
        member.state = state
