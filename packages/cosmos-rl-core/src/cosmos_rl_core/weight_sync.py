"""The seam between those who train weights and those who serve them; a package implements it (cosmos-rl-transfer).

Publisher and subscriber run in processes that know the run's token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cosmos_rl_core.types import WeightSpec

if TYPE_CHECKING:
    from torch import Tensor


class WeightPublisher(Protocol):
    """The trainer's side of a weight sync.

    await publisher.publish(version, weights)   # engines read them from here on, while the next batch is computed
    ...
    await publisher.fence()                     # the trainer may change them now
    """

    async def publish(self, version: int, weights: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Make `version` available to subscribers and return metrics (`sync_bytes`, `sync_s`).

        The tensors may not change before `fence` has returned.
        """
        ...

    async def fence(self) -> Mapping[str, float]:
        """Return, with metrics (`sync_stall_s`), when the published tensors may change; bounded, whatever readers do."""
        ...

    @property
    def address(self) -> str:
        """Where subscribers connect."""
        ...

    async def close(self) -> None: ...


class WeightSubscriber(Protocol):
    """The engine's side.

    version = await subscriber.stage(after=engine.version)       # newest version, pulled and verified
    await engine.switch(version, subscriber.apply)               # between two terms
    """

    async def stage(self, *, after: int) -> int:
        """Wait for a version newer than `after`, pull it beside the live weights, verify its digest, return it.

        Raises ConnectionError when the publisher is gone, and an error that names tensor, version and ranks for
        weights that do not match their digest.
        """
        ...

    def apply(self) -> None:
        """Copy the staged version into the live tensors."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class OwnsSubscriber(Protocol):
    """An engine whose live weights are in other processes, so that it has no tensors for `WeightSync.subscriber`."""

    async def subscriber(
        self, address: str, *, backend: str, token: bytes, transport: str, timeout_s: float
    ) -> WeightSubscriber:
        """Return what keeps those weights up to date from `address`; options as for `WeightSync.subscriber`.

        backend: the [sync] backend that publishes. Raises UserError for one this engine cannot read from.
        """
        ...


class RankExchange(Protocol):
    """The ranks that publish together, such as a `parallel.rank_group.RankGroup`."""

    rank: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, in the order of ranks. All of them call it at the same time."""
        ...


class WeightSync(Protocol):
    """A package that moves weights: makes the two sides. Both run in processes that know the run's token."""

    def publisher(
        self,
        weights: Mapping[str, Tensor],
        *,
        token: bytes,
        transport: str,
        dtype: str | None,
        bucket_bytes: int,
        timeout_s: float,
        bind: str,
        ranks: RankExchange | None,
    ) -> WeightPublisher:
        """Make this rank's publisher of its parts of the weights; its `address` is that of all ranks.

        `ranks` is None where one process holds them whole.
        """
        ...

    def subscriber(
        self, address: str, weights: Mapping[str, Tensor], *, token: bytes, transport: str, timeout_s: float
    ) -> WeightSubscriber: ...

    def plan(
        self, specs: Sequence[WeightSpec], *, dtype: str | None, bucket_bytes: int, replicas: int
    ) -> Mapping[str, int]:
        """What one version costs on the wire: `bytes`, `lower_bound_bytes`, `buckets`. Starts nothing."""
        ...
