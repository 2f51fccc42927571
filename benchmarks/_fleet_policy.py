"""The policy side of controller.py: policies without a model."""

from __future__ import annotations

import asyncio
import contextlib

from _fleet import HEARTBEAT_S, open_lasting

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.workers.connection import LastingConnection


class FakePolicy:
    """Receives each batch, votes for it and reports the step. With `saves` it reports a checkpoint every fifth step."""

    def __init__(self, connection: LastingConnection, *, saves: bool) -> None:
        self.messages = 0
        self.steps = 0
        self.votes = asyncio.Event()
        """While it is not set, batches are received and no vote is sent."""
        self.votes.set()
        self._connection = connection
        self._saves = saves
        self._epoch = 0
        self._batch: p.Batch | None = None
        self._has_batch = asyncio.Event()
        """Whether `_batch` waits for a vote."""
        works = (self._receive(), self._vote(), self._beat())
        self._tasks = [asyncio.create_task(work) for work in works]

    @classmethod
    async def open(cls, address: str, token: bytes, index: int) -> FakePolicy:
        connecting = asyncio.Semaphore()
        connection = await open_lasting(
            address, token=token, name=f"policy-{index}", role="policy", connecting=connecting
        )
        return cls(connection, saves=index == 0)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._connection.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            with contextlib.suppress(ConnectionClosed):  # the benchmark is over
                self._send(p.Heartbeat(self.messages, version=self.steps))

    def _send(self, message: p.ToController) -> None:
        self._connection.post(message)
        self.messages += 1

    async def _receive(self) -> None:
        with contextlib.suppress(ConnectionClosed):  # the benchmark is over
            while True:
                message = await self._connection.receive()
                self.messages += 1
                match message:
                    case p.Welcome():
                        self._send(p.Ready(address="tcp://127.0.0.1:1"))
                    case p.Remesh():
                        self._has_batch.clear()
                        self._epoch = message.epoch
                        self._send(p.RequestBatch(message.version, message.epoch))
                    case p.Batch():
                        self._batch = message
                        self._has_batch.set()
                    case p.Committed():
                        self._done(message.step + 1)

    async def _vote(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self._has_batch.wait()
                await self.votes.wait()
                if self._has_batch.is_set():
                    assert self._batch is not None
                    self._has_batch.clear()
                    self._send(p.Vote(self._batch.step, self._batch.epoch))

    def _done(self, version: int) -> None:
        self.steps = version
        self._send(p.StepDone(version - 1, version, {"loss": 0.0}))
        if self._saves and version % 5 == 0:
            self._send(p.CheckpointDone(version, "/checkpoints/step"))
        self._send(p.RequestBatch(version, self._epoch))
