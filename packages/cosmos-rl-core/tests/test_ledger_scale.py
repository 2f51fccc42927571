"""An event costs the ledger the same with 4,096 replicas as with 256."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.state import LedgerConfig

FEW, MANY = 256, 4096
LARGEST_RATIO = 3.0
"""16 or more where an event visits all members; about 1.2 otherwise, since dictionaries outgrow the caches."""


class Fleet:
    """A ledger, `num` rollout replicas in some state, and the next event of each of them."""

    def __init__(self, num: int, *, per_replica: int = 2, max_steps: int | None = None) -> None:
        config = LedgerConfig(groups_per_step=num * per_replica, policy_members=3, max_steps=max_steps)
        self.ledger = Ledger(config)
        self.num = num
        self.names = [f"rollout-{number}" for number in range(num)]
        for number in range(3):
            self.feed(events.Join(f"policy-{number}", "policy"))
            self.feed(self.send(f"policy-{number}", p.Ready()))

    def feed(self, event: events.Event) -> list[events.Output]:
        return self.ledger.on(0.0, event)[1]

    def send(self, name: str, message: p.ToLedger) -> events.From:
        return events.From(name, 1, message)

    def each(self, message: p.ToLedger) -> list[events.Event]:
        return [self.send(name, message) for name in self.names]

    def joins(self) -> list[events.Event]:
        return [events.Join(name, "rollout") for name in self.names]

    def join(self) -> None:
        for event in (*self.joins(), *self.each(p.Ready())):
            self.feed(event)

    def lease(self, capacity: int) -> None:
        """Lease one group to each replica; the requests beyond that wait."""
        for event in self.each(p.RequestLeases(0, capacity)):
            self.feed(event)

    def held(self) -> Iterator[tuple[str, int]]:
        return ((name, sample) for name, samples in self.ledger.samples.leased.items() for sample in samples)


def joins(fleet: Fleet) -> list[events.Event]:
    return fleet.joins()


def ready(fleet: Fleet) -> list[events.Event]:
    for event in fleet.joins():
        fleet.feed(event)
    return fleet.each(p.Ready())


def heartbeats(fleet: Fleet) -> list[events.Event]:
    fleet.join()
    fleet.lease(1)
    return [fleet.send(name, p.Heartbeat(1, 0.5, (sample,))) for name, sample in fleet.held()]


def heartbeats_beside_requests_that_cannot_be_granted(fleet: Fleet) -> list[events.Event]:
    """Every second replica holds its share and requests more; the window has room for the others, which are busy."""
    fleet.join()
    for name in fleet.names[::2]:
        fleet.feed(fleet.send(name, p.RequestLeases(0, 2)))
        assert fleet.feed(fleet.send(name, p.RequestLeases(0, 8))) == []
    assert fleet.ledger.counts()["leased"] == fleet.num
    return fleet.each(p.Heartbeat(1, 0.5))


def requests(fleet: Fleet) -> list[events.Event]:
    fleet.join()
    return fleet.each(p.RequestLeases(0, 1))


def deliveries(fleet: Fleet) -> list[events.Event]:
    fleet.join()
    fleet.lease(1)
    return [fleet.send(name, p.Deliver(sample, 1, 0, 0, 10)) for name, sample in fleet.held()]


def failures_while_all_others_wait(fleet: Fleet) -> list[events.Event]:
    """Each failure makes room for one lease, and thousands wait for it."""
    fleet.join()
    fleet.lease(2)
    fleet.lease(8)
    return [fleet.send(name, p.Failed(sample, 1, "filtered:dull", final=True)) for name, sample in fleet.held()][::8]


def disconnections(fleet: Fleet) -> list[events.Event]:
    fleet.join()
    fleet.lease(1)
    return [events.Disconnected(name, 1) for name in fleet.names]


def reconnections(fleet: Fleet) -> list[events.Event]:
    for event in disconnections(fleet):
        fleet.feed(event)
    return [events.Join(name, "rollout", 1, (sample,)) for name, sample in fleet.held()]


def departures(fleet: Fleet) -> list[events.Event]:
    fleet.join()
    fleet.lease(1)
    return fleet.each(p.Goodbye())


def cost_s(num: int, case) -> float:
    """CPU seconds an event, the least of three."""
    costs = []
    gc.collect()
    gc.disable()  # a collection visits the objects of all tests
    try:
        for _ in range(3):
            fleet = Fleet(num)
            work = case(fleet)
            began = time.process_time()
            for event in work:
                fleet.ledger.on(0.0, event)
            costs.append((time.process_time() - began) / len(work))
    finally:
        gc.enable()
    return min(costs)


@pytest.mark.parametrize(
    "case",
    [
        joins,
        ready,
        heartbeats,
        heartbeats_beside_requests_that_cannot_be_granted,
        requests,
        deliveries,
        failures_while_all_others_wait,
        disconnections,
        reconnections,
        departures,
    ],
)
def test_the_cost_of_an_event_does_not_grow_with_the_members(case):
    few, many = cost_s(FEW, case), cost_s(MANY, case)
    assert many < LARGEST_RATIO * few, f"{1e6 * few:.1f} us at {FEW} replicas, {1e6 * many:.1f} us at {MANY}"


def test_a_supervised_batch_does_not_cost_more_the_longer_the_run():
    def cost_of_steps(ledger: Ledger, num: int) -> float:
        began = time.process_time()
        for step in range(ledger.version, ledger.version + num):
            epoch = ledger.members.epoch
            for message in (p.RequestBatch(step, epoch), p.Vote(step, epoch), p.CheckpointDone(step + 1)):
                ledger.on(0.0, events.From("policy-0", 1, message))
        assert ledger.version == ledger.checkpoint_version
        return time.process_time() - began

    ledger = Ledger(LedgerConfig(groups_per_step=16, rollouts=False))
    ledger.on(0.0, events.Join("policy-0", "policy"))
    ledger.on(0.0, events.From("policy-0", 1, p.Ready()))
    first = min(cost_of_steps(ledger, 100) for _ in range(3))
    cost_of_steps(ledger, 5000)
    assert min(cost_of_steps(ledger, 100) for _ in range(3)) < LARGEST_RATIO * first
