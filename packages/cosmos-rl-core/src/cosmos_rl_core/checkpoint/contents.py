"""The table of contents of a checkpoint: every tensor, cut into boxes, and the file of each box.

contents.json: {"files": ["training/rank_0.safetensors", ...],
                "tensors": {"model/embed.weight": ["float32", [1024, 64], [[0, [0, 0], [512, 64]], ...]]}}
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from cosmos_rl_core.checkpoint.write_plan import TensorPiece, dtype_of
from cosmos_rl_core.storage.folder import Folder

CONTENTS = "contents.json"
MODEL, OPTIMIZER, RNG = "model/", "optimizer/", "rng/"
"""Prefixes of the names of tensors."""
SET = ":"
"""Ends the name of a further set of weights, before their own: "old:embed.weight" beside "embed.weight"."""
AVERAGE = f"average{SET}"
"""The set that is the running average of the trained weights; generation and export use it by default."""


class SavedBox(msgspec.Struct, frozen=True, array_like=True):
    """One box of a tensor, and its file."""

    file: int
    """Index into `Contents.files`."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class SavedTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor."""

    dtype: str
    size: tuple[int, ...]
    parts: list[SavedBox]

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)


class Contents(msgspec.Struct, frozen=True):
    """Everything a checkpoint holds."""

    files: list[str]
    tensors: dict[str, SavedTensor]

    @classmethod
    def of(cls, written: Sequence[Sequence[TensorPiece]], *, weights_file: str) -> Contents:
        """Describe the boxes that the ranks write; those of a tensor must add up to the whole."""
        files: dict[str, int] = {}
        tensors: dict[str, SavedTensor] = {}
        for rank, pieces in enumerate(written):
            for piece in pieces:
                name = file_of(piece.name, rank=rank, num_ranks=len(written), weights_file=weights_file)
                file = files.setdefault(name, len(files))
                entry = tensors.setdefault(piece.name, SavedTensor(piece.dtype, piece.size, []))
                entry.parts.append(SavedBox(file, piece.offset, piece.shape))
        for name, entry in tensors.items():
            num_elements = sum(torch.Size(part.shape).numel() for part in entry.parts)
            assert num_elements == torch.Size(entry.size).numel(), f"{name} {entry.size}: its parts do not add up"
        return cls(list(files), tensors)

    @classmethod
    def read(cls, folder: Folder) -> Contents:
        return msgspec.json.decode(folder.read(CONTENTS), type=cls)

    def names(self, prefix: str) -> list[str]:
        """Names of the tensors with a prefix."""
        return [name for name in self.tensors if name.startswith(prefix)]

    def weights(self, *, averaged: bool) -> dict[str, str]:
        """Return name without prefix -> name of the tensor, for the weights of one set.

        The set is the averages, if `averaged` and the checkpoint holds any; else the trained weights.
        """
        averages = self.names(MODEL + AVERAGE)
        if averaged and averages:
            return {name.removeprefix(MODEL + AVERAGE): name for name in averages}
        return {name.removeprefix(MODEL): name for name in self.names(MODEL) if SET not in name}


def file_of(name: str, *, rank: int, num_ranks: int, weights_file: str) -> str:
    """Return the file that a rank writes a tensor into; `weights_file` has the trained weights of a single process."""
    if not name.startswith(MODEL) or SET in name:
        return f"training/rank_{rank}.safetensors"
    return weights_file if num_ranks == 1 else f"model/rank_{rank}.safetensors"


def key_of(name: str) -> str:
    """Return a tensor's name in its file: weights have their own names, without `MODEL`."""
    return name.removeprefix(MODEL)
