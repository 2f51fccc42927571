"""A version that is still coming in, passed on bucket by bucket (relay.py)."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from cosmos_rl_transfer.errors import Superseded
from cosmos_rl_transfer.planning.plan import Bucket, Plan

PASS_ON_S = 0.5
"""Time that the next in a ring waits for a bucket that is still to come."""


class Partial:
    """Which buckets of which version can be had. Any thread may ask; one pulls."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = -1
        self._is_whole = False
        self._landed: set[tuple[int, int]] = set()
        self._made: Plan | None = None
        self._rank = 0

    @property
    def is_whole(self) -> bool:
        """Whether everything can be had."""
        return self._is_whole

    @property
    def plan_digest(self) -> str:
        """Of the plan by which publishers send to this rank, "" before there is one."""
        return "" if self._made is None else self._made.digest

    @property
    def wire_dtypes(self) -> Mapping[str, str]:
        """By tensor: what it travels in."""
        return {} if self._made is None else self._made.wire_dtypes

    def describe(self, made: Plan, rank: int) -> None:
        """Note by which plan the publishers send to this rank."""
        with self._changed:
            self._made, self._rank = made, rank

    def stream(self, plan_digest: str, source: int) -> tuple[Bucket, ...] | None:
        """Return the buckets that come from a source rank; None if they come by another plan."""
        with self._changed:
            if self._made is None or self._made.digest != plan_digest:
                return None
            return self._made.stream(source, self._rank)

    def begin(self, version: int) -> None:
        """Serve each bucket of a version from its arrival on."""
        with self._changed:
            self._version, self._is_whole = version, False
            self._landed.clear()
            self._changed.notify_all()

    def landed(self, bucket: Bucket) -> None:
        """A bucket of it was verified and is in its place."""
        with self._changed:
            self._landed.add((bucket.source, bucket.index))
            self._changed.notify_all()

    def complete(self, version: int) -> bool:
        """All of the version is there; returns whether it had begun before."""
        with self._changed:
            begun = self._version == version
            self._version, self._is_whole = version, True
            self._changed.notify_all()
            return begun

    def end(self) -> None:
        """Nothing can be had any more."""
        self.begin(-1)

    def wait(self, version: int, bucket: Bucket, *, timeout_s: float) -> None:
        """Wait for a bucket of a version that has begun. Raises Superseded if it does not come in time, or at all."""
        key = bucket.source, bucket.index

        def here() -> bool:
            return self._version == version and (self._is_whole or key in self._landed)

        with self._changed:
            self._changed.wait_for(lambda: here() or self._version != version, timeout_s)
            if not here():
                raise Superseded(f"bucket {bucket.index} of version {version} has not come here")
