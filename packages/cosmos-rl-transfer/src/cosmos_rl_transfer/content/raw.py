"""Memory as unsigned integers, without a copy: torch tensors, bytes, and rows of 64-bit words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_transfer.layout.manifest import Box

Raw = np.ndarray[Any, Any]
Block = Any
"""Bytes uint8 [n]: a `Raw` in host memory, or a Tensor on a GPU, by the transport."""
_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


def same_width(tensor: Tensor) -> Raw:
    """View a CPU tensor as unsigned integers of the same width: a hash must not extend a sign."""
    return tensor.view(SAME_WIDTH[tensor.element_size()]).numpy().view(f"u{tensor.element_size()}")


def raw_bytes(tensor: Tensor) -> Raw:
    """View a contiguous CPU tensor as bytes uint8 [n]."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def torch_view(memory: Raw, at: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """View bytes [at, ...) of uint8 `memory` as a torch tensor [*shape]."""
    kind: torch.dtype = getattr(torch, dtype)
    num_bytes = torch.Size(shape).numel() * kind.itemsize
    return torch.from_numpy(memory[at : at + num_bytes]).view(kind).view(shape)


def raw_view(memory: Raw, at: int, shape: tuple[int, ...], item_bytes: int) -> Raw:
    """View bytes [at, ...) of `memory` as unsigned integers [*shape] of `item_bytes` each."""
    return np.ndarray(shape, _UINT[item_bytes], memory.data, at)


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous bytes, and their position in a packed bucket."""

    data: Block
    """uint8 [n], contiguous."""
    at: int
    """First byte in the packed bucket."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A box's rows in the whole row-major tensor, in words, equally far apart: what the compiled passes read."""

    count: int
    width: int
    first: int
    """Index of the first row's first word."""
    stride: int
    """Words from one row's start to the next one's."""
    outer: int
    """Dims of the box that number rows; those behind them lie within a row."""

    @classmethod
    def of(cls, box: Box, shape: tuple[int, ...], item_bytes: int) -> Rows | None:
        """Return None where rows do not start and end on a word, or are not equally far apart."""
        run, outer = box.run_length(shape), len(shape)
        if run == box.numel:  # one row
            sizes = run * item_bytes, box.start(shape) * item_bytes
            return None if sizes[0] % 8 or sizes[1] % 8 else cls(1, sizes[0] // 8, sizes[1] // 8, 0, 0)
        while outer and math.prod(box.shape[outer - 1 :]) <= run:
            outer -= 1
        stride = _apart(zip(box.shape[:outer], (math.prod(shape[dim + 1 :]) for dim in range(outer))))
        sizes = [run * item_bytes, box.start(shape) * item_bytes, (stride or 0) * item_bytes]
        if stride is None or any(size % 8 for size in sizes):
            return None
        width, first, apart = (size // 8 for size in sizes)
        return cls(math.prod(box.shape[:outer]), width, first, apart, outer)

    def words_in(self, array: Raw) -> tuple[Raw, int] | None:
        """View the words from the first row to the last in `array` [*box.shape], gaps included, and return their step.

        None where a row is not one run of aligned words there, or rows are not equally far apart.
        """
        if self.outer == 0 and array.flags.c_contiguous:
            words = array.reshape(-1).view(np.uint64)
            return (words, 0) if words.flags.aligned else None
        step = _apart(zip(array.shape[: self.outer], array.strides[: self.outer]))
        address, read_only = array.__array_interface__["data"]
        aligned = step is not None and step % 8 == 0 and address % 8 == 0
        if step is None or not aligned or not array[(0,) * self.outer].flags.c_contiguous:
            return None
        span = (self.count - 1) * (step // 8) + self.width
        return np.asarray(_Words(array, address, span, read_only)), step // 8


class _Words:
    """Memory of `array` as words [span], for numpy."""

    def __init__(self, array: Raw, address: int, span: int, read_only: bool) -> None:
        self.array = array  # numpy keeps this object, and this object the memory
        self.__array_interface__ = {"shape": (span,), "typestr": "<u8", "data": (address, read_only), "version": 3}


def _apart(dims: Iterable[tuple[int, int]]) -> int | None:
    """Return how far rows are apart that are numbered by dims of (extent, distance); 0 if there is one row.

    None where that changes from one row to another.
    """
    count, distance = 1, 0
    for extent, step in reversed(list(dims)):
        if extent == 1:
            continue
        if count > 1 and step != count * distance:
            return None
        distance = distance if count > 1 else step
        count *= extent
    return distance
