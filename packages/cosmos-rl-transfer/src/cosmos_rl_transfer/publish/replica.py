"""The publishers of a replica that is spread over ranks: every rank publishes the parts it holds.

    each rank    its own boxes  --exchange-->  one manifest of all ranks, the same everywhere
                 one publisher of its parts, if it holds any
    address      "host:port,host:port,..."    of all of them; a subscriber pulls from each what the plan gives it

Copies (dp_replicate, parameters that tp or cp leave whole) are listed with every rank that holds them, so that the plan
spreads the load. Stages of a pipeline simply hold different tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_core.weight_sync import RankExchange
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Manifest, TensorLayout
from cosmos_rl_transfer.planning.plan import wire_dtype_of
from cosmos_rl_transfer.publish.publisher import Publisher

if TYPE_CHECKING:
    from torch import Tensor

SEPARATOR = ","
"""Between the addresses of ranks."""


class RankPublisher:
    """One rank's part of a version. Implements WeightPublisher; all ranks publish the same versions in order."""

    def __init__(
        self, weights: Mapping[str, Tensor], *, ranks: RankExchange, wire_dtype: str | None, **options: Any
    ) -> None:
        """Agree with the other ranks on who holds what and start to listen; all ranks call this together.

        `options` are those of `Publisher`. Raises LayoutError, in all ranks, where two describe a tensor differently.
        """
        manifest = Manifest.merge(
            [Manifest.decode(data) for data in ranks.gather(own_part(weights, rank=ranks.rank).encode())]
        )
        self._publisher: Publisher | None = None
        if ranks.rank in manifest.ranks:
            self._publisher = Publisher(weights, wire_dtype=wire_dtype, manifest=manifest, rank=ranks.rank, **options)
        own = self._publisher.address if self._publisher else ""
        addresses = [data.decode() for data in ranks.gather(own.encode()) if data]
        self._address = SEPARATOR.join(addresses)
        if self._publisher is not None:
            self._publisher.publishes_from(len({address.rpartition(":")[0] for address in addresses}))
        self._num_bytes = sum(_num_bytes(spec, wire_dtype) for spec in manifest.specs.values())

    @property
    def address(self) -> str:
        """Where subscribers connect: the addresses of all ranks that hold anything."""
        return self._address

    async def publish(self, version: int, weights: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Make this rank's part of `version` available; `sync_bytes` are those of all ranks, copies counted once."""
        if self._publisher is None:
            return {}
        metrics = await self._publisher.publish(version, weights)
        return {**metrics, "sync_bytes": float(self._num_bytes)}

    async def fence(self) -> Mapping[str, float]:
        """As `Publisher.fence`: this rank's parts may change afterwards."""
        return {} if self._publisher is None else await self._publisher.fence()

    async def close(self) -> None:
        """As `Publisher.close`."""
        if self._publisher is not None:
            await self._publisher.close()


def own_part(weights: Mapping[str, Tensor], *, rank: int) -> Manifest:
    """Describe what this rank itself holds."""
    whole = Manifest.from_tensors(weights, rank=rank)
    held = (TensorLayout(x.spec, {rank: x.boxes[rank]} if rank in x.boxes else {}) for x in whole.layouts)
    return Manifest(tuple(held), whole.tied)


def _num_bytes(spec: WeightSpec, wire_dtype: str | None) -> int:
    """Bytes of the whole tensor as it travels."""
    num_elements = 1
    for size in spec.shape:
        num_elements *= size
    return num_elements * ITEM_BYTES[wire_dtype_of(spec, wire_dtype)]
