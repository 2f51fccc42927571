"""Host memory for copies of tensors, page-locked for those on a GPU, and the copies themselves.

Memory of the exact size is mapped in pieces (`parallel.device.pinned`). A piece holds whole tensors: a copy may not
cross two registered ranges.
Unproven on hardware: tests run on the pretend device of `tests/shared/doubles/pretend_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from cosmos_rl_core.checkpoint.safetensors_file import Spec, as_bytes, by_alignment, num_bytes
from cosmos_rl_core.parallel.device import pinned

PIECE_BYTES = 1 << 30
"""Maximum size of a piece that holds several tensors."""


def host_buffers(boxes: Mapping[str, Tensor], *, piece_bytes: int = PIECE_BYTES) -> dict[str, Tensor]:
    """Return buffers for copies of `boxes`, in few blocks of host memory; page-locked where the boxes are on a GPU."""
    specs: list[Spec] = by_alignment((name, box.dtype, tuple(box.shape)) for name, box in boxes.items())
    gpu = next((box.device for box in boxes.values() if box.is_cuda), None)
    buffers: dict[str, Tensor] = {}
    for piece in [specs] if gpu is None else list(_pieces(specs, piece_bytes)):
        sizes = [num_bytes(dtype, shape) for _, dtype, shape in piece]
        block = torch.empty(sum(sizes), dtype=torch.uint8) if gpu is None else pinned(sum(sizes), gpu)
        start = 0
        for (name, dtype, shape), size in zip(piece, sizes):
            buffers[name] = block[start : start + size].view(dtype).reshape(shape)
            start += size
    return buffers


def copy_to_host(boxes: Mapping[str, Tensor], buffers: Mapping[str, Tensor], stream: torch.cuda.Stream | None) -> None:
    """Copy each box into its buffer; boxes may change when this returns.

    stream: for the copies of boxes on a GPU. It waits for this thread's earlier work, and the host for the copies.
    """
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for name, box in boxes.items():
                if box.is_cuda:
                    buffers[name].copy_(box, non_blocking=True)
    for name, box in boxes.items():
        if not box.is_cuda:  # one thread is as fast as memory; torch's threads wait for one another on busy cores
            as_bytes(buffers[name])[:] = as_bytes(box)
    if stream is not None:
        copied = torch.cuda.Event()
        copied.record(stream)
        copied.synchronize()


def _pieces(specs: list[Spec], piece_bytes: int) -> Iterator[list[Spec]]:
    """Yield consecutive specs of together at most `piece_bytes`, or a single one that is larger."""
    piece: list[Spec] = []
    size = 0
    for spec in specs:
        own = num_bytes(spec[1], spec[2])
        if piece and size + own > piece_bytes:
            yield piece
            piece, size = [], 0
        piece.append(spec)
        size += own
    if piece:
        yield piece
