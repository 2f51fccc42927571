"""Requests of several robots in passes of the policy, and what they took.

infer() --> waiting --- the thread of the policy is free: all that wait, at most `max_batch` ---> one pass
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from cosmos_rl_core.wire.listening import SeldomLog
from cosmos_rl_vla.serving.served import ActionRequest, ServedPolicy

KEPT = 10_000
"""Latest requests that the percentiles are of."""
PERCENTILES = (50, 90, 99)


@dataclass(slots=True, kw_only=True)
class Latencies:
    """Times of the latest requests, and counts of all."""

    rows: deque[tuple[float, float, float, int]] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Seconds of waiting for other passes, of the own pass, and from arrival to answer; robots in the pass."""
    requests: int = 0
    refused: int = 0
    passes: int = 0
    robots: int = 0
    """Connected now."""

    def add(self, *, wait_s: float, infer_s: float, total_s: float, batch: int) -> None:
        self.requests += 1
        self.rows.append((wait_s, infer_s, total_s, batch))

    def table(self) -> str:
        """Return counts and percentiles as text."""
        head = f"robots {self.robots}  requests {self.requests}  refused {self.refused}  passes {self.passes}"
        if not self.rows:
            return head
        values = np.percentile(np.array(self.rows), PERCENTILES, axis=0).T
        lines = [f"{'ms':16}" + "".join(f"{f'p{each}':>9}" for each in PERCENTILES)]
        for name, row in zip(("wait", "inference", "total"), values * 1000, strict=False):
            lines.append(f"{name:16}" + "".join(f"{value:9.2f}" for value in row))
        lines.append(f"{'robots a pass':16}" + "".join(f"{value:9.0f}" for value in values[3]))
        return "\n".join([head, *lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredChunk:
    """A chunk of actions, and its times in seconds."""

    actions: np.ndarray
    """[H, D] float32, in the robot's units."""
    wait_s: float
    infer_s: float


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiting:
    request: ActionRequest
    arrived: float
    answer: asyncio.Future[AnsweredChunk]


class PassFailed(Exception):
    """The policy failed on a request; the server goes on."""


class RobotBatcher:
    """Runs the policy in `compute`, a pool of one thread."""

    def __init__(self, policy: ServedPolicy, *, compute: Executor, max_batch: int, log: Callable[[str], None]) -> None:
        self.policy, self.latencies = policy, Latencies()
        self._compute, self._max_batch, self._log = compute, max_batch, log
        self._complain = SeldomLog(log)
        self._waiting: list[_Waiting] = []
        self._arrived = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Number of requests that no pass was begun for."""
        return len(self._waiting)

    def refuse(self, robot: str, error: Exception) -> None:
        """Count a request without an answer, and log it at most once a minute: the robot has the reason itself."""
        self.latencies.refused += 1
        self._complain("refused", f", of {robot}: {error}")

    async def infer(self, request: ActionRequest) -> AnsweredChunk:
        """Return the chunk of a request. If the caller is cancelled while it waits, no pass is made for it."""
        waiting = _Waiting(
            request=request, arrived=time.perf_counter(), answer=asyncio.get_running_loop().create_future()
        )
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.answer

    async def run(self) -> None:
        """Make passes until cancelled."""
        while True:
            await self._arrived.wait()
            batch = self._take()
            if batch and not await self._act(batch) and len(batch) > 1:
                for each in batch:  # whose fault it was decides whether the others have an answer
                    await self._act([each])
            for each in batch:
                if not each.answer.done():
                    each.answer.set_exception(PassFailed("the policy failed on this observation; see the server's log"))

    def _take(self) -> list[_Waiting]:
        """Return the requests of the next pass, in the order of arrival: images of one size, callers still there."""
        self._waiting = [each for each in self._waiting if not each.answer.done()]
        shapes = [each.request.observation.images.shape for each in self._waiting]
        alike = [each for each, shape in zip(self._waiting, shapes, strict=True) if shape == shapes[0]]
        batch = alike[: self._max_batch]
        self._waiting = [each for each in self._waiting if each not in batch]
        if not self._waiting:
            self._arrived.clear()
        return batch

    async def _act(self, batch: list[_Waiting]) -> bool:
        """Make one pass, and answer its requests. Returns whether it succeeded; the log has the reason if not."""
        started = time.perf_counter()
        requests = [each.request for each in batch]
        try:
            chunks = await asyncio.get_running_loop().run_in_executor(self._compute, self.policy.act, requests)
        except Exception as error:  # of torch, of a kernel: the robots of other passes go on
            self._log(f"a pass of {len(batch)} failed: {type(error).__name__}: {error}")
            return False
        ended = time.perf_counter()
        self.latencies.passes += 1
        for each, actions in zip(batch, chunks, strict=True):
            wait_s, infer_s, total_s = started - each.arrived, ended - started, ended - each.arrived
            self.latencies.add(wait_s=wait_s, infer_s=infer_s, total_s=total_s, batch=len(batch))
            if not each.answer.done():
                each.answer.set_result(AnsweredChunk(actions=actions, wait_s=wait_s, infer_s=infer_s))
        return True
