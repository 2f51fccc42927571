"""Copy live torch tensors into an arena and back, casting on the way. The only code that casts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.digest import Raw, add, run_sum, tensor_sum
from cosmos_rl_transfer.dtensor import dtype_name, local
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout import Manifest

_TASK_BYTES = 4 << 20
"""What one thread packs at a time."""
_CHUNK_BYTES = 2 << 20
"""What is hashed while it is still in the cache."""


def torch_view(memory: Raw, arena: Arena, name: str) -> Tensor:
    """View a tensor's place in an arena as torch tensor [*box.shape] of its wire dtype."""
    place = arena.places[name]
    flat = torch.from_numpy(memory[place.at : place.at + place.num_bytes])
    return flat.view(getattr(torch, place.dtype)).view(place.box.shape)


class Packer:
    """Packs one rank's tensors into arena memory with casts and takes their additive hashes on the way."""

    def __init__(self, manifest: Manifest, arena: Arena) -> None:
        self._specs = manifest.specs
        self._arena = arena

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise LayoutError unless `weights` are this rank's parts of the manifest."""
        if changed := sorted((weights.keys() - self._specs.keys()) | (self._arena.places.keys() - weights.keys())):
            raise LayoutError(f"the weights to publish are not those the publisher was made for: {changed[:5]}")
        for name, place in self._arena.places.items():
            found = (tuple(local(weights[name]).shape), dtype_name(weights[name]))
            if found != (wanted := (place.box.shape, self._specs[name].dtype)):
                raise LayoutError(f"{name}: {found} to publish, {wanted} when the publisher was made")

    def pack(self, weights: Mapping[str, Tensor], memory: Raw, *, pool: Executor) -> dict[str, int]:
        """Fill the arena and return the additive hash of each tensor's local box."""
        sums = dict.fromkeys(self._arena.places, 0)
        for name, part in pool.map(lambda task: (task[0], self._pack_run(*task)), self._tasks(weights, memory)):
            sums[name] = add(sums[name], part)
        return sums

    def _tasks(self, weights: Mapping[str, Tensor], memory: Raw) -> Iterator[tuple[str, Tensor | None, Tensor, int]]:
        """Yield (name, source or None if copied already, destination, first element in the local box)."""
        for name, place in self._arena.places.items():
            source, target = local(weights[name]), torch_view(memory, self._arena, name).view(-1)
            step = _TASK_BYTES // place.item_bytes
            if not place.box.is_contiguous(place.shape):
                step = max(1, place.box.numel)  # its hash needs the rows in one piece
            if not source.is_contiguous():
                target.view(place.box.shape).copy_(source)
                source = target
            plain = source.device.type == "cpu" and source.dtype == target.dtype
            flat = source.reshape(-1)
            for low in range(0, place.box.numel, step):
                part, wanted = target[low : low + step], flat[low : low + step]
                if not plain:
                    part.copy_(wanted)  # torch casts with threads of its own, so here and not in the pool
                yield name, wanted if plain and source is not target else None, part, low

    def _pack_run(self, name: str, source: Tensor | None, target: Tensor, first: int) -> int:
        place = self._arena.places[name]
        contiguous, total = place.box.is_contiguous(place.shape), 0
        start = place.box.start(place.shape) + first
        step = _CHUNK_BYTES // place.item_bytes
        for low in range(0, target.numel(), step):
            part = target[low : low + step]
            if source is not None:
                _raw(part)[...] = _raw(source[low : low + step])
            if contiguous:
                total = add(total, run_sum(_raw(part), start + low))
        if not contiguous:
            total = tensor_sum(_raw(target).reshape(place.box.shape), place.box, place.shape)
        return total


def unpack(memory: Raw, arena: Arena, weights: Mapping[str, Tensor], *, pool: Executor) -> None:
    """Write an arena's tensors over this rank's parts of `weights`, casting where dtypes differ."""
    runs: list[tuple[Tensor, Tensor]] = []
    for name, place in arena.places.items():
        source, target = torch_view(memory, arena, name), local(weights[name])
        if target.device.type != "cpu" or not target.is_contiguous() or target.dtype != source.dtype:
            target.copy_(source)
            continue
        step = _TASK_BYTES // place.item_bytes
        runs += zip(source.view(-1).split(step), target.view(-1).split(step))
    # not torch's own threads: they wait for each other, and a busy machine makes that ten times slower
    list(pool.map(lambda run: np.copyto(_raw(run[1]), _raw(run[0])), runs))


_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _raw(tensor: Tensor) -> Raw:
    """View a contiguous CPU tensor as unsigned integers of the same width: a hash must not extend a sign."""
    return tensor.view(_SAME_WIDTH[tensor.element_size()]).numpy().view(f"u{tensor.element_size()}")
