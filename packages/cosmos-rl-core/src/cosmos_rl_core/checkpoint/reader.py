"""Reads a checkpoint into any layout, whatever layout wrote it: only the boxes that a rank needs.

with CheckpointReader(folder) as reader:
    reader.fill({"model/embed.weight": live})       # plain tensors and DTensors
    whole = reader.whole("model/embed.weight")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from cosmos_rl_core.checkpoint.contents import Contents, SavedTensor, key_of
from cosmos_rl_core.checkpoint.safetensors_file import SafetensorsFile
from cosmos_rl_core.parallel.dtensor import local_part
from cosmos_rl_core.storage.folder import Folder


class CheckpointReader:
    """An open checkpoint. Its files are opened on first use."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.contents = Contents.read(folder)
        self._opened: dict[int, SafetensorsFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill live tensors by name; each must be in the checkpoint, with the same size.

        DCP's planner maps the saved boxes to this rank's boxes.
        """
        saved = {name: _metadata(self.contents.tensors[name]) for name in tensors}
        plan = create_default_local_load_plan(dict(tensors), Metadata(dict(saved)))
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        for item in plan.items:
            name, index = item.storage_index.fqn, item.storage_index.index
            assert index is not None
            file = self._file(self.contents.tensors[name].parts[index].file)
            source = _read_box(file, key_of(name), item.storage_offsets, item.lengths)
            _box(parts[name], item.dest_offsets, item.lengths).copy_(source)

    def whole(self, name: str) -> Tensor:
        """Return one tensor as a whole."""
        entry = self.contents.tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.torch_dtype)
        self.fill({name: tensor})
        return tensor

    def weights(self, *, averaged: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights of one set, as chosen by `Contents.weights`."""
        for name, saved in self.contents.weights(averaged=averaged).items():
            yield name, self.whole(saved)

    def _file(self, number: int) -> SafetensorsFile:
        if number not in self._opened:
            file = SafetensorsFile(self.folder, self.contents.files[number])
            self._opened[number] = self._stack.enter_context(file)
        return self._opened[number]


def _metadata(entry: SavedTensor) -> TensorStorageMetadata:
    """An entry in the form of DCP's planner."""
    chunks = [ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape)) for part in entry.parts]
    return TensorStorageMetadata(TensorProperties(dtype=entry.torch_dtype), torch.Size(entry.size), chunks)


def _read_box(file: SafetensorsFile, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A box out of a tensor in a file: whole rows are read, and cut."""
    if not shape:
        return file.read(key)
    rows = file.read(key, first=offset[0], rows=shape[0])
    return _box(rows, (0, *offset[1:]), shape)


def _box(tensor: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offset, shape)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
