"""The processes of a trial: `python -m transfer_faults.process SOCKET`.

nursery.py                            this                            its children
a role, a line on standard input ->   forks, all imports done    ->   connects to SOCKET, reports itself
an order                         -------------------------------->    does it
                                 <--------------------------------    Report, or Killing and what follows
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count

import msgspec
from torch import Tensor
from transfer_samples import TOKEN, Watched, sync

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import TransferError
from cosmos_rl_transfer.publish.publisher import Publisher
from cosmos_rl_transfer.pull.subscriber import Subscriber
from cosmos_rl_transfer.pull.two_phase import ReplicaMember, ReplicaSubscriber
from cosmos_rl_transfer.transports.base import Transport
from cosmos_rl_transfer.transports.shm import SharedMemory
from cosmos_rl_transfer.transports.tcp import Tcp
from cosmos_rl_transfer.wire.messages import Data
from transfer_faults.messages import (
    Arm,
    Coordinator,
    Engine,
    Enlist,
    Follow,
    Killing,
    Look,
    Order,
    Publish,
    Rank,
    Report,
    Role,
    Trainer,
)
from transfer_faults.model import NUM_RANKS, content_of, layout_of, part_at

BUCKET_BYTES = 2048
PATIENCE_S = 0.3
TIMEOUT_S = 10.0
"""Longer than any wait may be: nothing may lean on it."""
TRANSPORTS: Mapping[str, Callable[[], Transport]] = {"shm": SharedMemory, "tcp": Tcp}


class _Trigger:
    """Counts buckets that come and the two sides of `apply`, and kills at one of them."""

    def __init__(self, tell: Callable[[Killing], None]) -> None:
        self._tell = tell
        self._steps, self._at, self._pid = count(), -1, 0

    def arm(self, order: Arm) -> None:
        """Count anew, and kill at the step that `order` means if there are as many as up to now."""
        self._at, self._pid, self._steps = int(order.moment * next(self._steps)), order.pid, count()

    def step(self) -> None:
        """Note that something happens."""
        if next(self._steps) == self._at:
            self._tell(Killing(time.monotonic()))
            os.kill(self._pid, signal.SIGKILL)

    def see(self, _: Data, packed: Raw) -> Raw:
        """Note a bucket."""
        self.step()
        return packed

    def around(self, apply: Callable[[], None]) -> None:
        """Call `apply` between two steps."""
        self.step()
        apply()
        self.step()


class _Trains:
    def __init__(self, role: Trainer) -> None:
        self._layout, self._rank = layout_of(role.layout), role.rank
        self.live = part_at(-1, self._layout, role.rank)
        self._publisher = Publisher(
            self.live,
            token=TOKEN,
            manifest=self._layout,
            rank=role.rank,
            settings=sync(
                transport=role.transport,
                bucket_bytes=BUCKET_BYTES,
                patience_s=PATIENCE_S,
                timeout_s=TIMEOUT_S,
                relay=role.relay,
            ),
        )
        self.address = self._publisher.address

    async def obey(self, order: Order) -> int:
        assert isinstance(order, Publish), order
        await self._publisher.fence()
        for name, tensor in part_at(order.version, self._layout, self._rank).items():
            self.live[name].copy_(tensor)
        await self._publisher.publish(order.version, self.live)
        return order.version


class _Coordinates:
    def __init__(self, role: Coordinator) -> None:
        self.live: dict[str, Tensor] = {}
        self._replica = ReplicaSubscriber(role.publishers, token=TOKEN, num_ranks=NUM_RANKS, timeout_s=TIMEOUT_S)
        self.address = self._replica.address

    async def obey(self, order: Order) -> int:
        assert isinstance(order, Follow), order
        version = await self._replica.stage(after=order.after)
        await asyncio.to_thread(self._replica.apply)
        return version


class _Serves:
    """An engine of its own, or a rank of a replica."""

    address = ""

    def __init__(self, role: Engine | Rank, trigger: _Trigger) -> None:
        self._rank = role.rank if isinstance(role, Rank) else 0
        layout = layout_of("columns" if isinstance(role, Rank) else "one")
        self._trigger = trigger
        self._member: ReplicaMember | None = None
        self.live = part_at(-1, layout, self._rank)
        self._subscriber = Subscriber(
            role.publishers,
            self.live,
            token=TOKEN,
            transport=Watched(TRANSPORTS[role.transport](), trigger.see),
            manifest=layout,
            rank=self._rank,
            settings=sync(timeout_s=TIMEOUT_S),
        )

    async def obey(self, order: Order) -> int:
        match order:
            case Follow(after):
                version = await self._subscriber.stage(after=after)
                self._commit()
                return version
            case Enlist(address):
                if self._member is not None:
                    await asyncio.to_thread(self._member.close)
                self._member = ReplicaMember(
                    address, self._subscriber, token=TOKEN, rank=self._rank, timeout_s=TIMEOUT_S, commit=self._commit
                )
            case Arm():
                self._trigger.arm(order)
            case Look():
                pass
            case Publish():
                raise AssertionError(order)
        return -1

    def _commit(self) -> None:
        self._trigger.around(self._subscriber.apply)


def play(role: Role, line: socket.socket) -> None:
    """Report, then obey until the other end is closed."""

    def tell(answer: Report | Killing) -> None:
        line.sendall(msgspec.json.encode(answer) + b"\n")

    def report(version: int, error: str = "") -> None:
        tell(Report(os.getpid(), time.monotonic(), player.address, version, error, content_of(player.live)))

    if isinstance(role, Trainer):
        player = _Trains(role)
    else:
        player = _Coordinates(role) if isinstance(role, Coordinator) else _Serves(role, _Trigger(tell))
    report(-1)
    orders = msgspec.json.Decoder(Order)
    with asyncio.Runner() as runner:
        for text in line.makefile("rb"):
            try:
                report(runner.run(player.obey(orders.decode(text))))
            except (TransferError, ValueError, OSError) as error:
                report(-1, f"{type(error).__name__}: {error}")


def main(path: str) -> None:
    """Fork a child for each role on standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    roles = msgspec.json.Decoder(Role)
    for text in sys.stdin.buffer:
        if os.fork():
            continue
        os.close(sys.stdin.fileno())
        line = socket.socket(socket.AF_UNIX)
        line.connect(path)
        play(roles.decode(text), line)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
