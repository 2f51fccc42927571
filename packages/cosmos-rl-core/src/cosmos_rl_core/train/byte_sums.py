"""Tensors as pieces of bytes, and an order-dependent sum of them that detects damage and differences.

    checksum = Checksum(device)
    for piece in pieces(tensors):                # views of at most PIECE_BYTES together
        checksum.add(packed(piece, device))
    checksum.digest()

The sum is made of integers modulo 2^64 in one pass where the tensors are: cryptographic digests take ten times as long
on a CPU, and a copy from a GPU. It guards against accidents, not against somebody who wants to deceive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
WORD_BYTES = 8
_FACTOR = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield flat views uint8 of tensors, copies of those that are not contiguous, at most PIECE_BYTES at a time."""
    piece: list[Tensor] = []
    room = PIECE_BYTES
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        while flat.numel():
            part, flat = flat[:room], flat[room:]
            piece.append(part)
            room -= part.numel()
            if not room:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def packed(piece: Sequence[Tensor], device: torch.device) -> Tensor:
    """Copy a piece into new memory uint8 on `device` of whole words, filled up with zeros."""
    size = sum(part.numel() for part in piece)
    filler = torch.zeros(-size % WORD_BYTES, dtype=torch.uint8)
    return torch.cat([part.to(device) for part in (*piece, filler)])


def room_for(piece: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return memory for what `packed` makes of a piece of these sizes."""
    size = sum(part.numel() for part in piece)
    return torch.empty(size + -size % WORD_BYTES, dtype=torch.uint8, device=device)


def unpack(data: Tensor, piece: Sequence[Tensor]) -> None:
    """Fill a piece from memory that `packed` made of another one of the same sizes."""
    sizes = [part.numel() for part in piece]
    for part, values in zip(piece, data[: sum(sizes)].split(sizes)):
        part.copy_(values)


class Checksum:
    """Of pieces, in their order."""

    def __init__(self, device: torch.device) -> None:
        self._weights = torch.empty(0, dtype=torch.int64, device=device)
        """Odd: a change of one word always changes the sum."""
        self._sum = 1

    def add(self, data: Tensor) -> None:
        """Add memory of `packed`. Waits for the device that it is on."""
        words = data.view(torch.int64)
        if words.numel() > self._weights.numel():
            self._weights = torch.arange(words.numel(), device=words.device) * 2 + 1
        weights = self._weights[: words.numel()]
        # torch has `dot` of integers, which needs no second pass, on the CPU alone
        product = torch.dot(words, weights) if words.device.type == "cpu" else (words * weights).sum()
        self._sum = (self._sum * _FACTOR + int(product)) % _MODULUS

    def digest(self) -> bytes:
        return self._sum.to_bytes(WORD_BYTES, "little")


def digest(tensors: Iterable[Tensor], device: torch.device) -> bytes:
    """Return the digest of the bytes of tensors, computed on `device`."""
    checksum = Checksum(device)
    for piece in pieces(tensors):
        checksum.add(packed(piece, device))
    return checksum.digest()
