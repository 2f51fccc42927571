"""A manifest as bytes: distinct cuts once, so that 18,000 experts on 64 ranks take a megabyte."""

from __future__ import annotations

import msgspec

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.box import Box
from cosmos_rl_transfer.layout.manifest import Manifest, TensorLayout


class _Wire(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    cuts: list[dict[int, Box]]
    tensors: list[tuple[WeightSpec, int]]
    """With the place of its cut in `cuts`."""
    tied: list[tuple[str, str]]
    replicas: tuple[tuple[int, ...], ...]


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as msgpack; equal manifests give equal bytes."""
    tensors = [(layout.spec, number) for layout, number in zip(manifest.layouts, manifest.cut_numbers)]
    return msgspec.msgpack.encode(_Wire(manifest.cuts, tensors, sorted(manifest.tied.items()), manifest.replicas))


def decode(data: bytes) -> Manifest:
    """Read what `encode` wrote. Raises LayoutError on anything else."""
    try:
        wire = msgspec.msgpack.decode(data, type=_Wire)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutError(f"these bytes are no manifest: {error}") from error
    if not all(0 <= number < len(wire.cuts) for _, number in wire.tensors):
        raise LayoutError("a tensor names a cut that the manifest does not hold")
    layouts = tuple(TensorLayout(spec, wire.cuts[number]) for spec, number in wire.tensors)
    return Manifest(layouts, dict(wire.tied), wire.replicas)
