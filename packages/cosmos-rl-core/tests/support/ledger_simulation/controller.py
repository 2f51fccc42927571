"""The simulated controller: the real ledger, behind a journal that loses what it has not synced when it crashes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events, records
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.state import LedgerConfig
from cosmos_rl_core.wire.clock import RunningClock
from ledger_simulation.invariants import Invariants
from ledger_simulation.payloads import RETURN_S, Payloads

if TYPE_CHECKING:
    from ledger_simulation.world import World

SYNC_S = 0.004
TICK_S = 0.5
SNAPSHOT_RECORDS = 400

_CODEC = msgspec.msgpack.Decoder(records.AnyRecord)


class FakeController:
    """Feeds the ledger, releases outputs after the sync, crashes and comes back."""

    def __init__(self, world: World, config: LedgerConfig, ledger: type[Ledger]) -> None:
        self._world = world
        self._config = config
        self._class = ledger
        self.ledger = ledger(config)
        self.payloads = Payloads(world)
        self.is_up = True
        self.crashes_at_next_decision = False
        """Whether to crash while the next decision waits for the disk."""
        self._durable: list[records.Record] = []
        self._unsynced: list[records.Record] = []
        self._outputs: list[events.Output] = []
        self._snapshot: tuple[int, bytes] | None = None
        self._life = 0
        self._orphaned_since: dict[tuple[int, int, int], float] = {}
        self.clock_jumped_s = 0.0
        self._clock = self._time if world.options.counts_pauses else RunningClock(self._time, longest_s=2 * TICK_S)
        self._paused_until = 0.0
        self._batch_requests: dict[str, events.Event] = {}
        """Requests that wait until the groups have returned after a restart."""
        self.invariants = Invariants(config)
        world.after(TICK_S, self._tick)

    def take(self, event: events.Event) -> None:
        """Receive an event, if up."""
        if self._puts_off(self.take, event) or not self.is_up:
            return
        if self.payloads.awaits_groups and _requests_batch(event):
            self._batch_requests[event.replica] = event
            return
        self._world.report.events += 1
        was_stale = self.invariants.before(event)
        decided, outputs = self.ledger.on(self._clock(), event)
        self.invariants.after(self.ledger, decided, was_stale=was_stale)
        self.payloads.follow(event, decided, self.ledger)
        self._count(decided)
        if self._world.options.ack_before_durable:
            self._release(outputs)
            outputs = []
        if (decided or outputs) and not (self._unsynced or self._outputs):
            self._world.after(SYNC_S, self._sync, self._life)
        self._unsynced += decided
        self._outputs += outputs
        if isinstance(event, events.Join):
            self._generate_again(self.payloads.returned(event, self.ledger))
        if not self.payloads.awaits_groups:
            requests, self._batch_requests = self._batch_requests, {}
            for request in requests.values():
                self._world.after(0.0, self.take, request)
        if self.crashes_at_next_decision and decided:
            self.crashes_at_next_decision = False
            self._world.after(SYNC_S / 2, self.crash, self._life)

    def _count(self, decided: list[records.Record]) -> None:
        for record in decided:
            if isinstance(record, records.Commit):
                self._world.report.steps += 1
                self._world.positions[self.ledger.version] = self.ledger.position()
            elif isinstance(record, records.Delivered):
                self._world.unreadable.discard(record.sample)
            elif isinstance(record, records.PayloadsLost):
                self._world.report.losses += len(record.samples)
            elif isinstance(record, records.Unheld):
                self._world.report.unheld += len(record.samples)
        self._world.report.reissued += sum(isinstance(r, records.Leased) and r.attempt > 1 for r in decided)

    def crash(self, life: int | None = None) -> None:
        """Lose what was not synced, but for a part that reached the disk by chance; come back later."""
        if not self.is_up or life not in (None, self._life):
            return
        self.is_up = False
        self._paused_until = 0.0
        self._batch_requests.clear()
        self._life += 1
        by_chance = self._world.random.randint(0, len(self._unsynced))
        self._durable += self._unsynced[:by_chance]
        self._unsynced, self._outputs = [], []
        self._world.report.crashes += 1
        self._world.after(self._world.random.uniform(0.1, 3.0), self._come_back)

    def pause(self, duration_s: float) -> None:
        """Stop for a while. Events wait; the first one afterwards is a tick."""
        if self.is_up:
            self._paused_until = max(self._paused_until, self._world.now + duration_s)
            self._world.after(duration_s, self.take, events.Tick())

    def _puts_off(self, action: Callable[..., None], *args: object) -> bool:
        """Return whether the controller is stopped; then it acts when it goes on, unless it is killed before."""
        left_s = self._paused_until - self._world.now
        if left_s > 0:
            self._world.after(left_s, self._go_on, self._life, action, args)
        return left_s > 0

    def _go_on(self, life: int, action: Callable[..., None], args: tuple[object, ...]) -> None:
        if life == self._life:
            action(*args)

    def _time(self) -> float:
        return self._world.now + self.clock_jumped_s

    def check_end(self) -> str:
        """Check that the journal leads to the present state and return a digest of both."""
        journal = [*self._durable, *self._unsynced]
        assert self._class.restore(self._config, None, journal) == self.ledger, "the journal does not replay"
        written = msgspec.msgpack.encode(journal)
        return hashlib.blake2b(written + self.ledger.snapshot(), digest_size=16).hexdigest()

    @property
    def is_done(self) -> bool:
        return self.is_up and self.ledger.version >= self._world.options.max_steps

    @property
    def num_records(self) -> int:
        return len(self._durable) + len(self._unsynced)

    def _come_back(self) -> None:
        count, snapshot = self._snapshot or (0, None)
        tail = [_CODEC.decode(msgspec.msgpack.encode(record)) for record in self._durable[count:]]
        self.ledger, self.payloads = self._class.restore(self._config, snapshot, tail), Payloads(self._world)
        self.invariants.restarted(self.ledger, self._durable)
        self._orphaned_since.clear()
        self.is_up = True
        self.take(events.Restart())
        self.payloads.restarted(self.ledger)
        self._world.after(RETURN_S, self._give_up, self._life)
        self._world.reconnect_all()

    def _sync(self, life: int) -> None:
        if life != self._life or self._puts_off(self._sync, life):
            return
        self._durable += self._unsynced
        outputs, self._unsynced, self._outputs = self._outputs, [], []
        if len(self._durable) > (self._snapshot[0] if self._snapshot else 0) + SNAPSHOT_RECORDS:
            self._snapshot = (len(self._durable), self.ledger.snapshot())
        self._release(outputs)

    def _release(self, outputs: list[events.Output]) -> None:
        for output in outputs:
            assert not isinstance(output, events.Halt), output.message
            self._world.report.removed += isinstance(output, events.Removed)
            if isinstance(output, events.PoliciesLost):
                self._world.after(0.1, self._roll_back)
            elif isinstance(output, events.To):
                self._send(output)

    def _send(self, output: events.To) -> None:
        if isinstance(output.message, p.Batch) and (missing := self.payloads.missing(output.message)):
            self.take(events.GroupsUnheld(missing))
        elif (message := self.payloads.complete(output)) is not None:
            self._world.to_replica(events.To(output.replica, message))

    def _give_up(self, life: int) -> None:
        """Generate the groups again that have not returned after a restart."""
        if life == self._life:
            self._generate_again(self.payloads.give_up(self.ledger))

    def _generate_again(self, lost: tuple[int, ...]) -> None:
        if lost:
            self.take(events.GroupsUnheld(lost))

    def _roll_back(self) -> None:
        if self.is_up and self.ledger.is_orphaned:
            self._world.report.rollbacks += 1
            self.take(events.Rollback(self._world.positions[self.ledger.checkpoint_version]))

    def _tick(self) -> None:
        self._world.after(TICK_S, self._tick)
        if self.is_up and self._world.now >= self._paused_until:
            self.take(events.Tick())
            self._check_reissue()

    def _check_reissue(self) -> None:
        """A lease of a dead process returns within the grace, one nobody works on within its time to live.

        Both have one tick more, and the latter what the network adds.
        """
        config, now, before = self._config, self.ledger.now, self._orphaned_since
        bound_dead_s = config.suspect_grace_s + 2 * TICK_S
        bound_s = config.lease_ttl_s + config.suspect_grace_s + TICK_S + self._world.LONGEST_DELAY_S
        orphaned: dict[tuple[int, int, int], float] = {}
        for sample, name in self.invariants.history.leased.items():
            replica = self._world.replicas[name]
            if not replica.works_on(sample):
                key = (sample, self.ledger.samples.active[sample].attempt, replica.process)
                orphaned[key] = before.get(key, now)
                idle_s = now - orphaned[key]
                assert idle_s <= (bound_s if replica.is_alive else bound_dead_s), (
                    f"nobody works on sample {sample}, leased to {name}, for {idle_s:.1f} s"
                )
        self._orphaned_since = orphaned


def _requests_batch(event: events.Event) -> bool:
    return isinstance(event, events.From) and isinstance(event.message, p.RequestBatch)
