"""Reads the clips and embeddings of rows from files, archives and object stores, or synthesises them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from cosmos_rl_core.data.cache import ByteCache
from cosmos_rl_core.errors import MediaError
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.embeddings import read_embedding
from cosmos_rl_wfm.data.mock import mock_clip, mock_embedding, mock_index
from cosmos_rl_wfm.data.storage import is_remote, read_bytes
from cosmos_rl_wfm.data.video import Clip, read_clip

Row = Mapping[str, Any]

DECODED_BYTES = 1 << 28
"""Most bytes of decoded clips that a process keeps."""


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
            self._decoded.put(key, clip)
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
            whole = part is None and not is_remote(location)
            source = location if whole else read_bytes(location, part, timeout_s=config.timeout_s)
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
