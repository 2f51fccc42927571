"""A process dies in the middle of a sync: a receiver, a source, or the coordinator of a replica.

trainers      "one" rank, two with "copies" of everything, or two that "cut" the weights between them
rollouts      two engines of one rank, which may pass buckets on to one another, and a replica of two ranks with its
              coordinator
trial         all take version 0; version 1 is published; while it travels one is killed with SIGKILL
after it      nobody waits for more than `MOST_WAIT_S`; whoever serves holds exactly one version, to the bit; the
              others, and whoever comes back, go on with version 2 where the weights still have an owner
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from transfer_faults.messages import (
    Arm,
    Coordinator,
    Engine,
    Enlist,
    Follow,
    Look,
    Order,
    Publish,
    Rank,
    Report,
    Role,
    Trainer,
)
from transfer_faults.model import NUM_RANKS, content_of, layout_of, part_at
from transfer_faults.nursery import Nursery, Process, nursery

MOST_WAIT_S = 2.0
NUM_ENGINES = 2
Victim = Literal["engine", "rank", "coordinator", "trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is killed, when, and in which company."""

    seed: int
    transport: str
    layout: str
    victim: Victim
    which: int
    """Of its kind."""
    watcher: int
    """Whose buckets are counted where the victim gets none: ranks 0 and 1, or 2 and 3 for the engines."""
    moment: float
    """Of that one's sync."""
    relay: bool
    """Whether the engines pass on."""

    @classmethod
    def draw(cls, seed: int) -> Trial:
        """Return the trial of a seed."""
        random_ = random.Random(seed)
        layout = random_.choice(("one", "copies", "cut"))
        victim: Victim = random_.choice(("engine", "rank", "coordinator", "trainer"))
        return cls(
            seed=seed,
            transport=("shm", "tcp")[seed % 2],
            layout=layout,
            victim=victim,
            which=random_.randrange(1 if victim == "trainer" and layout == "one" else NUM_RANKS),
            watcher=random_.randrange(NUM_RANKS if victim == "coordinator" else NUM_RANKS + NUM_ENGINES),
            moment=random_.random(),
            relay=random_.random() < 0.5,
        )


@dataclass(slots=True)
class Outcome:
    """What a trial led to."""

    trial: Trial
    faults: list[str] = field(default_factory=list)
    """What should not have been, in words."""
    slowest_s: float = 0.0
    """Longest wait for anything after the kill."""
    served: dict[str, int] = field(default_factory=dict)
    """By survivor: the version it held when the dust had settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Many trials."""

    trials: int
    killed: dict[str, int]
    """By victim."""
    slowest_wait_s: float
    committed: int
    """Survivors that held the new version after the kill."""
    kept: int
    """Survivors that still held the previous one."""
    mixed: int
    """Survivors that held neither."""
    faults: tuple[str, ...]


def run_trials(count: int, *, first_seed: int = 0) -> Summary:
    """Run so many trials, over shared memory and TCP in turn."""
    with nursery() as forks:
        outcomes = [run_trial(Trial.draw(first_seed + i), forks) for i in range(count)]
    return summarize(outcomes)


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Count what became of trials."""
    served = [version for outcome in outcomes for version in outcome.served.values()]
    return Summary(
        trials=len(outcomes),
        killed=dict(Counter(outcome.trial.victim for outcome in outcomes)),
        slowest_wait_s=max((outcome.slowest_s for outcome in outcomes), default=0.0),
        committed=served.count(1),
        kept=served.count(0),
        mixed=served.count(-1),
        faults=tuple(f"{outcome.trial}: {fault}" for outcome in outcomes for fault in outcome.faults),
    )


def run_trial(trial: Trial, forks: Nursery) -> Outcome:
    """Run one trial and say what was wrong with it."""
    with ExitStack() as cleanup:
        run = _Run(trial, forks, cleanup)
        run.first_version()
        run.strike()
        run.judge()
        run.go_on()
    return run.outcome


class _Run:
    """The processes of one trial. Version 0 is served before the kill, 1 travels meanwhile, 2 comes after it."""

    def __init__(self, trial: Trial, forks: Nursery, cleanup: ExitStack) -> None:
        self.outcome = Outcome(trial)
        self._trial, self._forks, self._cleanup = trial, forks, cleanup
        self._killed_at = float("inf")
        ranks = layout_of(trial.layout).ranks
        relay = "on" if trial.relay else "off"
        self._trainers = [
            self._fork(Trainer(trial.layout, rank, trial.transport, relay), f"trainer {rank}") for rank in ranks
        ]
        self._publishers = tuple(trainer.address for trainer in self._trainers)
        self._engines = [self._new_engine(number) for number in range(NUM_ENGINES)]
        self._coordinator = self._new_coordinator()
        self._ranks = [self._new_rank(rank) for rank in range(NUM_RANKS)]

    def first_version(self) -> None:
        """Bring everybody to version 0."""
        for trainer in self._trainers:
            trainer.do(Publish(0))
        for follower in self._followers():
            assert follower.do(Follow(-1)).version == 0

    def strike(self) -> None:
        """Publish version 1 and let one be killed while it travels."""
        victim = self._victim()
        seen_alone = self._trial.victim in ("coordinator", "trainer")
        watcher = [*self._ranks, *self._engines][self._trial.watcher] if seen_alone else victim
        watcher.do(Arm(victim.pid, self._trial.moment))
        for trainer in self._trainers:
            trainer.do(Publish(1))
        followers = self._followers()
        for follower in followers:
            follower.ask(Follow(0))
        self._answers = {follower.name: follower.hear() for follower in followers}
        self._looks = {name: self._look(process) for name, process in self._serving().items()}
        if watcher.killed_at is None:  # it had fewer buckets to get this time
            os.kill(victim.pid, signal.SIGKILL)
        self._killed_at = watcher.killed_at or time.monotonic()
        for follower in followers:
            self._time(follower, self._answers[follower.name])

    def judge(self) -> None:
        """Compare what survivors hold with what they say, bit for bit."""
        for name, look in self._looks.items():
            if look is not None:
                self.outcome.served[name] = self._version_in(name, look)
        served, says = self.outcome.served, self._answers["coordinator"]
        for name in (engine.name for engine in self._engines):
            if (said := self._answers[name]) is not None and served.get(name) != (0 if said.error else 1):
                self._fault(f"{name} holds version {served.get(name)} and says {said}")
        held = [served[rank.name] for rank in self._ranks if rank.name in served]
        if says is not None and not says.error and held != [1] * NUM_RANKS:
            self._fault(f"the replica says {says}, its ranks hold {held}")
        if self._trial.victim not in ("rank", "coordinator") and len(set(held)) > 1:
            self._fault(f"all ranks live and hold {held}")

    def go_on(self) -> None:
        """Replace the victim and publish version 2; without an owner of all weights everybody keeps what it has."""
        victim = self._victim()
        if self._trial.victim == "trainer":
            self._trainers.remove(victim)
        elif self._trial.victim == "engine":
            number = self._engines.index(victim)
            self._engines[number] = self._new_engine(number)
            self._expect([self._engines[number]], Follow(-1), 1)
        else:
            if self._trial.victim == "rank":
                self._ranks[self._trial.which] = self._new_rank(self._trial.which)
            else:
                self._coordinator = self._new_coordinator()
                for rank in self._ranks:
                    rank.do(Enlist(self._coordinator.address))
            self._expect([self._coordinator], Follow(-1), 1)
        owned = self._trial.victim != "trainer" or self._trial.layout == "copies"
        self._expect(self._trainers, Publish(2), 2)
        self._expect(self._followers(), Follow(1), 2 if owned else None)
        for name, process in self._serving().items():
            look = self._look(process)
            found = self._version_in(name, look) if look is not None else -1
            if found != (2 if owned else self.outcome.served[name]):
                self._fault(f"{name} holds version {found} in the end, {self.outcome.served.get(name)} before")

    def _expect(self, processes: Sequence[Process], order: Order, version: int | None) -> None:
        """Give an order to all at once that has to end with `version`, or with an error where that is None."""
        for process in processes:
            process.ask(order)
        for process in processes:
            report = process.hear()
            self._time(process, report)
            ended = "dead" if report is None else (None if report.error else report.version)
            if ended != version:
                self._fault(f"{process.name} answers {report} to {order}, not version {version}")

    def _time(self, process: Process, report: Report | None) -> None:
        """Measure how long an answer took, from the order or the kill on, whichever came last."""
        if report is not None:
            waited = report.done_at - max(process.asked_at, self._killed_at)
            self.outcome.slowest_s = max(self.outcome.slowest_s, waited)
            if waited > MOST_WAIT_S:
                self._fault(f"{process.name} took {waited:.2f} s: {report}")

    def _look(self, process: Process) -> Report | None:
        process.ask(Look())
        return process.hear()

    def _version_in(self, name: str, look: Report) -> int:
        """Return which version the live tensors are, -1 for none."""
        kind, number = name.split()
        layout, rank = ("one", 0) if kind == "engine" else ("columns", int(number))
        for version in range(3):
            if look.content == content_of(part_at(version, layout_of(layout), rank)):
                return version
        self._fault(f"{name} holds no version at all")
        return -1

    def _victim(self) -> Process:
        groups = {"engine": self._engines, "coordinator": [self._coordinator]}
        groups |= {"rank": self._ranks, "trainer": self._trainers}
        group = groups[self._trial.victim]
        return group[self._trial.which % len(group)]

    def _serving(self) -> dict[str, Process]:
        return {process.name: process for process in (*self._engines, *self._ranks)}

    def _followers(self) -> list[Process]:
        return [*self._engines, self._coordinator]

    def _fault(self, text: str) -> None:
        self.outcome.faults.append(text)

    def _fork(self, role: Role, name: str) -> Process:
        process = self._forks.fork(role, name)
        self._cleanup.callback(process.close)
        return process

    def _new_engine(self, number: int) -> Process:
        return self._fork(Engine(self._publishers, self._trial.transport), f"engine {number}")

    def _new_coordinator(self) -> Process:
        return self._fork(Coordinator(self._publishers), "coordinator")

    def _new_rank(self, rank: int) -> Process:
        process = self._fork(Rank(self._publishers, self._trial.transport, rank), f"rank {rank}")
        process.do(Enlist(self._coordinator.address))
        return process
