"""The interface between trainers and engines that serve their weights; a package implements it (cosmos-rl-transfer).

Publisher and subscriber run in processes that share the run's token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from cosmos_rl_core.types import WeightSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cosmos_rl_core.wire.tls import Tls


BUCKET_BYTES = 4 << 20
"""Default bytes of a transfer bucket: small enough to be hashed in a processor's cache after the copy."""
GPU_BUCKET_BYTES = 64 << 20
"""The same where the weights are on a GPU: a bucket is one copy to the host."""
BETWEEN_GPUS = ("cuda_ipc", "nixl_vram")
"""Transports whose buckets are on GPUs at both ends."""
FULL_EVERY = 100
"""With deltas: interval of versions that are sent in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSettings:
    """Settings of both sides of a sync; see [sync] for the meaning of each."""

    token: bytes
    """The run's secret."""
    tls: Tls | None = None
    """Certificate for connections of the sync; None: they are not encrypted."""
    transport: str = "auto"
    dtype: str | None = None
    bucket_bytes: int | None = None
    """None: BUCKET_BYTES, or GPU_BUCKET_BYTES for weights on a GPU."""
    timeout_s: float = 120.0
    patience_s: float = 0.5
    staging: Literal["shadow", "in_place"] = "shadow"
    delta: bool = False
    full_every: int = FULL_EVERY
    relay: Literal["auto", "on", "off"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """Cost of one version on the wire."""

    received_bytes: int
    """By all engines."""
    lower_bound_bytes: int
    """Lower bound of `received_bytes`."""
    busiest_bytes: int
    """Sent by the busiest rank of the policy."""
    busiest_bound_bytes: int
    """Lower bound of `busiest_bytes`."""
    extra_bytes: int
    """Memory in flight at a rank, beside its weights and the staged weights of engines."""
    relay: str = ""
    """Whether engines forward weights to each other, with the reason."""


class WeightPublisher(Protocol):
    """The trainer's side of a weight sync.

    await publisher.publish(version, weights)   # engines read them while the next batch is computed
    ...
    await publisher.fence()                     # now the trainer may change them
    """

    async def publish(
        self, version: int, weights: Mapping[str, Tensor], *, ready: torch.cuda.Event | None = None
    ) -> Mapping[str, float]:
        """Make `version` available to subscribers and return metrics (`sync_bytes`, `sync_s`).

        The tensors may not change before `fence` has returned. ready: recorded by the thread that computes, after the
        work that computes them on a GPU; they are read after it. None: after the work queued by the calling thread.
        """
        ...

    async def fence(self) -> Mapping[str, float]:
        """Wait, for a bounded time, until the published tensors may change; return metrics (`sync_stall_s`)."""
        ...

    @property
    def address(self) -> str:
        """The address to which subscribers connect."""
        ...

    async def close(self) -> None: ...


class WeightSubscriber(Protocol):
    """The engine's side.

    version = await subscriber.stage(after=engine.version)       # newest version, pulled and verified
    await engine.switch(version, subscriber.apply)               # between two terms
    """

    async def stage(self, *, after: int) -> int:
        """Wait for a version newer than `after`, pull it beside the live weights, verify its digest, return it.

        Raises ConnectionError if the publisher is gone, and an error with tensor, version and ranks if weights do not
        match their digest.
        """
        ...

    def apply(self) -> None:
        """Copy the staged version into the live tensors."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class OwnsSubscriber(Protocol):
    """An engine whose live weights are in other processes, so that it has no tensors for `WeightSync.subscriber`."""

    async def subscriber(self, address: str, *, backend: str, settings: SyncSettings) -> WeightSubscriber:
        """Return a subscriber that keeps those weights up to date from `address`.

        backend: the [sync] backend that publishes. Raises UserError for one this engine cannot read from.
        """
        ...


class PullCounts(Protocol):
    """Counts of one pull."""

    num_bytes: int
    num_deltas: int
    repaired: list[tuple[int, int]]
    """(source rank, bucket) of buckets fetched again."""
    seconds: float
    """From the first request to the last byte."""


@runtime_checkable
class CountsPulls(Protocol):
    """A subscriber that counts."""

    pulled: PullCounts
    """Of the last pull."""


class RankExchange(Protocol):
    """The ranks that publish together, such as a `parallel.rank_group.RankGroup`."""

    rank: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of every rank, in the order of ranks. All of them call it at the same time."""
        ...


class WeightSync(Protocol):
    """A package that transfers weights: makes both sides, in processes that share the run's token."""

    def publisher(
        self,
        weights: Mapping[str, Tensor],
        *,
        settings: SyncSettings,
        bind: str,
        ranks: RankExchange | None,
    ) -> WeightPublisher:
        """Make this rank's publisher of its parts of the weights; its `address` is that of all ranks.

        `ranks` is None where one process holds them whole.
        """
        ...

    def subscriber(
        self, address: str, weights: Mapping[str, Tensor], *, settings: SyncSettings
    ) -> WeightSubscriber: ...

    def plan(
        self, specs: Sequence[WeightSpec], *, settings: SyncSettings, policy: Mapping[str, int], replicas: int
    ) -> SyncCost:
        """Return the cost of one version; nothing is started.

        policy: sizes of the axes that a policy replica is spread over, "ep" among them. replicas: engines of one rank
        each.
        """
        ...
