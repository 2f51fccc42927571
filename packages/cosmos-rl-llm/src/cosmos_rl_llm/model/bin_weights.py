"""pytorch_model.bin of older models: converted once into safetensors beside it, since no pickle is loaded here."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_core.storage.pickles import Array
from cosmos_rl_core.storage.torch_archive import read_torch_archive

BIN, SAFE = "pytorch_model.bin", "model.safetensors"
INDEX = ".index.json"


def convert_bin_weights(directory: Path) -> None:
    """Write the safetensors of a model that has only pytorch_model.bin, in one file or several; else do nothing.

    One process of a run converts, the others wait for it. The .bin files stay.

    Raises:
        UserError: a file is damaged or has anything but tensors, or the directory cannot be written to.
    """
    if not _is_needed(directory):
        return
    try:
        with _alone(directory):
            if _is_needed(directory):
                _convert(directory)
    except PermissionError as error:
        raise UserError(
            f"model.path: {directory} has only {BIN}, and safetensors cannot be written beside it ({error}); copy the "
            "model to a directory of yours"
        ) from error


def _is_needed(directory: Path) -> bool:
    has_safe = any((directory / name).is_file() for name in (SAFE, SAFE + INDEX))
    return not has_safe and any((directory / name).is_file() for name in (BIN, BIN + INDEX))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory: processes of this machine enter one after the other."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _convert(directory: Path) -> None:
    index = directory / (BIN + INDEX)
    if not index.is_file():
        _convert_file(directory / BIN, SAFE)
        return
    placed = read_json_object(index, hint="see model.path").get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise UserError(f"{index}: weight_map must map names of weights to files")
    names = {old: _safe_name(old, index) for old in sorted(set(placed.values()))}
    for old, new in names.items():
        _convert_file(directory / old, new)
    # The index comes last: without it, a conversion that was interrupted is made again.
    entries = {"metadata": {}, "weight_map": {key: names[old] for key, old in placed.items()}}
    Folder.at(directory).write(SAFE + INDEX, [json.dumps(entries, indent=2).encode()])


def _safe_name(name: str, index: Path) -> str:
    if not name.endswith(".bin") or Path(name).name != name:
        raise UserError(f"{index}: {name!r} is no .bin file beside it")
    return name.removesuffix(".bin").replace("pytorch_model", "model") + ".safetensors"


def _convert_file(source: Path, name: str) -> None:
    import torch

    from cosmos_rl_core.checkpoint.safetensors_file import write_tensors

    def tensor_of(array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array.view))  # of the mapped file; a transposed one is copied
        return tensor.view(torch.bfloat16) if array.is_bfloat16 else tensor

    tensors = {key: tensor_of(array) for key, array in read_torch_archive(source).items()}
    log_choice(f"weights: {source} is converted into {name} beside it, once")
    write_tensors(Folder.at(source.parent), f"{name}.partial", tensors)
    (source.parent / f"{name}.partial").replace(source.parent / name)
