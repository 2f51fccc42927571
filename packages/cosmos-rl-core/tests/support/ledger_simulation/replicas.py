"""Fake replicas: they send what real ones send, repeat it until answered, die, hang and lose connections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.rollout.spool.store import Spooled
from ledger_simulation.invariants import trained
from ledger_simulation.payloads import content_of, read

if TYPE_CHECKING:
    from ledger_simulation.world import World

HEARTBEAT_S = 1.0
RETRY_S = 1.5


class FakeReplica(ABC):
    """What both roles share: a process with a connection."""

    role: p.Role

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.process = 0
        """Number of the process; what an earlier one had planned no longer happens."""
        self.is_alive = False
        self.is_lost_for_good = False
        self.hangs_until = -1.0
        self.beats_while_hung = False
        """Whether heartbeats go on, without progress, as from a thread beside a stuck loop."""
        self.incarnation = 0
        self.progress = 0
        self.lineage = 0
        self.version = 0

    # --- life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process that knows nothing."""
        self.process += 1
        self.is_alive, self.incarnation, self.progress, self.hangs_until = True, 0, 0, -1.0
        self.forget()
        self.connect()
        self.world.after(HEARTBEAT_S * self.world.random.random(), self.beat, self.process)

    @abstractmethod
    def forget(self) -> None: ...

    def kill(self) -> None:
        if self.world.random.random() < 0.3:
            self.world.files.pop(self.name, None)  # its machine is gone
        is_seen = self.world.random.random() < 0.3  # its launcher reports the end
        self.end(events.Gone(self.name, self.incarnation) if is_seen else None)

    def leave(self) -> None:
        """Leave in good order; the words of a worker may be lost with its connection."""
        if self.is_alive and self.incarnation:
            self.send(p.Goodbye())
            self.end(None)

    def end(self, event: events.Gone | None) -> None:
        """End the process, with this event or with its connection, and start another one later."""
        self.is_alive = False
        self.process += 1
        self.world.soon(event or events.Disconnected(self.name, self.incarnation))
        self.world.after(self.world.random.choice((0.3, 1.0, 4.0, 12.0)), self.start_again, self.process)

    def start_again(self, process: int) -> None:
        if process == self.process and not self.is_lost_for_good:
            self.start()

    def hang(self, duration_s: float, *, beats: bool) -> None:
        self.hangs_until = max(self.hangs_until, self.world.now + duration_s)
        self.beats_while_hung = beats

    def connect(self) -> None:
        """Join, and again until welcomed or refused."""
        self.world.soon(events.Join(self.name, self.role, self.incarnation, (*self.holding(), *self.kept_samples())))
        if self.incarnation == 0 and self.world.options.repeats:
            self.later(RETRY_S * 2, self.connect_again)

    def connect_again(self) -> None:
        if self.incarnation == 0:
            self.connect()

    def holding(self) -> tuple[int, ...]:
        """Return the leased samples in work."""
        return ()

    def kept_samples(self) -> tuple[int, ...]:
        """Return the samples whose groups were not released."""
        return ()

    def waits_for_peers(self) -> bool:
        return False

    @property
    def is_hung(self) -> bool:
        return self.world.now < self.hangs_until

    def later(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        """Do something later, if the process still lives; a hang puts it off."""
        self.world.after(delay_s, self._do, self.process, action, args)

    def _do(self, process: int, action: Callable[..., None], args: tuple[object, ...]) -> None:
        if process != self.process:
            return
        if self.is_hung:
            self.world.after(self.hangs_until - self.world.now, self._do, process, action, args)
        else:
            action(*args)

    def send(self, message: p.ToLedger) -> None:
        if self.incarnation:
            self.world.to_controller(events.From(self.name, self.incarnation, message))

    def beat(self, process: int) -> None:
        if process != self.process:
            return
        waits = self.waits_for_peers()
        if not self.is_hung and not waits:
            self.progress += 1
        if not self.is_hung or self.beats_while_hung:
            self.send(p.Heartbeat(self.progress, holding=self.holding(), waits_for_peers=waits))
        self.world.after(HEARTBEAT_S, self.beat, process)

    # --- messages it receives -------------------------------------------------------------------------

    def receive(self, message: p.FromLedger, process: int) -> None:
        """Act on a message that was sent to a process; the connection of an earlier one is closed."""
        if not self.is_alive or process != self.process:
            return
        if self.is_hung:
            self.later(0.0, self.receive, message, process)
            return
        match message:
            case p.Welcome():
                if self.incarnation in (0, message.incarnation):
                    is_new = self.incarnation == 0
                    self.incarnation = message.incarnation
                    if is_new:
                        self.keep_files(message.kept)
                    self.later(self.world.random.uniform(0.0, 0.5), self.welcomed, is_new)
            case p.Reject(fenced=True):
                if message.incarnation == self.incarnation:
                    self.process += 1
                    self.start()
            case _:
                self.obey(message)

    def keep_files(self, kept: list[str]) -> None:
        """Remove the files of earlier processes that are not needed."""
        files = self.world.files[self.name]
        self.world.files[self.name] = {path: files[path] for path in kept if path in files}

    @abstractmethod
    def welcomed(self, is_new: bool) -> None: ...

    @abstractmethod
    def obey(self, message: p.FromLedger) -> None: ...

    def works_on(self, sample: int) -> bool:
        return False


class FakeRollout(FakeReplica):
    """Asks for leases, takes its time, delivers, and loads new weights now and then."""

    role = "rollout"

    def forget(self) -> None:
        self.running: dict[int, tuple[int, int]] = {}
        """Sample -> (attempt, version when it began)."""
        self.unsettled: dict[int, p.Deliver | p.Failed] = {}
        """Results without an answer of the ledger."""
        self.kept: dict[tuple[int, int], p.Deliver] = {}
        """(sample, attempt) -> group that was not released, for a controller that has lost it."""
        self.is_ready = self.has_no_more = False
        self.asked: p.RequestLeases | None = None
        """The request that waits for its Grant."""

    def holding(self) -> tuple[int, ...]:
        return (*self.running, *self.unsettled)

    def kept_samples(self) -> tuple[int, ...]:
        return tuple(sample for sample, _ in self.kept)

    def leave(self) -> None:
        """Return the prompts in work first; what is done by then is delivered."""
        if self.is_alive and self.incarnation:
            self.send(p.Return(tuple(self.running)))
            self.running.clear()
            self.settle()
        super().leave()

    def works_on(self, sample: int) -> bool:
        return self.is_alive and not self.is_hung and (sample in self.running or sample in self.unsettled)

    def welcomed(self, is_new: bool) -> None:
        if is_new:
            self.lineage, self.version = self.world.published
            self.send(p.Ready())
            self.ask()
            self.load()
        else:
            self.ask()
            for group in self.kept.values():
                self.send(group)

    def load(self) -> None:
        if self.world.published[0] != self.lineage:
            self.running.clear()  # it missed the rollback
        (lineage, version), interval = self.world.published, self.world.options.interval
        if lineage != self.lineage or version // interval > self.version // interval:
            self.lineage, self.version = lineage, version
        self.request()
        self.later(self.world.random.uniform(0.1, 0.6), self.load)

    def ask(self) -> None:
        """Ask for what fits, also after a lost request or a lost answer."""
        self.send(p.Ready())
        self.asked = None
        self.request()
        self.settle()
        if self.world.options.repeats:
            self.later(RETRY_S, self.ask)

    def request(self) -> None:
        """Ask for what fits, unless that is asked for already."""
        asked = p.RequestLeases(self.version, self.world.options.capacity - len(self.running), self.lineage)
        if asked.capacity > 0 and asked != self.asked and not self.has_no_more:
            self.asked = asked
            self.send(asked)

    def settle(self) -> None:
        for message in self.unsettled.values():
            self.send(message)

    def obey(self, message: p.FromLedger) -> None:
        match message:
            case p.Grant():
                self.asked = None
                for lease in message.prompts:
                    if lease.sample not in self.running and lease.sample not in self.unsettled:
                        self.running[lease.sample] = (lease.attempt, self.version)
                        duration = self.world.random.lognormvariate(-0.7, 0.7)
                        self.later(duration, self.finish, lease.sample, lease.attempt)
            case p.Cancel():
                self.running.pop(message.sample, None)
            case p.Ack() | p.Reject():
                self.unsettled.pop(message.sample, None)
            case p.Release():
                for path in message.paths:
                    self.world.files[self.name].pop(path, None)
                for group in message.groups:
                    self.kept.pop(group, None)
            case p.NoMore():
                self.has_no_more = True
            case p.LineageRolledBack():
                self.has_no_more = False
                self.running.clear()

    def finish(self, sample: int, attempt: int) -> None:
        if self.running.get(sample, (0, 0))[0] != attempt:
            return
        _, born = self.running.pop(sample)
        luck = self.world.random.random()
        if luck < 0.02:
            message = p.Failed(sample, attempt, "unlucky")
        elif luck < 0.05:
            message = p.Failed(sample, attempt, "filtered:zero_variance", final=True, mean_reward=1.0)
        else:
            oldest, newest = sorted((born, self.version))
            group = p.Deliver(sample, attempt, oldest, newest, 10, lineage=self.lineage, mean_reward=sample % 5 / 4)
            message = self.keep(group)
        self.unsettled[sample] = message
        self.send(message)
        self.request()

    def keep(self, group: p.Deliver) -> p.Deliver:
        """Return the group with its content or, for one of two, with a reference to a file, and keep it."""
        content, path = content_of(self.name, group), f"{group.sample}-{group.attempt}"
        payload: p.Payload = content.encode()
        if self.world.random.random() < 0.5:
            self.world.files[self.name][path] = content
            payload = Spooled(path, len(content), digest=content.encode())
        group = self.kept[group.sample, group.attempt] = msgspec.structs.replace(group, payload=payload)
        return group


class FakePolicy(FakeReplica):
    """Asks for the batch, trains, votes, applies what was committed, publishes and saves checkpoints."""

    role = "policy"

    def forget(self) -> None:
        self.epoch = 0
        self.members: tuple[str, ...] = ()
        self.batch: p.Batch | None = None
        self.has_gradients = False
        self.lost: tuple[int, ...] = ()
        """Samples of the batch that cannot be read."""
        self.weights = ""

    def welcomed(self, is_new: bool) -> None:
        if is_new or not self.world.options.repeats:
            self.nag()

    def nag(self) -> None:
        """Repeat what has not been answered."""
        self.send(p.Ready())
        if self.batch is None:
            self.ask()
        elif self.has_gradients:
            self.send(p.Vote(self.batch.step, self.epoch))
        elif self.lost:
            self.complain(self.batch)
        if self.world.options.repeats:
            self.later(RETRY_S, self.nag)

    def ask(self) -> None:
        self.send(p.RequestBatch(self.version, self.epoch))

    def obey(self, message: p.FromLedger) -> None:
        match message:
            case p.Remesh():
                if message.epoch > self.epoch:
                    self.epoch, self.members = message.epoch, message.members
                    self.batch, self.has_gradients, self.lost = None, False, ()
                    self.heal(message.lineage, message.version)
                    self.ask()
            case p.Batch():
                is_wanted = (message.step, message.epoch) == (self.version, self.epoch)
                if is_wanted and self.batch is None:
                    self.batch = message
                    self.later(self.world.random.uniform(0.1, 0.6), self.train, message)
            case p.Committed():
                if message.step == self.version and self.batch is not None and self.has_gradients:
                    self.apply(self.batch)

    def heal(self, lineage: int, version: int) -> None:
        """Take the weights from the other members or from the checkpoint."""
        self.lineage, self.version = lineage, version
        known = self.world.controller.invariants.history.weights
        self.weights = known[version] if version < len(known) else ""
        self.publish()

    def train(self, batch: p.Batch) -> None:
        if self.batch is not batch:
            return
        found = zip(batch.own, read(self.world, batch.payloads), strict=True)
        self.lost = tuple(sample for sample, text in found if text is None or sample in self.world.unreadable)
        if self.lost:
            self.complain(batch)
        else:
            self.has_gradients = True
            self.send(p.Vote(batch.step, batch.epoch))

    def waits_for_peers(self) -> bool:
        return self.has_gradients and len(self.members) > 1

    def accuse(self) -> None:
        """Report other policies of the mesh as unreachable, or none in particular."""
        if self.is_alive and self.incarnation and len(self.members) > 1 and not self.is_hung:
            others = [name for name in self.members if name != self.name]
            suspects = tuple(name for name in others if self.world.random.random() < 0.5)
            self.send(p.PeersLost(self.epoch, "no connection", suspects))

    def complain(self, batch: p.Batch) -> None:
        """Report the groups that cannot be read; the answer is a new epoch."""
        self.send(p.PayloadsUnreadable(batch.step, batch.epoch, self.lost, "gone"))

    def apply(self, batch: p.Batch) -> None:
        self.weights = trained(self.weights, batch.samples)
        self.version += 1
        self.batch, self.has_gradients = None, False
        self.publish()
        self.ask()
        if self.version % self.world.options.checkpoint_every == 0 and self.name == self.members[0]:
            saved = p.CheckpointDone(self.version, lineage=self.lineage)
            self.later(self.world.random.uniform(0.1, 2.0), self.send, saved)

    def publish(self) -> None:
        self.world.publish(self.name, self.lineage, self.version, self.weights)
