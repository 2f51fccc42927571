"""The axes of a policy replica: their sizes, their order, and the coordinates of a rank. Pure arithmetic.

    pp            layers are cut into stages                                     outermost: least traffic
    dp_replicate  whole copies; gradients are summed over it
    dp_shard      parameters, gradients and optimizer state are cut (FSDP)
    cp            sequences are cut (all-to-all around attention)
    tp            matrices are cut                                               innermost: most traffic

Rank = ((((pp * DP_REPLICATE + dp_replicate) * DP_SHARD + dp_shard) * CP + cp) * TP + tp). Experts borrow ranks: `ep`
divides dp_shard * cp and has no axis of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.types import Share

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""In the order of ranks, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Sizes of the axes; all at least 1."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            if getattr(self, axis) < 1:
                raise UserError(f"[policy.parallel] {axis} = {getattr(self, axis)}: must be at least 1")
        if self.dp_shard * self.cp % self.ep:
            raise UserError(
                f"[policy.parallel] ep = {self.ep} does not divide dp_shard x cp = {self.dp_shard} x {self.cp} = "
                f"{self.dp_shard * self.cp}: experts are spread over the ranks of those two axes"
            )

    @classmethod
    def of(cls, section: ParallelSection, *, world_size: int | None) -> ParallelDims:
        """Resolve `dp_shard = -1` to the ranks the other axes leave, 1 where `world_size` is not known.

        Raises UserError, with all numbers, when the axes do not multiply to `world_size`.
        """
        sizes = {axis: getattr(section, axis) for axis in AXES}
        others = math.prod(size for axis, size in sizes.items() if axis != "dp_shard")
        written = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "dp_shard")
        if sizes["dp_shard"] == -1:
            if world_size is not None and world_size % others:
                raise UserError(
                    f"[policy.parallel] {written} = {others} does not divide the replica's {world_size} ranks: "
                    "nothing is left for dp_shard = -1"
                )
            sizes["dp_shard"] = 1 if world_size is None else world_size // others
        dims = cls(**sizes, ep=section.ep)
        if world_size is not None and dims.world_size != world_size:
            raise UserError(
                f"[policy.parallel] {written} x dp_shard {sizes['dp_shard']} = {dims.world_size} ranks, but the "
                f"replica has {world_size}; set dp_shard = -1 for the rest, or change [policy] ranks_per_node"
            )
        return dims

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return math.prod(self.shape)

    @property
    def num_shares(self) -> int:
        """Parts a batch is cut into: ranks that train on different samples."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's index on each axis."""
        places = {}
        for axis, size in reversed(list(zip(AXES, self.shape))):
            rank, places[axis] = divmod(rank, size)
        return {axis: places[axis] for axis in AXES}

    def share(self, rank: int) -> Share:
        """Return which part of each batch a rank trains on; ranks along pp, cp and tp have the same."""
        at = self.coordinates(rank)
        return Share(index=at["dp_replicate"] * self.dp_shard + at["dp_shard"], count=self.num_shares)

    def describe(self) -> str:
        """Return the axes above 1, "pp 2 x dp_shard 4", or "one rank"."""
        used = [f"{axis} {size}" for axis, size in zip(AXES, self.shape) if size > 1]
        used += [f"(ep {self.ep})"] if self.ep > 1 else []
        return " x ".join(used) or "one rank"

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield (axis, size) in order."""
        return zip(AXES, self.shape)
