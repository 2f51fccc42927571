"""Text embeddings stored beside the captions: safetensors, or pickles of arrays, which are converted."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.storage.pickles import read_array, widen
from cosmos_rl_wfm.data.storage import Range, is_remote, read_bytes, write_atomic

log = logging.getLogger(__name__)

PICKLE = b"\x80"
"""First byte of a pickle of protocol 2 or above."""

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class EmbeddingError(SampleError):
    """A text embedding that is not usable. Names the file; a retry cannot help."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, final=True)


def read_embedding(
    location: str, part: Range | None = None, *, width: int | None = None, timeout_s: float = 60.0
) -> np.ndarray:
    """Return a caption's embedding, float32 [L, E].

    A pickle on this machine is written as safetensors beside itself where the folder allows it.

    Raises:
        EmbeddingError: no such file, a damaged one, a pickle of other objects than arrays, a shape that is not
            [L, E] with E = `width`, or values that are not finite.
        UserError: a store refuses or does not answer.
    """
    name = location if part is None else f"{location} at byte {part[0]}"
    try:
        data = read_bytes(location, part, timeout_s=timeout_s)
    except OSError as error:
        raise EmbeddingError(f"{name}: cannot be read: {error.strerror or error}") from error
    try:
        if data.startswith(PICKLE) and not _is_safetensors(data):
            array = read_array(data, name=name)
            if part is None and not is_remote(location):
                _convert(Path(location))
        else:
            array = _first_tensor(data, name=name)
    except UserError as error:
        raise EmbeddingError(str(error)) from None
    return _checked(array, width=width, name=name)


def convert(path: str | Path) -> Path:
    """Write the first array of a pickle as safetensors beside it, under the name "embedding". Returns the new file.

    Raises:
        UserError: as `read_array`.
        OSError: the folder cannot be written.
    """
    source = Path(path)
    array = read_array(source.read_bytes(), name=str(source))
    target = source.with_suffix(".safetensors")
    write_atomic(target, save({"embedding": np.ascontiguousarray(array)}))
    return target


def _is_safetensors(data: bytes) -> bool:
    return data[8:9] == b"{"


def _convert(path: Path) -> None:
    """Write a pickle's array as safetensors beside it, unless that file exists."""
    try:
        if not path.with_suffix(".safetensors").exists():
            convert(path)
    except OSError as error:
        log.info("%s: not written as safetensors: %s", path, error)


def _first_tensor(data: bytes, *, name: str) -> np.ndarray:
    try:
        tensors = deserialize(data)
    except SafetensorError as error:
        raise UserError(f"{name} is no safetensors file: {error}") from None
    if not tensors:
        raise UserError(f"{name} holds no tensor")
    key, held = tensors[0]
    if held["dtype"] not in DTYPES:
        raise UserError(f"{name}: {key} is of type {held['dtype']}, not of floats")
    flat = np.frombuffer(held["data"], DTYPES[held["dtype"]])
    return (widen(flat) if held["dtype"] == "BF16" else flat).reshape(held["shape"])


def _checked(array: np.ndarray, *, width: int | None, name: str) -> np.ndarray:
    shape = array.shape
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    wanted = "[tokens, width]" if width is None else f"[tokens, {width}]"
    if array.ndim != 2 or not len(array) or array.dtype.kind != "f" or width not in (None, array.shape[1]):
        raise EmbeddingError(f"{name}: an embedding of shape {list(shape)} and type {array.dtype}, not floats {wanted}")
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise EmbeddingError(f"{name}: the embedding holds values that are not finite")
    return array
