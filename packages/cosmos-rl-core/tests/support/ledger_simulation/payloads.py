"""The bytes of groups in the simulated controller: the real `Batches` between fake workers.

A group is in the memory of the worker that generated it until its Release, in the controller's memory, or in a file of
the worker's machine with a reference in the controller's memory. The digest of a reference is the content itself. A
crash of the controller loses its memory, the death of a worker its own, and sometimes its files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.inflight import Batches
from cosmos_rl_core.control.ledger import events, records
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.rollout.spool.store import Spooled

if TYPE_CHECKING:
    from ledger_simulation.world import World

RETURN_S = 2.0
"""Time for groups to return after a restart of the controller."""


def content_of(replica: str, group: p.Deliver | records.Delivered) -> str:
    """Return the text in place of a group's terms. Each replica samples other ones."""
    return f"sample {group.sample} by {replica}, versions {group.min_version} to {group.max_version}"


@dataclass(slots=True)
class FakePeer:
    """The controller's side of a connection."""

    world: World
    name: str
    is_welcome: bool = False
    mesh: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return self.name

    def post(self, message: p.Release) -> None:
        self.world.to_replica(events.To(self.name, cast("Any", message)))


class FakePeers:
    """The connections since the controller's start."""

    def __init__(self) -> None:
        self.by_name: dict[str, FakePeer] = {}

    def post_each(self, messages: Mapping[str, p.Release]) -> None:
        for name, message in messages.items():
            if name in self.by_name:
                self.by_name[name].post(message)


class Payloads:
    """What a controller does with payloads: `Controller`, `Scheduler` and `Recovery` in short."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._peers = FakePeers()
        self._batches = Batches(source=cast("Any", None), supervised=False, peers=cast("Any", self._peers))

    @property
    def awaits_groups(self) -> bool:
        """Whether no batch is requested: groups may return after a restart."""
        return bool(self._batches.awaited)

    def restarted(self, ledger: Ledger) -> None:
        """Expect the groups that were in the memory of the controller before."""
        assigned = ledger.assignment.samples if ledger.assignment is not None else ()
        self._batches.restarted(ledger.samples.all_ready(), step=ledger.version, assigned=assigned)

    def give_up(self, ledger: Ledger) -> tuple[int, ...]:
        """Return the samples whose groups have not returned."""
        return self._lost(set(self._batches.awaited), ledger)

    def returned(self, join: events.Join, ledger: Ledger) -> tuple[int, ...]:
        """Return the samples whose groups a replica has delivered and no longer holds."""
        active = ledger.samples.active
        delivered = {s for s in self._batches.awaited if s in active and active[s].replica == join.replica}
        return self._lost(delivered.difference(join.holding), ledger)

    def _lost(self, samples: set[int], ledger: Ledger) -> tuple[int, ...]:
        self._batches.awaited.difference_update(samples)
        return tuple(sorted(samples & ledger.samples.all_ready()))

    def follow(self, event: events.Event, decided: list[records.Record], ledger: Ledger) -> None:
        """Keep and release groups as the ledger has decided."""
        match event:
            case events.Join():
                self._peers.by_name[event.replica] = FakePeer(self._world, event.replica)
            case events.Disconnected():
                if ledger.members.is_current(event.replica, event.incarnation):
                    self._peers.by_name.pop(event.replica, None)
            case events.From(message=p.Deliver() as group):
                entry = ledger.samples.active.get(group.sample)
                self._batches.deliver(group, replica=event.replica, decided=decided, entry=entry)
            case events.From(message=p.PayloadsUnreadable()):
                self._batches.lose(decided)
            case events.Rollback():
                self._batches.roll_back(event.position.version, ready=ledger.samples.all_ready())

    def missing(self, message: p.Batch) -> tuple[int, ...]:
        return self._batches.missing(message.samples)

    def complete(self, output: events.To) -> p.FromLedger | None:
        """Return a message with its payloads, and release those of a committed step.

        None for a batch whose policy is not connected.
        """
        message, peer = output.message, self._peers.by_name.get(output.replica)
        match message:
            case p.Committed():
                self._batches.committed(message.step)
            case p.Batch():
                if peer is None:
                    return None
                batch = self._batches.with_payloads(message, cast("Any", peer))
                self._check(batch)
                return batch
            case p.Remesh() if peer is not None:
                peer.mesh = message.members
            case p.Welcome():
                if peer is not None:
                    peer.is_welcome = True
                return p.Welcome(
                    message.incarnation,
                    message.lineage,
                    message.version,
                    message.generation,
                    kept=self._batches.kept(output.replica),
                )
        return message

    def _check(self, batch: p.Batch) -> None:
        """Each sample has the bytes of the group that the ledger has accepted."""
        expected = self._world.controller.invariants.history.content
        assert len(batch.payloads) == len(batch.own), f"step {batch.step} lacks payloads"
        for sample, payload in zip(batch.own, batch.payloads):
            found = (payload.digest if isinstance(payload, Spooled) else payload).decode()
            assert found == expected[sample], f"step {batch.step}: {found} in place of {expected[sample]}"


def read(world: World, payloads: Iterable[p.Payload]) -> list[str | None]:
    """Return the contents of payloads, None for files that cannot be read."""
    return [_read(world, payload) for payload in payloads]


def _read(world: World, payload: p.Payload) -> str | None:
    if not isinstance(payload, Spooled):
        return payload.decode()
    owner = world.replicas.get(payload.address)
    found = world.files[payload.address].get(payload.path) if owner is not None and owner.is_alive else None
    return found if found == payload.digest.decode() else None
