"""Tensors of a GPU that are swapped out to pinned host memory and back, as the tensors they are.

    swap = Swap(lambda: [*tensors_of(module), *optimizer_state])
    swap.out()                      # their storages are freed; the host has the values
    swap.readable(weights)          # the values as host tensors
    swap.back()

Parameters keep their identity, views and aliases their storage. On a CPU nothing moves. Unproven on hardware: tests run
on the pretend device of `tests/shared/doubles/pretend_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_rl_core.parallel.device import pinned
from cosmos_rl_core.parallel.dtensor import local_part

_ALIGNED = 64
"""Bytes to a multiple of which each storage's copy starts."""


@dataclass(frozen=True, slots=True)
class _Swapped:
    """One storage."""

    here: Tensor
    """[n] on the device: the whole storage."""
    host: Tensor
    """[n] in host memory."""


class Swap:
    """The storages of some tensors. One thread calls its methods, that which computes with the tensors."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """tensors: returns those to swap out, at each call of `out`."""
        self._tensors = tensors
        self._swapped: dict[int, _Swapped] = {}
        """By storage; empty while the tensors are on their device."""
        self._buffers: dict[tuple[int, int], Tensor] = {}
        """Host memory by storage and number of bytes: uint8."""

    @torch.no_grad()
    def out(self) -> None:
        """Copy the tensors to the host and free their memory. Tensors that are out already stay."""
        storages: dict[int, Tensor] = {}
        for tensor in self._tensors():
            local = local_part(tensor)
            # Views and tied parameters share a storage, which is moved once, as a flat tensor of its elements.
            if local.is_cuda and (size := local.untyped_storage().nbytes()):
                storages.setdefault(_key(local), local.as_strided((size // local.itemsize,), (1,), 0))
        if not storages:
            return
        device = next(iter(storages.values())).device
        self._reserve({(key, here.nbytes) for key, here in storages.items()}, device)
        for key, here in storages.items():
            host = self._buffers[key, here.nbytes].view(here.dtype)
            host.copy_(here, non_blocking=True)
            self._swapped[key] = _Swapped(here, host)
        torch.cuda.current_stream(device).synchronize()
        # The copies are complete. A storage of size 0 frees its memory, while tensors, views and hooks stay.
        for key in storages:
            self._swapped[key].here.untyped_storage().resize_(0)
        torch.cuda.empty_cache()  # other processes may allocate it

    @torch.no_grad()
    def back(self) -> None:
        """Give the tensors memory and their values again. No-op if they are on their device."""
        for one in self._swapped.values():
            one.here.untyped_storage().resize_(one.host.nbytes)
            one.here.copy_(one.host, non_blocking=True)
        self._swapped = {}

    def readable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors, those that are out as host tensors: they share the host's memory until `back`."""
        return {name: self._readable(tensor) for name, tensor in tensors.items()}

    def _readable(self, tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        one = self._swapped.get(_key(local)) if local.is_cuda else None
        if one is None:
            return tensor
        host = one.host.view(local.dtype)
        host = host.as_strided(local.size(), local.stride(), host.storage_offset() + local.storage_offset())
        return DTensor(host, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else host

    def _reserve(self, storages: set[tuple[int, int]], device: torch.device) -> None:
        """Allocate host memory for the storages that have none, in one block; free that of others."""
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in storages}
        starts, total = {}, 0
        for key in storages - self._buffers.keys():
            starts[key] = total
            total += -(-key[1] // _ALIGNED) * _ALIGNED
        block = pinned(total, device)
        self._buffers |= {key: block[start : start + key[1]] for key, start in starts.items()}


def tensors_of(*modules: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of modules."""
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def _key(local: Tensor) -> int:
    return local.untyped_storage()._cdata
