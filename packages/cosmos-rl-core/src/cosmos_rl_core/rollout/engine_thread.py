"""The thread of a rollout engine that computes in this process, and the asyncio side that posts requests to it.

    asyncio loop                            engine thread (one, so that one team of OpenMP workers is used)
    generate, switch ---- posts, bell --->  take posts -> one round of work -> take posts -> ...
                     <-- EngineRequest.done --  finished requests, applied weights, errors

consumes      requests and switches, in the order they were posted; those of one turn of the event loop arrive
              together, so that the same submissions give the same batches and the same bits
produces      finished requests
waits for     the bell, when there is nothing to work on
unblocked by  a post; `close` is one

New weights are applied when posts are taken: between two rounds, and wherever an engine takes posts within a round.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Generic, TypeVar, cast

import torch

from cosmos_rl_core.errors import UserError, WorkerFailed


@dataclass(eq=False, slots=True, kw_only=True)
class EngineRequest:
    """What the engine thread is asked for. It ends once: finished, failed, or cancelled with the task that waits."""

    done: Future[None] = field(default_factory=Future)

    def finish(self) -> None:
        """End the request, unless it has ended."""
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless it has ended."""
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


@dataclass(eq=False, slots=True, kw_only=True)
class _Switch(EngineRequest):
    version: int
    apply: Callable[[], None]


class _Close(EngineRequest):
    """The last post."""


R = TypeVar("R", bound=EngineRequest)


class ThreadedEngine(ABC, Generic[R]):
    """Base of engines with a thread: all of `interfaces.RolloutEngine` but `generate` and `weights`.

        class MyEngine(ThreadedEngine[MyRequest]):
            async def generate(self, prompt, *, num_samples, sampling, seed):
                request = MyRequest(...)
                await self._ask(request)
                return text, request.rollouts

            def _work(self):  # in the thread
                ...  # one forward pass over self._waiting and what runs already; request.finish()

    An error in `_work` or in a switch ends the engine: all who wait raise it, a UserError or WorkerFailed as it is and
    others as the cause of a RuntimeError. `request.fail` ends one request alone.
    """

    def __init__(self, name: str, *, version: int = -1) -> None:
        """name: of the thread, which starts with the first request. version: policy version of the present weights."""
        self._version = version
        self._progress = 0
        self._waiting: deque[R] = deque()
        """Requests in the order they were posted, without cancelled ones. Only the engine thread touches it."""
        self._outbox: list[EngineRequest] = []
        """Posts of this turn of the event loop."""
        self._posts: list[EngineRequest] = []
        self._open: set[EngineRequest] = set()
        """Those that somebody waits for."""
        self._lock = threading.Lock()
        self._bell, self._rope = Pipe(duplex=False)
        """Readable while there are posts: what else the engine waits for, it waits for beside the bell."""
        self._closing = self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def version(self) -> int:
        """Policy version the next term will be sampled with."""
        return self._version

    @property
    def progress(self) -> int:
        """Steps of work so far, for heartbeats: stops growing when the engine hangs."""
        return self._progress

    async def switch(self, version: int, apply: Callable[[], None]) -> None:
        """Run `apply` between two steps; running rollouts go on with the new weights. Returns when done.

        An error in `apply` leaves the weights in doubt and therefore stops the engine.
        """
        await self._ask(_Switch(version=version, apply=apply))

    async def close(self) -> None:
        """Stop after the current step and join the thread. Requests still waiting get a RuntimeError."""
        if self._thread.ident is None:
            self._ended = True
            return
        self._put([_Close()])
        await asyncio.to_thread(self._thread.join)

    # The asyncio side.

    async def _ask(self, request: EngineRequest) -> None:
        """Post a request at the end of this turn of the event loop; return when it is finished, or raise its error."""
        with self._lock:
            if self._ended:
                raise self._stopped()
            self._open.add(request)
        request.done.add_done_callback(lambda _: self._open.discard(request))
        if self._thread.ident is None:
            self._thread.start()
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(request)
        await asyncio.wrap_future(request.done)  # cancelling the task cancels the request

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        self._put(outbox)

    def _put(self, posts: Sequence[EngineRequest]) -> None:
        with self._lock:
            if not self._posts:
                self._rope.send_bytes(b"")
            self._posts += posts

    def _stopped(self) -> BaseException:
        if isinstance(self._error, UserError | WorkerFailed):
            return self._error
        stopped = RuntimeError("the engine has stopped")
        stopped.__cause__ = self._error
        return stopped

    # The engine thread.

    @abstractmethod
    def _work(self) -> None:
        """Do one round of work, short enough for new weights to wait for; called where there may be some to do."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether there is work beside the requests in `_waiting`."""

    @torch.no_grad()
    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._take_posts(wait_for_one=not self._waiting and not self._is_busy()):
                self._work()
        except BaseException as caught:  # for all who wait; their tasks raise it
            error = caught
        with self._lock:
            self._ended, self._error = True, error
            still_open = list(self._open)
        for request in still_open:
            request.fail(self._stopped())

    def _take_posts(self, *, wait_for_one: bool = False) -> bool:
        """Apply new weights and let new requests wait for their turn, in order. False: stop."""
        if wait_for_one and not self._closing:
            wait([self._bell])
        if self._posts:
            with self._lock:
                posts, self._posts = self._posts, []
                self._bell.recv_bytes()
            for post in posts:
                self._take(post)
        if any(request.done.done() for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if not request.done.done())
        return not self._closing

    def _take(self, post: EngineRequest) -> None:
        if isinstance(post, _Close):
            self._closing = True
        elif isinstance(post, _Switch):
            post.apply()
            self._version = post.version
            post.finish()
        else:
            self._waiting.append(cast("R", post))
