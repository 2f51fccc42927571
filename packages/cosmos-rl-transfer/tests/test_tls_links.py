"""Weights over TLS."""

import asyncio

import pytest
import torch
from transfer_samples import TOKEN, assert_version, blank, sync, weights_at

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.certificates import make_bundles
from cosmos_rl_transfer import AuthenticationError, Publisher, ReplicaMember, ReplicaSubscriber, Subscriber
from cosmos_rl_transfer.transports import select

_, WORKERS = make_bundles(valid_days=1)
_, STRANGERS = make_bundles(valid_days=1)


@pytest.mark.parametrize("staging", ["shadow", "in_place"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_weights_arrive_over_encrypted_links(transport, staging):
    async def main():
        trained, live = weights_at(0, rows=20_000), {}
        publisher = Publisher(
            trained, token=TOKEN, tls=WORKERS, settings=sync(transport=transport, delta=staging == "shadow")
        )
        live = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
        subscriber = Subscriber(
            publisher.address, live, token=TOKEN, tls=WORKERS, settings=sync(transport=transport, staging=staging)
        )
        for version in range(3):
            await publisher.fence()
            for name, tensor in weights_at(version, rows=20_000).items():
                trained[name].copy_(tensor)
            await publisher.publish(version, trained)
            assert await subscriber.stage(after=version - 1) == version
            subscriber.apply()
            assert all(torch.equal(live[name], tensor) for name, tensor in trained.items())
        await subscriber.close()
        await publisher.close()

    asyncio.run(main())


def test_a_late_subscriber_reads_from_another_one_over_tls():
    async def main():
        trained, lives = weights_at(0), [blank(), blank()]
        publisher = Publisher(
            trained, token=TOKEN, tls=WORKERS, settings=sync(transport="tcp", bucket_bytes=2048, patience_s=0.1)
        )
        options = {"token": TOKEN, "tls": WORKERS, "settings": sync(transport="tcp", timeout_s=10)}
        first, second = (Subscriber(publisher.address, live, **options) for live in lives)
        await publisher.publish(0, trained)
        await first.stage(after=-1)
        sent = publisher.sent_bytes
        await second.stage(after=-1)
        assert publisher.sent_bytes == sent
        second.apply()
        assert_version(lives[1], 0)
        for subscriber in (first, second):
            await subscriber.close()
        await publisher.close()

    asyncio.run(main())


def test_the_ranks_of_a_replica_follow_over_tls():
    async def main():
        trained, live = weights_at(5), blank()
        publisher = Publisher(trained, token=TOKEN, tls=WORKERS, settings=sync(transport="tcp"))
        replica = ReplicaSubscriber(publisher.address, token=TOKEN, num_ranks=1, timeout_s=10, tls=WORKERS)
        subscriber = Subscriber(publisher.address, live, token=TOKEN, tls=WORKERS, settings=sync(transport="tcp"))
        member = await asyncio.to_thread(
            ReplicaMember, replica.address, subscriber, token=TOKEN, rank=0, timeout_s=10, tls=WORKERS
        )
        await publisher.publish(5, trained)
        assert await replica.stage(after=-1) == 5
        await asyncio.to_thread(replica.apply)
        assert_version(live, 5)
        await replica.close()
        await asyncio.to_thread(member.close)
        await subscriber.close()
        await publisher.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("publishing", "reading", "message"),
    [
        (WORKERS, None, "the run uses TLS"),
        (None, WORKERS, "the run does not use TLS"),
        (WORKERS, STRANGERS, "the peer's certificate is of another run"),
    ],
)
def test_a_subscriber_without_the_certificate_is_refused(publishing, reading, message):
    async def main():
        publisher = Publisher(weights_at(0), token=TOKEN, tls=publishing, settings=sync(transport="tcp"))
        stranger = Subscriber(publisher.address, blank(), token=TOKEN, tls=reading)
        with pytest.raises(AuthenticationError, match=message):
            await stranger.stage(after=-1)
        await stranger.close()
        await publisher.close()

    asyncio.run(main())


def test_transports_that_do_not_encrypt_are_not_used(monkeypatch):
    monkeypatch.setattr(select, "rdma_devices", lambda: ["mlx5_0"])
    name, outlet = select.open_outlet("auto", bucket_bytes=4096, num_slots=1, encrypted=True)
    outlet.close()
    assert name == "shm"
    with pytest.raises(UserError, match='"nixl" does not encrypt'):
        select.open_outlet("nixl", bucket_bytes=4096, num_slots=1, encrypted=True)
