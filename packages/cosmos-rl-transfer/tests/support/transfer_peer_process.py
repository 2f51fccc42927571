"""One side of a sync in a process of its own, for test_faults: python transfer_peer_process.py ROLE ARGUMENT ...."""

import asyncio
import sys
import threading

import torch
from transfer_samples import sync, weights_at

from cosmos_rl_transfer import Publisher, Subscriber
from cosmos_rl_transfer.transports.shm import SharedMemory

TOKEN = b"the run's token"


async def follow(*addresses):
    """Stage and apply every version over shm from the first address and over tcp from the second, and judge each."""
    await asyncio.gather(*(follow_one(*pair) for pair in zip(addresses, ("shm", "tcp"))))


async def follow_one(address, transport):
    live = {name: torch.zeros_like(tensor) for name, tensor in weights_at(0).items()}
    subscriber, version = Subscriber(address, live, token=TOKEN, settings=sync(transport=transport)), -1
    while True:
        version = await subscriber.stage(after=version)
        subscriber.apply()
        exact = all(torch.equal(live[name], tensor) for name, tensor in weights_at(version).items())
        print(transport, "exact" if exact else "wrong", version, flush=True)


class Stalling(SharedMemory):
    """Tells that a bucket has come and never takes it."""

    def attach(self, link, *, offer, memory):
        self.inlet, self.views = super().attach(link, offer=offer, memory=memory), True
        self.over_link = False
        return self

    def receive(self, data, *, out):
        print("reading", flush=True)
        threading.Event().wait()

    def close(self):
        self.inlet.close()


async def stall(address):
    """Begin to read and never end."""
    await Subscriber(address, weights_at(0), token=TOKEN, transport=Stalling()).stage(after=-1)


async def publish(*transports):
    """Publish version 0 over each transport, tell the addresses, and wait for the end."""
    weights = weights_at(0)
    publishers = [Publisher(weights, token=TOKEN, settings=sync(transport=transport)) for transport in transports]
    for publisher in publishers:
        await publisher.publish(0, weights)
        print(publisher.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    asyncio.run({"follow": follow, "stall": stall, "publish": publish}[role](*arguments))
