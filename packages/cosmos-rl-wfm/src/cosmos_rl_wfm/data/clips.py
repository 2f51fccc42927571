"""Reads the clips and embeddings of rows from files, archives and object stores, or synthesises them.

Text embeddings are stored beside the captions: safetensors, or pickles of arrays, which are converted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save

from cosmos_rl_core.data.video import ByteCache
from cosmos_rl_core.errors import MediaError, SampleError, UserError
from cosmos_rl_core.storage.pickles import read_array, widen
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.mock import mock_clip, mock_embedding, mock_index
from cosmos_rl_wfm.data.storage import Range, is_remote, read_bytes, write_atomic
from cosmos_rl_wfm.data.video import Clip, read_clip

log = logging.getLogger(__name__)

Row = Mapping[str, Any]

DECODED_BYTES = 1 << 28
"""Most bytes of decoded clips that a process keeps."""

PICKLES = (".pickle", ".pkl")
PICKLE = b"\x80"
"""First byte of a pickle of protocol 2 or above."""

CONVERTED = "converted_from"
"""Key in the metadata of a safetensors file: name, size and time of the pickle that it was converted from."""

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class ClipReader:
    """Reads the clip and the embedding of a row, by the settings of [data]. Thread-safe.

    clip, text = reader.clip(row, rng), reader.text(row)
    """

    def __init__(self, config: WFMDataConfig, *, text_width: int | None = None) -> None:
        self._config = config
        self._text_width = text_width
        """Width that embeddings must have."""
        self._decoded = ByteCache[Clip](DECODED_BYTES, evict=False) if config.start != "random" else None
        """Decoded clips, where every read gives the same frames."""

    def clip(self, row: Row, rng: np.random.Generator) -> Clip:
        """Decode the clip. Clips without a random start are cached within DECODED_BYTES.

        Raises:
            MediaError: there is none, or it cannot be decoded; names the clip.
            UserError: a store refuses or does not answer.
        """
        if self._decoded is None:
            return self._decode(row, rng)
        key = row["video"], tuple(row.get("video_at") or ())
        clip = self._decoded.get(key)
        if clip is None:
            clip = self._decode(row, rng)
            self._decoded.put(key, clip, clip.nbytes)
        return clip

    def _decode(self, row: Row, rng: np.random.Generator) -> Clip:
        config, location, part = self._config, row["video"], row.get("video_at")
        frames, sizes = config.size.frames, config.sizes
        if not location:
            raise MediaError(f"{row['key']}: is a prompt without a clip; a clip is needed")
        index = mock_index(location)
        if index is not None:
            height, width = sizes[index % len(sizes)]
            return Clip(video=mock_clip(index, frames=frames, height=height, width=width), fps=row["fps"])
        try:
            is_file = part is None and not is_remote(location)
            source = location if is_file else read_bytes(location, part, timeout_s=config.timeout_s)
        except OSError as error:
            raise MediaError(f"{row['key']}: cannot be read: {error}") from error
        return read_clip(
            source,
            frames=frames,
            sizes=sizes,
            fps=config.fps,
            stride=config.stride,
            start=config.start,
            rng=rng,
            name=location if part is None else f"{row['key']} in {location}",
        )

    def text(self, row: Row) -> np.ndarray | None:
        """Read the embedding of the row's caption, float32 [L, E]; None where it has none.

        Raises:
            EmbeddingError: it is not usable; names the file.
            UserError: a store refuses or does not answer.
        """
        if self.text_source(row) is None:
            return None
        location = row["text_embedding"]
        index = mock_index(location)
        if index is not None:
            mock = self._config.mock
            return mock_embedding(index, tokens=mock.embedding_tokens, width=mock.embedding_width)
        part, timeout_s = row.get("text_embedding_at"), self._config.timeout_s
        return read_embedding(location, part, width=self._text_width, timeout_s=timeout_s)

    def text_source(self, row: Row) -> Hashable | None:
        """Return a hashable identity of the row's embedding; None where `text` reads none."""
        location, part = row.get("text_embedding", ""), row.get("text_embedding_at")
        if not location or self._config.text_embeddings == "off":
            return None
        mock = self._config.mock if mock_index(location) is not None else None
        return location, tuple(part or ()), mock and (mock.embedding_tokens, mock.embedding_width)


class EmbeddingError(SampleError):
    """A text embedding that is not usable. Names the file; a retry cannot help."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, final=True)


def read_embedding(
    location: str, part: Range | None = None, *, width: int | None = None, timeout_s: float = 60.0
) -> np.ndarray:
    """Return a caption's embedding, float32 [L, E].

    A pickle on this machine is written as safetensors beside itself where the folder allows it, and again when it has
    changed.

    Raises:
        EmbeddingError: no such file, a damaged one, a pickle of other objects than arrays, a shape that is not
            [L, E] with E = `width`, or values that are not finite.
        UserError: a store refuses or does not answer.
    """
    is_file = part is None and not is_remote(location)
    if is_file and (pickle := _changed_pickle(Path(location))) is not None:
        location = str(pickle)
    name = location if part is None else f"{location} at byte {part[0]}"
    try:
        data = read_bytes(location, part, timeout_s=timeout_s)
    except OSError as error:
        raise EmbeddingError(f"{name}: cannot be read: {error.strerror or error}") from error
    try:
        if data.startswith(PICKLE) and not _is_safetensors(data):
            array = read_array(data, name=name)
            if is_file:
                _convert(Path(location))
        else:
            array = _first_tensor(data, name=name)
    except UserError as error:
        raise EmbeddingError(str(error)) from None
    return _checked(array, width=width, name=name)


def convert(path: str | Path) -> Path:
    """Write the first array of a pickle as safetensors beside it, under the name "embedding". Returns the new file.

    The file has the pickle's name, size and time, so that a later pickle is not taken for it.

    Raises:
        UserError: as `read_array`.
        OSError: the folder cannot be written.
    """
    source = Path(path)
    metadata = {CONVERTED: _state_of(source)}  # before its content: a pickle that changes meanwhile is converted again
    array = read_array(source.read_bytes(), name=str(source))
    target = source.with_suffix(".safetensors")
    write_atomic(target, save({"embedding": np.ascontiguousarray(array)}, metadata=metadata))
    return target


def _state_of(path: Path) -> str:
    state = path.stat()
    return f"{path.name} {state.st_size} {state.st_mtime_ns}"


def _changed_pickle(path: Path) -> Path | None:
    """Return the pickle that a safetensors file was converted from, if it has changed since."""
    if path.suffix != ".safetensors":
        return None
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, "numpy") as file:
        converted = (file.metadata() or {}).get(CONVERTED, "")
        for pickle in map(path.with_suffix, PICKLES):
            if converted.startswith(f"{pickle.name} ") and pickle.exists() and _state_of(pickle) != converted:
                return pickle
    return None


def _is_safetensors(data: bytes) -> bool:
    return data[8:9] == b"{"


def _convert(path: Path) -> None:
    """Write a pickle's array as safetensors beside it, unless that file exists and is not of an earlier pickle."""
    target = path.with_suffix(".safetensors")
    try:
        if not target.exists() or _changed_pickle(target) is not None:
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
    key, tensor = tensors[0]
    if tensor["dtype"] not in DTYPES:
        raise UserError(f"{name}: {key} is of type {tensor['dtype']}, not of floats")
    flat = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]])
    return (widen(flat) if tensor["dtype"] == "BF16" else flat).reshape(tensor["shape"])


def _checked(array: np.ndarray, *, width: int | None, name: str) -> np.ndarray:
    shape = array.shape
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    form = "[tokens, width]" if width is None else f"[tokens, {width}]"
    if array.ndim != 2 or not len(array) or array.dtype.kind != "f" or width not in (None, array.shape[1]):
        raise EmbeddingError(f"{name}: an embedding of shape {list(shape)} and type {array.dtype}, not floats {form}")
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise EmbeddingError(f"{name}: the embedding holds values that are not finite")
    return array
