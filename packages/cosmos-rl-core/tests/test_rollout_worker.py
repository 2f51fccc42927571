"""A rollout replica between its desk, its engine and its weights."""

import asyncio
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from cosmos_rl_core.algorithms.advantages import group_mean
from cosmos_rl_core.algorithms.rules import GroupRules
from cosmos_rl_core.errors import PromptError
from cosmos_rl_core.observe.trace import ROLLOUT_WAITS
from cosmos_rl_core.reward.rubric import Rubric, WeightedReward
from cosmos_rl_core.rollout import following
from cosmos_rl_core.rollout.following import Publication, WeightFollower
from cosmos_rl_core.rollout.rollouter import Requests, Rollouter
from cosmos_rl_core.rollout.worker import PromptLease, RolloutWorker
from cosmos_rl_core.types import Prompt, Rollout, Sampling
from cosmos_rl_core.weight_sync import WeightSubscriber


class Log(list):
    """What happened, in order; tests wait for the next event."""

    def __init__(self):
        super().__init__()
        self._more = asyncio.Event()

    def append(self, event):
        super().append(event)
        self._more.set()

    async def until(self, event, *, times=1):
        while self.count(event) < times:
            self._more.clear()
            await asyncio.wait_for(self._more.wait(), 10.0)


@dataclass
class GatedEngine:
    """Answers a sample when its gate opens; a sample's row may say how it fails."""

    log: Log
    version: int = 0
    progress: int = 0
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    linger: asyncio.Event | None = None
    """Where set, a cancelled request takes until then to free its place."""

    def gate(self, sample):
        return self.gates.setdefault(sample, asyncio.Event())

    def weights(self):
        return {}

    async def generate(self, prompt, *, num_samples, sampling, seed):
        sample = prompt.sample_id
        self.log.append(("start", sample))
        try:
            await self.gate(sample).wait()
        except asyncio.CancelledError:
            self.log.append(("freed", sample))
            if self.linger is not None:
                await self.linger.wait()
            raise
        if "error" in prompt.row:
            raise prompt.row["error"]
        self.progress += 1
        return "", [_rollout(self.version) for _ in range(num_samples)]

    async def switch(self, version, apply):
        apply()
        self.version = version
        self.log.append(("switch", version))

    async def close(self):
        pass


def _rollout(version):
    return Rollout(
        arrays={},
        rollout_logprobs=np.zeros(1, np.float32),
        versions=np.full(1, version, np.int32),
        loss_mask=np.ones(1, np.bool_),
    )


@dataclass
class Desk:
    """A queue of grants and of cancels; everything it is told goes to the log."""

    log: Log
    grants: asyncio.Queue = field(default_factory=asyncio.Queue)
    cancels: asyncio.Queue = field(default_factory=asyncio.Queue)
    releases: asyncio.Queue = field(default_factory=asyncio.Queue)

    lineages: list[int] = field(default_factory=list)
    """Lineages of the requests."""

    def request(self, *, version, capacity, lineage):
        self.lineages.append(lineage)
        self.log.append(("request", version, capacity))

    async def granted(self):
        return await self.grants.get()

    async def deliver(self, lease, group, *, compared):
        self.log.append(("deliver", lease.prompt.sample_id, lease.attempt, lease.evaluation, len(group.rollouts)))

    async def fail(self, lease, error):
        self.log.append(("fail", lease.prompt.sample_id, lease.attempt, error.reason, error.final))

    async def cancelled(self):
        return await self.cancels.get()

    async def released(self):
        return await self.releases.get()


@dataclass
class Subscriber(WeightSubscriber):
    """Versions arrive as the test puts them; an exception is raised."""

    log: Log
    versions: asyncio.Queue = field(default_factory=asyncio.Queue)
    afters: list[int] = field(default_factory=list)
    is_closed: bool = False

    async def stage(self, *, after):
        self.afters.append(after)
        found = await self.versions.get()
        if isinstance(found, Exception):
            raise found
        assert found > after
        return found

    def apply(self):
        assert not self.is_closed
        self.log.append("apply")

    async def close(self):
        self.is_closed = True


class Stage:
    """A running worker with everything around it."""

    def __init__(self, *, version=0, max_groups=3, spool=None, interval=1):
        self.log = Log()
        self.engine = GatedEngine(self.log, version=version)
        self.desk = Desk(self.log)
        self.publications = asyncio.Queue()
        self.subscribers = {address: Subscriber(self.log) for address in ("policy-0", "policy-1")}
        self.subscriber = self.subscribers["policy-0"]
        self.publish("policy-0")
        rollouter = Rollouter(
            self.engine,
            rubric=Rubric([WeightedReward(name="zero", weight=1.0, function=_zero)]),
            rules=GroupRules(advantage=group_mean),
            requests=Requests(
                group_size=2,
                sampling=Sampling(max_terms=1),
                eval_sampling=Sampling(max_terms=1, temperature=0.0),
                seed=0,
            ),
        )
        self.worker = RolloutWorker(
            rollouter,
            weights=WeightFollower(
                self.engine, publications=self.publications.get, subscribe=self.subscribe, lineage=0, interval=interval
            ),
            leases=self.desk,
            max_groups=max_groups,
            spool=spool,
        )
        self.running = asyncio.create_task(self.worker.run())

    def publish(self, address, *, lineage=0, version=0):
        self.publications.put_nowait(Publication(address=address, lineage=lineage, version=version))

    async def subscribe(self, address):
        self.subscribers[address].is_closed = False
        return self.subscribers[address]

    def grant(self, *leases):
        self.desk.grants.put_nowait(leases)

    async def end(self):
        self.desk.grants.put_nowait(None)
        await asyncio.wait_for(self.running, 10.0)


async def _zero(group):
    return [0.0] * len(group.rollouts)


def lease(sample, *, attempt=1, evaluation=False, **row):
    return PromptLease(prompt=Prompt(sample_id=sample, row=row), attempt=attempt, evaluation=evaluation)


def test_a_lease_is_answered_with_a_group_and_a_new_request():
    async def go():
        stage = Stage(version=6)
        stage.engine.gate(4).set()
        stage.grant(lease(4, attempt=2))
        await stage.log.until(("request", 6, 3))
        await stage.end()
        assert stage.log == [("start", 4), ("deliver", 4, 2, False, 2), ("request", 6, 3)]
        assert stage.worker.progress == 2  # the work of the engine, and the scored group

    asyncio.run(go())


def test_leases_are_answered_side_by_side_and_as_they_are_done():
    async def go():
        stage = Stage()
        stage.grant(lease(1), lease(2))
        await stage.log.until(("start", 2))
        stage.engine.gate(2).set()
        await stage.log.until(("request", 0, 2))
        stage.engine.gate(1).set()
        await stage.log.until(("request", 0, 3))
        await stage.end()
        assert [event[1] for event in stage.log if event[0] == "deliver"] == [2, 1]

    asyncio.run(go())


def test_an_evaluation_is_answered_with_one_rollout():
    async def go():
        stage = Stage()
        stage.engine.gate(1).set()
        stage.grant(lease(1, attempt=0, evaluation=True))
        await stage.log.until(("deliver", 1, 0, True, 1))
        await stage.end()

    asyncio.run(go())


def test_an_error_of_the_sample_is_told_with_its_reason_and_the_worker_goes_on():
    async def go():
        stage = Stage()
        stage.engine.gate(1).set()
        stage.engine.gate(2).set()
        stage.grant(lease(1, error=PromptError("too long")))
        await stage.log.until(("fail", 1, 1, "too long", True))
        stage.grant(lease(2))
        await stage.log.until(("deliver", 2, 1, False, 2))
        await stage.end()

    asyncio.run(go())


def test_any_other_error_ends_the_worker():
    async def go():
        stage = Stage()
        stage.engine.gate(1).set()
        stage.grant(lease(1, error=RuntimeError("the engine is broken")), lease(2))
        with pytest.raises(RuntimeError, match="the engine is broken"):
            await asyncio.wait_for(stage.running, 10.0)
        assert ("freed", 2) in stage.log
        assert not [event for event in stage.log if event[0] in ("deliver", "fail")]

    asyncio.run(go())


def test_a_lease_taken_back_stops_its_work_and_no_other():
    async def go():
        stage = Stage()
        stage.grant(lease(1), lease(2))
        await stage.log.until(("start", 2))
        stage.desk.cancels.put_nowait(99)  # an answer that crossed the cancel on its way
        stage.desk.cancels.put_nowait(1)
        await stage.log.until(("request", 0, 2))
        assert stage.worker.holding == [2]
        stage.engine.gate(2).set()
        await stage.log.until(("request", 0, 3))
        await stage.end()
        told = [event[:2] for event in stage.log if event[0] in ("freed", "deliver", "fail")]
        assert told == [("freed", 1), ("deliver", 2)]

    asyncio.run(go())


def test_a_cancel_leaves_an_evaluation_of_the_same_number_alone():
    async def go():
        stage = Stage()
        stage.grant(lease(1, evaluation=True), lease(1))
        await stage.log.until(("start", 1), times=2)
        stage.desk.cancels.put_nowait(1)
        await stage.log.until(("freed", 1))
        stage.engine.gate(1).set()
        await stage.log.until(("deliver", 1, 1, True, 1))
        await stage.end()
        assert not [event for event in stage.log if event[0] == "deliver" and not event[3]]

    asyncio.run(go())


def test_a_lease_granted_anew_outlives_the_end_of_the_cancelled_one():
    async def go():
        stage = Stage()
        stage.engine.linger = asyncio.Event()
        stage.grant(lease(1))
        await stage.log.until(("start", 1))
        stage.desk.cancels.put_nowait(1)
        await stage.log.until(("freed", 1))
        stage.grant(lease(1, attempt=2))
        await stage.log.until(("start", 1), times=2)
        stage.engine.linger.set()
        await stage.log.until(("request", 0, 2))
        assert stage.worker.holding == [1]
        stage.engine.gate(1).set()
        await stage.log.until(("deliver", 1, 2, False, 2))
        await stage.end()

    asyncio.run(go())


def test_the_run_can_end_while_a_cancelled_request_still_frees_its_place():
    async def go():
        stage = Stage()
        stage.engine.linger = asyncio.Event()
        stage.grant(lease(1))
        await stage.log.until(("start", 1))
        stage.desk.cancels.put_nowait(1)
        await stage.log.until(("freed", 1))
        await stage.end()
        assert stage.worker.holding == []

    asyncio.run(go())


def test_new_weights_are_switched_to_and_asked_with():
    async def go():
        stage = Stage(version=-1)
        stage.subscriber.versions.put_nowait(3)
        await stage.log.until(("request", 3, 3))
        stage.subscriber.versions.put_nowait(5)
        await stage.log.until(("request", 5, 3))
        await stage.end()
        first, second = (["apply", ("switch", v), ("request", v, 3)] for v in (3, 5))
        assert stage.log == first + second

    asyncio.run(go())


def test_weights_that_arrive_during_generation_are_not_waited_for():
    async def go():
        stage = Stage()
        stage.grant(lease(1))
        await stage.log.until(("start", 1))
        stage.subscriber.versions.put_nowait(1)
        await stage.log.until(("request", 1, 2))
        stage.engine.gate(1).set()
        await stage.log.until(("request", 1, 3))
        await stage.end()

    asyncio.run(go())


def test_after_the_loss_of_the_publisher_generation_goes_on_and_the_next_one_is_followed():
    async def go():
        stage = Stage()
        stage.subscriber.versions.put_nowait(ConnectionError("the policy is gone"))
        stage.engine.gate(1).set()
        stage.grant(lease(1))
        await stage.log.until(("deliver", 1, 1, False, 2))
        assert stage.subscriber.is_closed
        stage.publish("policy-1")
        stage.subscribers["policy-1"].versions.put_nowait(1)
        await stage.log.until(("request", 1, 3))
        await stage.end()

    asyncio.run(go())


def test_a_lost_publisher_that_is_reached_again_is_followed(monkeypatch):
    monkeypatch.setattr(following, "RETRY_S", 0.01)

    async def go():
        stage = Stage()
        for _ in range(3):
            stage.subscriber.versions.put_nowait(ConnectionError("no answer"))
        stage.subscriber.versions.put_nowait(1)
        await stage.log.until(("request", 1, 3))
        await stage.end()

    asyncio.run(go())


def test_a_new_address_closes_the_subscriber_and_opens_another_during_generation():
    async def go():
        stage = Stage()
        stage.subscriber.versions.put_nowait(4)
        await stage.log.until(("request", 4, 3))
        stage.grant(lease(1))
        await stage.log.until(("start", 1))
        stage.publish("policy-1")
        stage.subscribers["policy-1"].versions.put_nowait(5)
        await stage.log.until(("request", 5, 2))
        assert stage.subscriber.is_closed and ("freed", 1) not in stage.log
        stage.engine.gate(1).set()
        await stage.log.until(("deliver", 1, 1, False, 2))
        await stage.end()

    asyncio.run(go())


def test_every_fourth_version_is_loaded_and_the_one_that_is_needed():
    async def go():
        stage = Stage(version=-1, interval=4)
        stage.subscriber.versions.put_nowait(1)
        await stage.log.until(("request", 1, 3))
        stage.subscriber.versions.put_nowait(5)
        await stage.log.until(("request", 5, 3))
        stage.publish("policy-0", version=7)
        while stage.subscriber.afters[-1] != 6:
            await asyncio.sleep(0)
        stage.subscriber.versions.put_nowait(7)
        await stage.log.until(("request", 7, 3))
        stage.publish("policy-0", lineage=1, version=7)
        while stage.subscriber.afters[-1] != -1:
            await asyncio.sleep(0)
        stage.subscriber.versions.put_nowait(2)
        await stage.log.until(("request", 2, 3))
        await stage.end()
        assert list(dict.fromkeys(stage.subscriber.afters)) == [-1, 3, 7, 6]

    asyncio.run(go())


def test_a_rollback_stops_the_groups_in_work_and_loads_the_lower_version_of_the_new_lineage():
    async def go():
        stage = Stage()
        stage.subscriber.versions.put_nowait(7)
        await stage.log.until(("request", 7, 3))
        stage.grant(lease(1), lease(2, evaluation=True))
        await stage.log.until(("start", 2))
        stage.publish("", lineage=1)
        await stage.log.until(("request", 7, 3), times=2)
        assert stage.worker.holding == [] and {("freed", 1), ("freed", 2)} <= set(stage.log)
        assert set(stage.desk.lineages) == {0}
        stage.publish("policy-1", lineage=1)
        stage.subscribers["policy-1"].versions.put_nowait(4)
        await stage.log.until(("request", 4, 3))
        assert (stage.engine.version, stage.desk.lineages[-1]) == (4, 1)
        await stage.end()
        assert not [event for event in stage.log if event[0] in ("deliver", "fail")]

    asyncio.run(go())


def test_damaged_weights_end_the_worker():
    async def go():
        stage = Stage()
        stage.subscriber.versions.put_nowait(RuntimeError("digest of 'out.weight', version 3"))
        with pytest.raises(RuntimeError, match=r"out.weight"):
            await asyncio.wait_for(stage.running, 10.0)

    asyncio.run(go())


def test_it_waits_while_no_group_is_in_work():
    async def go():
        stage = Stage()
        waited_s = partial(stage.worker._timeline.total, *ROLLOUT_WAITS)
        stage.grant(lease(1), lease(2), lease(7, evaluation=True))
        await stage.log.until(("start", 7))
        early = waited_s()
        assert stage.worker.holding == [1, 2]
        assert waited_s() == early
        for sample in (1, 2, 7):
            stage.engine.gate(sample).set()
        await stage.log.until(("request", 0, 3))
        assert waited_s() > early
        assert stage.worker.holding == []
        await stage.end()

    asyncio.run(go())


def test_work_that_nobody_waits_for_is_stopped_at_the_end():
    async def go():
        stage = Stage()
        stage.grant(lease(1))
        await stage.log.until(("start", 1))
        await stage.end()
        assert ("freed", 1) in stage.log
        assert not [event for event in stage.log if event[0] in ("deliver", "fail")]

    asyncio.run(go())


class Shelf:
    """A spool in which each release makes room for one more group."""

    def __init__(self, *, room):
        self.left = room

    def room(self):
        return self.left

    def release(self, paths):
        self.left += len(paths)


def test_no_more_leases_are_asked_for_than_the_spool_has_room_for():
    async def go():
        stage = Stage(max_groups=3, spool=Shelf(room=0))
        stage.engine.gate(1).set()
        stage.grant(lease(1))
        await stage.log.until(("request", 0, 0))
        stage.desk.releases.put_nowait(["1.group", "2.group"])
        await stage.log.until(("request", 0, 2))
        stage.desk.releases.put_nowait(["3.group", "4.group"])
        await stage.log.until(("request", 0, 3))
        await stage.end()

    asyncio.run(go())


def test_groups_in_work_take_their_room_in_the_spool():
    async def go():
        stage = Stage(max_groups=3, spool=Shelf(room=2))
        stage.engine.gate(1).set()
        stage.grant(lease(1), lease(2))
        await stage.log.until(("request", 0, 1))
        stage.engine.gate(2).set()
        await stage.log.until(("request", 0, 2))
        await stage.end()

    asyncio.run(go())
