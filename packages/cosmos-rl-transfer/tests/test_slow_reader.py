"""Readers that are slower than the publisher waits: nothing is reported as damaged, and nothing torn lands."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from transfer_samples import TOKEN, Watched, sync

from cosmos_rl_transfer import Manifest, Publisher, Subscriber
from cosmos_rl_transfer.content.delta import Extent, PieceDelta, encode
from cosmos_rl_transfer.content.digest import bucket_hash, tensor_sum
from cosmos_rl_transfer.layout.box import Box
from cosmos_rl_transfer.planning.bucket import Bucket, BucketPiece
from cosmos_rl_transfer.publish.supply import Slots
from cosmos_rl_transfer.pull.landing import InPlace
from cosmos_rl_transfer.pull.puller import Pulled, Puller
from cosmos_rl_transfer.transports.shm import SharedMemory
from cosmos_rl_transfer.transports.tcp import Tcp
from cosmos_rl_transfer.wire.messages import Data

LONGEST_S = 5.0


class Descheduled(Watched):
    """Stands still before it reads a bucket, until the publisher has packed another one into that slot."""

    def __init__(self, bucket):
        super().__init__(SharedMemory(), self._read_late)
        self.bucket, self.num_lost = bucket, 0

    def _read_late(self, data, packed):
        if data.bucket == self.bucket:
            before, until = bytes(packed), time.monotonic() + LONGEST_S
            while bytes(packed) == before and time.monotonic() < until:
                time.sleep(0.005)
            self.num_lost += bytes(packed) != before
        return packed


def blank(weights):
    return {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}


async def follow(subscriber):
    while True:
        await subscriber.stage(after=0)


def test_a_reader_that_is_descheduled_gets_its_version_and_nothing_is_called_damaged(caplog):
    async def main():
        weights = {f"w{i}": torch.randn(64, 64)[:, ::2] for i in range(12)}  # packed into slots
        publisher = Publisher(weights, token=TOKEN, settings=sync(transport="shm", bucket_bytes=8192, patience_s=0.1))
        await publisher.publish(1, weights)
        live, slow = blank(weights), Descheduled(bucket=3)
        subscriber = Subscriber(publisher.address, live, token=TOKEN, transport=slow)
        others = [Subscriber(publisher.address, blank(weights), token=TOKEN) for _ in range(2)]
        following = [asyncio.create_task(follow(other)) for other in others]
        assert await asyncio.wait_for(subscriber.stage(after=0), 20) == 1
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        assert slow.num_lost == 1
        assert (0, 3) in subscriber.pulled.repaired  # those behind it in the queue may have lost their slot as well
        subscriber.apply()
        assert all(torch.equal(live[name], weights[name]) for name in weights)
        for one in (*others, subscriber, publisher):
            await one.close()

    asyncio.run(main())
    assert caplog.messages == []


class Stalling(Watched):
    """Stands still between a bucket's head and its bytes until it is let go."""

    def __init__(self):
        super().__init__(Tcp(), lambda data, packed: packed)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def attach(self, link, *, offer, memory):
        inlet = super().attach(link, offer=offer, memory=memory)
        receive = inlet.receive

        def late(data, *, out):
            self.reading.set()
            assert self.go_on.wait(20)
            return receive(data, out=out)

        inlet.receive = late
        return inlet


def test_a_bucket_that_was_half_sent_when_the_optimizer_wrote_is_slow_and_not_damaged(caplog):
    async def main():
        weights = {f"w{i}": torch.full((1 << 20,), float(i + 1)) for i in range(3)}  # sent from where they lie
        live, stalling = blank(weights), Stalling()
        publisher = Publisher(
            weights, token=TOKEN, settings=sync(transport="tcp", bucket_bytes=4 << 20, patience_s=0.05)
        )
        subscriber = Subscriber(publisher.address, live, token=TOKEN, transport=stalling, settings=sync(timeout_s=10))
        await publisher.publish(0, weights)
        staging = asyncio.create_task(subscriber.stage(after=-1))
        assert await asyncio.to_thread(stalling.reading.wait, 10)
        await publisher.fence()
        for tensor in weights.values():
            tensor.zero_()
        stalling.go_on.set()
        assert await staging == 0
        assert subscriber.pulled.repaired == [(0, 0)]
        subscriber.apply()
        assert all((live[f"w{i}"] == i + 1).all() for i in range(3))
        await subscriber.close()
        await publisher.close()

    asyncio.run(main())
    assert caplog.messages == []


def test_who_gives_back_a_slot_learns_whether_it_was_its_own_to_the_end():
    ring, slow, other = Slots(1, patience_s=0.0), object(), object()
    lost = ring.take(slow, wait=True)
    ring.start_reading(lost)
    kept = ring.take(other, wait=True)
    assert not ring.free(lost)
    assert ring.free(kept)


@dataclass
class OneSlot:
    """A feed whose bucket lies in a slot, as a view that the publisher goes on writing."""

    buckets: tuple[Bucket, ...]
    data: Data
    view: np.ndarray
    views = True
    over_link = False

    def inlet_for(self, want):
        return self

    def ask(self, buckets, *, want):
        pass

    def head(self, bucket):
        return self.data

    def receive(self, data, *, out):
        return self.view

    def done_with(self, bucket):
        pass


class TakesDeltas:
    """A landing before which the publisher takes the slot back, and which keeps the values it is given."""

    keeps_deltas = takes_deltas = False
    side = None

    def __init__(self, slot):
        self.slot, self.values, self.memory = slot, [], np.empty(0, np.uint8)

    def begin(self, base):
        pass

    def has(self, bucket):
        return False

    def write_delta(self, bucket, changes, sums):
        self.slot[:] = 255
        self.values = [change.values.tolist() for change in changes]
        return True


def test_a_delta_is_written_as_it_was_hashed_also_if_its_slot_is_taken_back_in_between():
    bucket = Bucket(0, 0, 0, (BucketPiece("w", Box((0,), (100,)), 0, "float32"),), 400)
    change = PieceDelta(np.array([3, 70]), np.array([5, 6], np.uint32))
    slot = encode([change], [Extent(100, 4)])
    landing = TakesDeltas(slot)
    view = slot.view()
    view.flags.writeable = False
    feed = OneSlot((bucket,), Data(0, slot.nbytes, bucket_hash(slot), (0,), slot=0, delta=True), view)
    with ThreadPoolExecutor(1) as pool:
        Puller(landing, bucket_bytes=400, pool=pool).pull([feed], Pulled(1))
    assert landing.values == [[5, 6]]


class TakenBack(np.ndarray):
    """A slot that the publisher writes into the moment that somebody asks whether it is read-only."""

    @property
    def flags(self):
        self.base.fill(255)
        return super().flags


def test_what_is_cast_into_live_tensors_is_what_was_hashed():
    """The sum is taken and the values are cast in two passes, over memory that must not change between them."""
    live = {"w": torch.zeros(100, dtype=torch.float64)}
    landing = InPlace(Manifest.from_tensors({"w": torch.zeros(100)}), live, rank=0, wire_dtypes={"w": "float32"})
    box = Box((0,), (100,))
    slot = np.full(100, 1.0, np.float32).view(np.uint8)
    sums = (tensor_sum(slot.view(np.uint32), box, (100,)),)
    view = slot.view(TakenBack)
    view.setflags(write=False)
    landed = landing.write(Bucket(0, 0, 0, (BucketPiece("w", box, 0, "float32"),), 400), view, sums)
    assert not landed or (live["w"] == 1.0).all()
