"""The part of a checkpoint that one rank writes: its boxes of all tensors, live or copied into host memory.

planner = SnapshotPlanner(ranks)
snapshot = planner.take(tensors, state, copy=True)     # every rank; after this the live tensors may change
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from cosmos_rl_core.checkpoint.contents import Contents, file_of, key_of
from cosmos_rl_core.checkpoint.host import copy_to_host, host_buffers
from cosmos_rl_core.checkpoint.manifest import TrainState
from cosmos_rl_core.checkpoint.safetensors_file import as_bytes, by_alignment, header
from cosmos_rl_core.checkpoint.write_plan import TensorPiece, assign, local_pieces
from cosmos_rl_core.parallel.dtensor import local_part
from cosmos_rl_core.parallel.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A point between two steps, ready to be written."""

    state: TrainState
    contents: Contents
    """The tensors and files of all ranks."""
    files: Mapping[str, Mapping[str, Tensor]]
    """The boxes that this rank writes: file -> name in the file -> box."""

    def bytes_of(self, file: str) -> Iterator[bytes | memoryview]:
        """Yield the bytes of one of the files, in pieces."""
        tensors = self.files[file]
        specs = by_alignment((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
        yield header(specs)
        for name, _, _ in specs:
            yield as_bytes(tensors[name])


class SnapshotPlanner:
    """Decides once which rank writes which box, and keeps the host memory that boxes are copied into."""

    def __init__(self, ranks: RankGroup, *, weights_file: str) -> None:
        self._ranks = ranks
        self._weights_file = weights_file
        self._pieces: list[TensorPiece] = []
        self._mine: list[TensorPiece] = []
        self._contents = Contents([], {})
        self._buffers: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        """Stream of the copies, where tensors are on a GPU."""

    def take(self, tensors: Mapping[str, Tensor], state: TrainState, *, copy: bool) -> Snapshot:
        """Cut a snapshot out of live tensors; all ranks call this at the same time.

        With `copy` the tensors may change as soon as this returns, and the previous snapshot is overwritten.
        """
        self._plan(local_pieces(tensors))
        boxes = {piece.name: local_part(tensors[piece.name]) for piece in self._mine}
        if copy:
            boxes = self._copied(boxes)
        files: dict[str, dict[str, Tensor]] = {}
        for name, box in boxes.items():
            file = file_of(name, rank=self._ranks.rank, num_ranks=self._ranks.size, weights_file=self._weights_file)
            files.setdefault(file, {})[key_of(name)] = box
        return Snapshot(state=state, contents=self._contents, files=files)

    def _plan(self, pieces: list[TensorPiece]) -> None:
        """Assign the boxes anew if any rank holds others than last time (the optimizer's state comes with step 1)."""
        changed = b"" if pieces == self._pieces else msgspec.msgpack.encode(pieces)
        gathered = self._ranks.gather(changed)
        if not any(gathered):
            return
        gathered = gathered if all(gathered) else self._ranks.gather(msgspec.msgpack.encode(pieces))
        written = assign([msgspec.msgpack.decode(text, type=list[TensorPiece]) for text in gathered])
        self._pieces, self._mine = pieces, written[self._ranks.rank]
        self._contents = Contents.of(written, weights_file=self._weights_file)
        self._buffers = {}

    def _copied(self, boxes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self._buffers:
            self._buffers = host_buffers(boxes)
        gpu = next((box.device for box in boxes.values() if box.is_cuda), None)
        if gpu is not None and self._stream is None:
            self._stream = torch.cuda.Stream(gpu)
        copy_to_host(boxes, self._buffers, None if gpu is None else self._stream)
        return self._buffers
