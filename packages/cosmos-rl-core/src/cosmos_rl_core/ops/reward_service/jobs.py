"""The requests of a server and their bodies, from arrival to the expiry of results. Bounded; no request is dropped.

reserved -- body read --> queued -- all rewards scored --> done | failed -- fetched or expired --> deleted
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cosmos_rl_core.ops.reward_service.settings import ServerSettings
from cosmos_rl_core.reward.pool.body import BodySpool
from cosmos_rl_core.reward.pool.worker import Result
from cosmos_rl_core.reward.request import Header


class QueueFull(Exception):
    """The queue has no room."""


class RequestConflict(Exception):
    """A request id was used again with another body."""


@dataclass(eq=False, slots=True, kw_only=True)
class RewardJob:
    """One request."""

    header: Header
    spool: BodySpool
    num_bytes: int
    uuid: str
    """The server's id."""
    scores: dict[str, list[float]] = field(default_factory=dict)
    """Scores of the finished rewards."""
    error: str = ""
    """Reason of the failure."""
    waiting_for: set[int]
    """Indices of the header's unfinished rewards."""
    results: list[asyncio.Future[Result]] = field(default_factory=list)
    """Those of its rewards, cancelled when it is done: another reward may have failed it."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    was_fetched: bool = False
    expires_at: float = math.inf

    @property
    def total(self) -> list[float]:
        """Weighted sum of the rewards, [B]; a reward in parts counts as their sum."""
        weights = {reward.name: reward.weight for reward in self.header.rewards}
        columns = [(weights[name.partition(".")[0]], values) for name, values in self.scores.items()]
        return [sum(weight * values[i] for weight, values in columns) for i in range(self.header.size)]


class Jobs:
    """All jobs of a server.

    with jobs.reserve(num_bytes):                 # QueueFull -> 429
        ...                                       # read the body
        job, is_new = jobs.add(header, spool)     # RequestConflict -> 409
    jobs.score(job, reward, scores); jobs.fail(job, reason)
    jobs.find(uuid); jobs.fetched(job); jobs.forget_expired()
    """

    def __init__(self, settings: ServerSettings, *, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._by_uuid: dict[str, RewardJob] = {}
        self._by_id: dict[tuple[str, str], RewardJob] = {}
        self.num_open = 0
        """Number of arriving and unfinished requests."""
        self.open_bytes = 0
        """Total size of their bodies."""
        self.closed = False

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Reserve room for an arriving body; `add` takes over the reservation. Raises QueueFull."""
        full = self.num_open >= self._settings.queue_size
        if full or (self.num_open and self.open_bytes + num_bytes > self._settings.queue_bytes):
            raise QueueFull(f"{self.num_open} requests of {self.open_bytes} bytes are not done; ask again later")
        self._open(1, num_bytes)
        try:
            yield
        finally:
            self._open(-1, -num_bytes)

    def add(self, header: Header, spool: BodySpool) -> tuple[RewardJob, bool]:
        """Return the job of a request and whether it is new; for a known job the spool is closed.

        Raises RequestConflict for an id that was used with another body.
        """
        key = (header.client, header.id)
        earlier = self._by_id.get(key) if header.id else None
        if earlier is not None and earlier.expires_at > self._clock():
            if (earlier.spool.crc, earlier.num_bytes) != (spool.crc, spool.num_bytes):
                raise RequestConflict(f"request id {header.id!r} was used for another request; give each its own")
            spool.close()
            return earlier, False
        waiting_for = set(range(len(header.rewards)))
        job = RewardJob(
            header=header, spool=spool, num_bytes=spool.num_bytes, uuid=uuid.uuid4().hex, waiting_for=waiting_for
        )
        self._by_uuid[job.uuid] = job
        if header.id:
            self._by_id[key] = job
        self._open(1, job.num_bytes)
        return job, True

    def find(self, uuid: str) -> RewardJob | None:
        """Return a stored job."""
        job = self._by_uuid.get(uuid)
        return job if job is not None and job.expires_at > self._clock() else None

    def score(self, job: RewardJob, reward: int, scores: dict[str, list[float]]) -> None:
        """Store a reward's scores; the last one finishes the job. Invalid scores fail it."""
        name = job.header.rewards[reward].name
        if job.done.is_set():
            return
        if problem := _problem(scores, name=name, size=job.header.size):
            self.fail(job, problem)
            return
        job.scores.update(scores)
        job.waiting_for.discard(reward)
        if not job.waiting_for:
            self._finish(job)

    def fail(self, job: RewardJob, reason: str) -> None:
        """End a job without scores."""
        if not job.done.is_set():
            job.error = reason
            self._finish(job)

    def fetched(self, job: RewardJob) -> None:
        """Record that a result was sent; it expires `fetched_ttl_s` after the first time."""
        if not job.was_fetched:
            job.was_fetched = True
            job.expires_at = self._clock() + self._settings.fetched_ttl_s

    def forget_expired(self) -> None:
        """Delete expired results."""
        now = self._clock()
        for job in [job for job in self._by_uuid.values() if job.expires_at <= now]:
            del self._by_uuid[job.uuid]
            key = (job.header.client, job.header.id)
            if self._by_id.get(key) is job:
                del self._by_id[key]

    def close(self) -> None:
        """Wake all waiters and drop unfinished jobs: the server is stopping, and clients retry with the next one."""
        self.closed = True
        for job in self._by_uuid.values():
            if not job.done.is_set():
                self._finish(job)

    def _finish(self, job: RewardJob) -> None:
        for result in job.results:
            result.cancel()
        job.spool.close()
        job.expires_at = self._clock() + self._settings.ttl_s
        self._open(-1, -job.num_bytes)
        job.done.set()

    def _open(self, jobs: int, num_bytes: int) -> None:
        self.num_open += jobs
        self.open_bytes += num_bytes


def _problem(scores: dict[str, list[float]], *, name: str, size: int) -> str:
    """Return the problem of a worker's scores, or an empty string. Checked again here, independently of the worker."""
    if not scores or any(key.partition(".")[0] != name for key in scores):
        return f"{name} gave scores for {', '.join(scores) or 'nothing'}"
    for key, values in scores.items():
        if len(values) != size or not all(map(math.isfinite, values)):
            return f"{key} gave {len(values)} values for {size} samples, or one that is not finite"
    return ""
