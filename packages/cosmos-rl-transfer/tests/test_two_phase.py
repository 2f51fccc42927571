"""The ranks of a rollout replica switch together or not at all."""

import asyncio

import pytest
import torch
from transfer_samples import TOKEN, sync

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer import Manifest, PeerLost, Publisher, Shard, Subscriber, TransferError, WeightMismatch
from cosmos_rl_transfer.pull.two_phase import ReplicaMember, ReplicaSubscriber

SPECS = [WeightSpec(name="w", shape=(8, 6), dtype="float32"), WeightSpec(name="b", shape=(5,), dtype="float32")]
CUT = Manifest.sharded(SPECS, mesh_shape=(2,), placements={"w": [Shard(1)]})


def whole_at(version):
    draw = torch.Generator().manual_seed(version)
    return {spec.name: torch.randn(spec.shape, generator=draw) for spec in SPECS}


def part_of(whole, rank):
    return {"w": whole["w"][:, 3 * rank : 3 * rank + 3], "b": whole["b"]}


class Replica:
    """Two ranks in this process, each with tensors and a subscriber of its own, and what holds them together."""

    def __init__(self, *, commits=(None, None)):
        self.trained = whole_at(0)
        self.publisher = Publisher(self.trained, token=TOKEN, settings=sync(bucket_bytes=64, patience_s=0.2))
        self.together = ReplicaSubscriber(self.publisher.address, token=TOKEN, num_ranks=2, timeout_s=5)
        self.live = [part_of({name: torch.zeros(t.shape) for name, t in self.trained.items()}, rank) for rank in (0, 1)]
        self.subscribers = [
            Subscriber(self.publisher.address, live, token=TOKEN, manifest=CUT, rank=rank, settings=sync(timeout_s=5))
            for rank, live in enumerate(self.live)
        ]
        self.members = [
            ReplicaMember(self.together.address, subscriber, token=TOKEN, rank=rank, timeout_s=5, commit=commits[rank])
            for rank, subscriber in enumerate(self.subscribers)
        ]

    async def publish(self, version):
        await self.publisher.fence()
        for name, tensor in whole_at(version).items():
            self.trained[name].copy_(tensor)
        await self.publisher.publish(version, self.trained)

    def holds(self, version):
        whole = whole_at(version)
        return [
            all(torch.equal(live[n], t) for n, t in part_of(whole, rank).items()) for rank, live in enumerate(self.live)
        ]

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.together.close()
        for member, subscriber in zip(self.members, self.subscribers):
            await asyncio.to_thread(member.close)
            await subscriber.close()
        await self.publisher.close()


def test_all_ranks_stage_before_one_commits_and_then_all_do():
    async def main():
        async with Replica() as replica:
            for version in range(5):
                await replica.publish(version)
                assert await replica.together.stage(after=version - 1) == version
                if version:
                    assert replica.holds(version - 1) == [True, True]
                replica.together.apply()
                assert replica.holds(version) == [True, True]

    asyncio.run(main())


def test_a_rank_that_cannot_stage_keeps_all_at_the_version_they_serve():
    async def main():
        async with Replica() as replica:
            await replica.publish(0)
            await replica.together.stage(after=-1)
            replica.together.apply()
            await replica.publish(1)

            def broken(after):
                raise WeightMismatch("w of version 1 arrived wrong twice")

            replica.subscribers[1].stage_now = broken
            with pytest.raises(TransferError, match=r"rank 1 of the replica: version 1: .*arrived wrong twice"):
                await replica.together.stage(after=0)
            with pytest.raises(TransferError, match="nothing is staged"):
                replica.together.apply()
            assert replica.holds(0) == [True, True]

    asyncio.run(main())


def test_a_rank_that_leaves_between_the_phases_is_named():
    async def main():
        async with Replica() as replica:
            await replica.publish(0)
            await replica.together.stage(after=-1)
            await asyncio.to_thread(replica.members[1].close)
            with pytest.raises(TransferError, match="rank 1 of the replica has ended at Commit"):
                replica.together.apply()

    asyncio.run(main())


def test_a_commit_that_fails_is_an_error_of_the_replica():
    def fail():
        raise RuntimeError("no memory")

    async def main():
        async with Replica(commits=(None, fail)) as replica:
            await replica.publish(0)
            await replica.together.stage(after=-1)
            with pytest.raises(TransferError, match="rank 1 of the replica: version 0: RuntimeError: no memory"):
                replica.together.apply()

    asyncio.run(main())


def lose_publisher(*_):
    raise PeerLost("the publisher is gone")


def test_a_publisher_lost_in_a_commit_may_be_followed_by_another_version():
    async def main():
        async with Replica(commits=(lose_publisher, lose_publisher)) as replica:
            await replica.publish(0)
            await replica.together.stage(after=-1)
            with pytest.raises(PeerLost, match="rank 0 of the replica: version 0: PeerLost: the publisher is gone"):
                replica.together.apply()
            await replica.publish(1)
            assert await replica.together.stage(after=0) == 1

    asyncio.run(main())


def test_another_error_of_a_rank_counts_more_than_a_lost_publisher():
    def fail():
        raise RuntimeError("no memory")

    async def main():
        async with Replica(commits=(lose_publisher, fail)) as replica:
            await replica.publish(0)
            await replica.together.stage(after=-1)
            with pytest.raises(TransferError, match="rank 1 of the replica: version 0: RuntimeError") as caught:
                replica.together.apply()
            assert not isinstance(caught.value, ConnectionError)

    asyncio.run(main())


def test_a_publisher_that_a_rank_loses_while_it_stages_is_lost_for_the_replica():
    async def main():
        async with Replica() as replica:
            await replica.publish(0)
            replica.subscribers[1].stage_now = lose_publisher
            with pytest.raises(PeerLost, match="rank 1"):
                await replica.together.stage(after=-1)

    asyncio.run(main())


def test_ranks_that_staged_different_versions_meet_at_the_newest():
    async def main():
        async with Replica() as replica:
            await replica.publish(0)
            await asyncio.to_thread(replica.subscribers[0].stage_now, -1)
            await replica.publish(1)
            await asyncio.to_thread(replica.subscribers[1].stage_now, 0)
            assert await replica.together.stage(after=-1) == 1
            replica.together.apply()
            assert replica.holds(1) == [True, True]

    asyncio.run(main())


def test_missing_ranks_are_named():
    async def main():
        together = ReplicaSubscriber("127.0.0.1:1", token=TOKEN, num_ranks=2, timeout_s=0.2)
        with pytest.raises(TransferError, match=r"ranks \[0, 1\] of the replica did not connect"):
            await together.stage(after=-1)
        await together.close()

    asyncio.run(main())


def test_a_rank_that_left_meanwhile_is_named_and_the_next_stage_takes_its_replacement():
    async def main():
        async with Replica() as replica:
            await replica.publish(0)
            await replica.together.stage(after=-1)
            await asyncio.to_thread(replica.members[1].close)
            with pytest.raises(TransferError, match=r"ranks \[1\] of the replica have ended"):
                await replica.together.stage(after=-1)
            replica.members[1] = ReplicaMember(
                replica.together.address, replica.subscribers[1], token=TOKEN, rank=1, timeout_s=5
            )
            assert await replica.together.stage(after=-1) == 0
            replica.together.apply()
            assert replica.holds(0) == [True, True]

    asyncio.run(main())
