"""Real clips for training: decoded ahead by threads, the same ones after every restart.

    position --> epoch, place --> row (shuffled anew each epoch) --> read(row, rng) --> clip
                                   ^ the next one instead, if it gives none

Which clip lies at a position, and where it is cut, is a pure function of (seed, position), so that the state of a
stream is one integer, and ranks read positions of their own without a word between them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np

from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.types import Share
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.embeddings import read_embedding
from cosmos_rl_wfm.data.mock import mock_clip, mock_embedding, mock_index
from cosmos_rl_wfm.data.storage import is_remote, read_bytes
from cosmos_rl_wfm.data.video import Clip, ClipError, read_clip

log = logging.getLogger(__name__)

Row = Mapping[str, Any]
T = TypeVar("T")

DECODED_BYTES = 1 << 28
"""Most that a process keeps of decoded clips."""
SHOWN = 3
"""Faults in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingClip:
    """A row with what it names."""

    row: Row
    caption: str
    """"" where it was dropped."""
    video: np.ndarray
    """uint8 [F, H, W, 3], RGB."""
    fps: float
    """Frames a second; 0 for a still image."""
    text: np.ndarray | None = None
    """float32 [L, E]: the caption's embedding where the row has one and the caption was not dropped."""


class DecodedClips:
    """Clips in memory, as many as fit; the first ones stay. Any thread may call."""

    def __init__(self, *, max_bytes: int = DECODED_BYTES) -> None:
        self._left = max_bytes
        self._held: dict[Hashable, Clip] = {}
        self._lock = Lock()

    def get(self, key: Hashable) -> Clip | None:
        """Return a clip, or None."""
        return self._held.get(key)

    def put(self, key: Hashable, clip: Clip) -> None:
        """Keep a clip, if there is room."""
        with self._lock:
            if key not in self._held and clip.video.nbytes <= self._left:
                self._left -= clip.video.nbytes
                self._held[key] = clip


class ClipReader:
    """Reads a row's clip as [data] says. Called from many threads.

    clip = reader(row, np.random.default_rng(7))
    """

    def __init__(self, config: WFMDataConfig, *, text_width: int | None = None) -> None:
        self._config = config
        self._text_width = text_width
        """Width that embeddings must have."""
        self._decoded = DecodedClips() if config.start != "random" else None
        """Clips that are the same whenever they are read."""

    def __call__(self, row: Row, rng: np.random.Generator) -> TrainingClip:
        """Decode the clip, drop its caption now and then, and read its embedding.

        Raises:
            ClipError, EmbeddingError: the row's files give none; named.
            UserError: a store refuses or does not answer.
        """
        dropped = rng.random() < self._config.caption_dropout
        clip = self.clip(row, rng)
        return TrainingClip(
            row=row,
            caption="" if dropped else row["caption"],
            video=clip.video,
            fps=clip.fps,
            text=None if dropped else self.text(row),
        )

    def clip(self, row: Row, rng: np.random.Generator) -> Clip:
        """Decode the clip alone; those that begin where they always do are remembered, as far as there is room."""
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
            raise ClipError(f"{row['key']}: is a prompt alone; a clip is wanted")
        index = mock_index(location)
        if index is not None:
            height, width = sizes[index % len(sizes)]
            return Clip(video=mock_clip(index, frames=frames, height=height, width=width), fps=row["fps"])
        try:
            whole = part is None and not is_remote(location)
            source = location if whole else read_bytes(location, part, timeout_s=config.timeout_s)
        except OSError as error:
            raise ClipError(f"{row['key']}: cannot be read: {error}") from error
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
        """Read the embedding of the row's caption alone, float32 [L, E]; None where it has none."""
        location = row.get("text_embedding", "")
        if not location or self._config.text_embeddings == "off":
            return None
        index = mock_index(location)
        if index is not None:
            mock = self._config.mock
            return mock_embedding(index, tokens=mock.embedding_tokens, width=mock.embedding_width)
        part, timeout_s = row.get("text_embedding_at"), self._config.timeout_s
        return read_embedding(location, part, width=self._text_width, timeout_s=timeout_s)


class ClipStream(Generic[T]):
    """An endless stream of what `read` makes of rows, read ahead by threads.

    with ClipStream(rows, read=ClipReader(config), seed=7, state=saved) as stream:
        clip = next(stream)
        saved = stream.state
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        read: Callable[[Row, np.random.Generator], T],
        seed: int,
        state: int = 0,
        shuffle: bool = True,
        share: Share | None = None,
        workers: int = 4,
        ahead: int = 16,
    ) -> None:
        """Begin after `state` clips; `share` is this rank's part of the positions."""
        assert rows, "a stream needs a row"
        self.state = state
        """Clips handed out so far, over all lives of the stream."""
        self._rows = rows
        self._read = read
        self._seed = seed
        self._shuffle = shuffle
        self._share = share or Share()
        self._bad: dict[int, str] = {}
        self._lock = Lock()
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="clips")
        self._ahead = ahead
        self._waiting: deque[Future[T]] = deque()

    @property
    def skipped(self) -> Mapping[str, str]:
        """Rows that gave no clip so far, by key, and why."""
        with self._lock:
            return {str(self._rows[index].get("key", index)): reason for index, reason in self._bad.items()}

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next clip. Raises UserError when no row gives one, and what else `read` raises."""
        while len(self._waiting) < self._ahead:
            place = self.state + len(self._waiting)
            self._waiting.append(self._pool.submit(self.at, place * self._share.count + self._share.index))
        clip = self._waiting[0].result()
        self._waiting.popleft()
        self.state += 1
        return clip

    def at(self, position: int) -> T:
        """Return the clip at a position of the whole stream: of its row, or of the next one that gives any."""
        epoch, place = divmod(position, len(self._rows))
        order = self._order(epoch)
        for offset in range(len(self._rows)):
            index = int(order[(place + offset) % len(self._rows)])
            if index in self._bad:
                continue
            try:
                return self._read(self._rows[index], np.random.default_rng([self._seed, position]))
            except SampleError as error:
                self._skip(index, error.reason)
        shown = "; ".join(list(self.skipped.values())[:SHOWN])
        raise UserError(
            f"none of {len(self._rows)} rows gives a clip: {shown}{'; ...' if len(self._bad) > SHOWN else ''}"
        )

    def close(self) -> None:
        """Stop reading ahead. Returns when the threads are idle."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()

    def __enter__(self) -> ClipStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _skip(self, index: int, reason: str) -> None:
        with self._lock:
            if index in self._bad:
                return
            self._bad[index] = reason
            count = len(self._bad)
        log.warning("skipped, %d of %d rows so far: %s", count, len(self._rows), reason)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        rows = len(self._rows)
        return np.random.default_rng([self._seed, epoch]).permutation(rows) if self._shuffle else np.arange(rows)
