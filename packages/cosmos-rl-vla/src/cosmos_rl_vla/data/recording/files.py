"""Writes a dataset's files, split at a maximum size: parquet of frames, mp4 of one camera."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
from av.video.frame import PictureType

if TYPE_CHECKING:
    import pyarrow as pa

FILES_PER_CHUNK = 1000
_ROWS = 256
"""Frames per row group: the unit of reading for images stored in parquet."""
_RUN = "10"
"""Frames per keyframe interval: a random frame needs five decoded frames on average."""
_QUALITY = "4"
"""x264's constant rate factor: almost visually lossless."""


class FrameFiles:
    """Parquet files of whole episodes."""

    def __init__(self, path: Callable[[int], Path], *, max_bytes: int) -> None:
        """path: returns the path of the file with a number."""
        self._path, self._max_bytes = path, max_bytes
        self._number = 0
        self._writer: Any = None
        self._tables: list[pa.Table] = []
        self._bytes = 0

    def add(self, episode: pa.Table) -> int:
        """Write an episode. Returns the number of its file."""
        if self._writer is not None and self._bytes + episode.nbytes > self._max_bytes:
            self.close()
            self._number += 1
        if self._writer is None:
            self._writer, self._bytes = self._opened(episode), 0
        self._tables.append(episode)
        self._bytes += episode.nbytes
        if sum(map(len, self._tables)) >= _ROWS:
            self._flush()
        return self._number

    def close(self) -> None:
        """Finish the open file."""
        if self._writer is not None:
            self._flush()
            self._writer.close()
            self._writer = None

    def _opened(self, episode: pa.Table) -> Any:
        import pyarrow.parquet as pq

        path = self._path(self._number)
        path.parent.mkdir(parents=True, exist_ok=True)
        return pq.ParquetWriter(path, episode.schema, compression="snappy")

    def _flush(self) -> None:
        import pyarrow as pa

        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables), row_group_size=max(map(len, self._tables)) + _ROWS)
            self._tables = []


class VideoFiles:
    """mp4 files of one camera, H.264; an episode begins with a keyframe."""

    def __init__(self, path: Callable[[int], Path], *, size: tuple[int, int], fps: int, max_bytes: int) -> None:
        """path: returns the path of the file with a number. size: height and width."""
        self._path, self._size, self._fps, self._max_bytes = path, size, fps, max_bytes
        self._number = 0
        self._container: Any = None
        self._stream: Any = None
        self._frames = 0
        self._bytes = 0

    def add(self, images: np.ndarray) -> tuple[int, float]:
        """Write the frames of an episode, uint8 [T, H, W, 3]. Returns the file's number and the start time in it."""
        if self._container is not None and self._bytes > self._max_bytes:
            self.close()
            self._number += 1
        if self._container is None:
            self._open()
        start_s = self._frames / self._fps
        for number, image in enumerate(images):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pict_type = PictureType.I if number == 0 else PictureType.NONE
            self._mux(frame)
        self._frames += len(images)
        return self._number, start_s

    def close(self) -> None:
        """Finish the open file."""
        if self._container is not None:
            self._mux(None)
            self._container.close()
            self._container = None

    def _open(self) -> None:
        path = self._path(self._number)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w")
        options = {"crf": _QUALITY, "g": _RUN, "bf": "0", "sc_threshold": "0"}
        self._stream = self._container.add_stream("libx264", rate=Fraction(self._fps), options=options)
        self._stream.height, self._stream.width = self._size
        self._stream.pix_fmt = "yuv444p"  # no chroma subsampling: in the simulator the policy gets full colours
        self._frames = self._bytes = 0

    def _mux(self, frame: av.VideoFrame | None) -> None:
        packets = self._stream.encode(frame)
        self._bytes += sum(packet.size for packet in packets)
        self._container.mux(packets)
