"""The interface between trainers and engines that serve their weights; a package implements it (cosmos-rl-transfer).

Publisher and subscriber run in processes that share the run's token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pydantic import Field

from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import WeightSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cosmos_rl_core.parallel.rank_group import RankGroup
    from cosmos_rl_core.wire.tls import Tls

BUCKET_BYTES = 4 << 20
"""Default bytes of a transfer bucket: small enough to be hashed in a processor's cache after the copy."""
GPU_BUCKET_BYTES = 64 << 20
"""The same where the weights are on a GPU: a bucket is one copy to the host."""
BETWEEN_GPUS = ("cuda_ipc", "nixl_vram")
"""Transports whose buckets are on GPUs at both ends."""
NIXL_BUILDS = ("nixl_cu13", "nixl_cu12")
"""Packages with NIXL's bindings, by the CUDA generation that they are built for; both work without a GPU."""


class SyncSection(Strict):
    """[sync]: transfer of new weights to the engines, and the maximum staleness of rollouts."""

    max_staleness: int = Field(default=1, ge=0)
    """Maximum policy lag of a rollout when it is trained on, in optimizer steps; 0 is on-policy."""
    backend: str = Field(default="transfer", min_length=1)
    """Backend of the weight transfer: "transfer" (cosmos-rl-transfer), or "module:attribute"."""
    interval: int = Field(default=1, ge=1)
    """Engines load the versions that are divisible by it, and those that are evaluated. At most `max_staleness` + 1."""
    transport: str = Field(default="auto", min_length=1)
    """"shm", "tcp", "nixl" or, from GPU to GPU, "cuda_ipc" (one machine) and "nixl_vram"; "auto" selects the fastest
    one available between two processes; one from GPU to GPU must pass a test between them first."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type to which wider weights are cast for the transfer. Not set: that of the engine."""
    bucket_bytes: int | None = Field(default=None, ge=4096)
    """Size of the buckets in which weights are hashed and transferred; each side allocates two. Not set: 4 MiB, or
    64 MiB if the policy is on a GPU."""
    staging: Literal["shadow", "in_place"] = "shadow"
    """Where engines receive weights: "shadow", a second copy in host memory; or "in_place", with generation paused."""
    delta: bool = False
    """Send only the changes since the last version, if that is smaller; needs a copy of the weights at the trainer."""
    full_every: int = Field(default=100, ge=1)
    """With delta: every n-th version is sent in full."""
    relay: Literal["auto", "on", "off"] = "auto"
    """Whether engines forward weights to each other; "auto": if engines are on more hosts than trainers."""
    patience_s: float = Field(default=0.5, ge=0)
    """Time an optimizer step waits for engines that are still reading, before their missing weights are copied."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Maximum wait for the other side; then the sync fails with an error that names it."""


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


class WeightPublisher(ABC):
    """The trainer's side of a weight sync.

    await publisher.publish(version, weights)   # engines read them while the next batch is computed
    ...
    await publisher.fence()                     # now the trainer may change them
    """

    @property
    @abstractmethod
    def address(self) -> str:
        """The address to which subscribers connect."""

    @abstractmethod
    async def publish(
        self, version: int, weights: Mapping[str, Tensor], *, ready: torch.cuda.Event | None = None
    ) -> Mapping[str, float]:
        """Make `version` available to subscribers and return metrics (`sync_bytes`, `sync_s`).

        The tensors may not change before `fence` has returned. ready: recorded by the thread that computes, after the
        work that computes them on a GPU; they are read after it. None: after the work queued by the calling thread.
        """

    async def fence(self) -> Mapping[str, float]:
        """Wait, for a bounded time, until the published tensors may change; return metrics (`sync_stall_s`)."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Disconnect all subscribers."""


class WeightSubscriber(ABC):
    """The engine's side.

    version = await subscriber.stage(after=engine.version)       # newest version, pulled and verified
    await engine.switch(version, subscriber.apply)               # between two terms
    """

    @abstractmethod
    async def stage(self, *, after: int) -> int:
        """Wait for a version newer than `after`, pull it beside the live weights, verify its digest, return it.

        Raises ConnectionError if the publisher is gone, and an error with tensor, version and ranks if weights do not
        match their digest.
        """

    @abstractmethod
    def apply(self) -> None:
        """Copy the staged version into the live tensors."""

    def counts(self) -> dict[str, float]:
        """Return the counts of the last pull for the timeline (`bytes`, `pull_s`, ...); empty if none are kept."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Disconnect."""


@runtime_checkable
class OwnsSubscriber(Protocol):
    """An engine whose live weights are in other processes, so that it has no tensors for `WeightSync.subscriber`."""

    async def subscriber(
        self, address: str, *, settings: SyncSection, token: bytes, tls: Tls | None = None
    ) -> WeightSubscriber:
        """Return a subscriber that keeps those weights up to date from `address`.

        Raises UserError for a `settings.backend` that this engine cannot read from.
        """
        ...


class WeightSync(Protocol):
    """A package that transfers weights: makes both sides, in processes that share the run's token.

    settings: the section [sync] of the recipe. tls: the certificate of connections for weights; None: not encrypted.
    """

    def publisher(
        self,
        weights: Mapping[str, Tensor],
        *,
        settings: SyncSection,
        token: bytes,
        tls: Tls | None,
        bind: str,
        ranks: RankGroup | None,
    ) -> WeightPublisher:
        """Make this rank's publisher of its parts of the weights; its `address` is that of all ranks.

        `ranks` are those that publish together, None where one process holds the weights whole.
        """
        ...

    def subscriber(
        self, address: str, weights: Mapping[str, Tensor], *, settings: SyncSection, token: bytes, tls: Tls | None
    ) -> WeightSubscriber:
        """Make the subscriber that keeps the live tensors `weights` up to date from `address`."""
        ...

    def plan(
        self, specs: Sequence[WeightSpec], *, settings: SyncSection, policy: Mapping[str, int], replicas: int
    ) -> SyncCost:
        """Return the cost of one version; nothing is started.

        policy: sizes of the axes that a policy replica is spread over, "ep" among them. replicas: engines of one rank
        each.
        """
        ...
