"""The thread of an in-process rollout engine, and the asyncio side that posts requests to it.

    asyncio loop                            engine thread (a single one, with a single team of OpenMP workers)
    generate, switch ---- posts, bell --->  take posts -> one round of work -> take posts -> ...
                     <-- EngineRequest.done --  finished requests, applied weights, errors

consumes      requests and weight switches, in the order of their posts; posts of one turn of the event loop arrive
              together, so that equal submissions give equal batches and bit-identical results
produces      finished requests
waits for     the bell, when there is no work
unblocked by  a post; `close` is one

New weights are applied when posts are taken: between two rounds, and wherever an engine takes posts within a round.
If their publisher is lost meanwhile, the weights may be of two versions: no work is done until the next switch.
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
    """A request to the engine thread. It ends once: finished, failed, or cancelled with the waiting task."""

    done: Future[None] = field(default_factory=Future)

    def finish(self) -> None:
        """End the request, unless it has already ended."""
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless it has already ended."""
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


@dataclass(eq=False, slots=True, kw_only=True)
class _Call(EngineRequest):
    work: Callable[[], None]


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
                ...  # one forward pass over self._waiting and the running requests; request.finish()

    An error in `_work` or in a switch ends the engine and is raised by all waiting requests: a UserError or
    WorkerFailed unchanged, others as the cause of a RuntimeError. `request.fail` ends a single request.
    """

    def __init__(self, name: str, *, version: int = -1) -> None:
        """name: of the thread, which starts with the first request. version: policy version of the current weights."""
        self._version = version
        self._progress = 0
        self._waiting: deque[R] = deque()
        """Requests in the order of their posts, without cancelled ones. Used by the engine thread only."""
        self._outbox: list[EngineRequest] = []
        """Posts of this turn of the event loop."""
        self._posts: list[EngineRequest] = []
        self._open: set[EngineRequest] = set()
        """Requests that have not ended."""
        self._lock = threading.Lock()
        self._bell, self._rope = Pipe(duplex=False)
        """Readable while there are posts; the engine can wait for it together with its other connections."""
        self._closing = self._ended = False
        self._is_torn = False
        """Whether a switch has failed in the middle: the weights may be of two versions."""
        self._error: BaseException | None = None
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        """GPU of the thread that builds the engine; the engine's thread gets the same, as each thread has its own."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def version(self) -> int:
        """Policy version of the weights for the next term."""
        return self._version

    @property
    def progress(self) -> int:
        """Number of work steps so far, for heartbeats; constant if the engine hangs."""
        return self._progress

    async def switch(self, version: int, apply: Callable[[], None]) -> None:
        """Run `apply` between two steps; running rollouts continue with the new weights. Returns when done.

        A ConnectionError in `apply` is raised, and pauses the engine until the next switch. Any other error stops it.
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

    async def _call(self, work: Callable[[], None]) -> None:
        """Run `work` in the engine's thread, between two steps. An error in it ends the engine."""
        await self._ask(_Call(work=work))

    async def _ask(self, request: EngineRequest) -> None:
        """Post a request at the end of this turn of the event loop; return when it has finished, or raise its error."""
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
            rings = not self._posts
            self._posts += posts
        if rings:  # without the lock, which the engine takes as soon as it wakes up
            self._rope.send_bytes(b"")

    def _stopped(self) -> BaseException:
        if isinstance(self._error, UserError | WorkerFailed):
            return self._error
        stopped = RuntimeError("the engine has stopped")
        stopped.__cause__ = self._error
        return stopped

    # The engine thread.

    @abstractmethod
    def _work(self) -> None:
        """Do one round of work; new weights wait until it returns. May be called without work."""

    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether there is work other than the requests in `_waiting`."""

    @torch.no_grad()
    def _run(self) -> None:
        error: BaseException | None = None
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            while self._take_posts(wait_for_one=not self._waiting and not self._is_busy()):
                self._work()
        except BaseException as caught:  # raised by all waiting tasks
            error = caught
        with self._lock:
            self._ended, self._error = True, error
            still_open = list(self._open)
        for request in still_open:
            request.fail(self._stopped())

    def _take_posts(self, *, wait_for_one: bool = False) -> bool:
        """Process posts in order: apply new weights, queue new requests. Returns False to stop."""
        if wait_for_one and not self._closing:
            wait([self._bell])
        self._take_all()
        while self._is_torn and not self._closing:
            wait([self._bell])
            self._take_all()
        if any(request.done.done() for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if not request.done.done())
        return not self._closing

    def _take_all(self) -> None:
        if self._posts:
            with self._lock:
                posts, self._posts = self._posts, []
                self._bell.recv_bytes()
            for post in posts:
                self._take(post)

    def _take(self, post: EngineRequest) -> None:
        if isinstance(post, _Close):
            self._closing = True
        elif isinstance(post, _Switch):
            self._switch(post)
        elif isinstance(post, _Call):
            post.work()
            post.finish()
        else:
            self._waiting.append(cast("R", post))

    def _switch(self, post: _Switch) -> None:
        try:
            post.apply()
        except ConnectionError as error:  # the publisher is lost
            self._is_torn = True
            return post.fail(error)
        self._version, self._is_torn = post.version, False
        post.finish()
