"""The weights of a trial: who holds which part of them, and what they are at a version."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from transfer_samples import weights_at

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.layout.dtensor import dtype_name
from cosmos_rl_transfer.layout.manifest import Manifest, Shard

ROWS = 256
NUM_RANKS = 2
"""Of the replica that takes versions in two phases, and of publishers where there are several."""


def layout_of(name: str) -> Manifest:
    """Return who holds what: "one" rank has all, "copies" on each, "cut" by rows, "columns" cut by columns."""
    specs = [WeightSpec(name=n, shape=tuple(t.shape), dtype=dtype_name(t)) for n, t in weights_at(0, rows=ROWS).items()]
    if name == "one":
        return Manifest.whole(specs)
    dim = {"copies": None, "cut": 0, "columns": 1}[name]
    cuts = {s.name: [Shard(dim)] for s in specs if dim is not None and len(s.shape) == 2}
    return Manifest.sharded(specs, mesh_shape=[NUM_RANKS], placements=cuts)


def part_at(version: int, layout: Manifest, rank: int) -> dict[str, Tensor]:
    """Return a rank's parts of the weights of a version, tensors of their own; version -1 is zeros."""
    whole = weights_at(max(version, 0), rows=ROWS)
    parts = {spec.name: whole[spec.name][box.slices()].clone() for spec, box in layout.held_by(rank)}
    for tensor in parts.values() if version < 0 else ():
        tensor.zero_()
    return parts


def content_of(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of every bit."""
    digest = hashlib.sha256()
    for tensor in weights.values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
