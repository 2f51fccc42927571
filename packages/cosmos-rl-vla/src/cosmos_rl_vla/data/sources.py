"""Sources of one camera's images: mp4 files, or a column of PNGs."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cosmos_rl_core.data.cache import ByteCache
from cosmos_rl_core.data.video import VideoFile
from cosmos_rl_core.errors import MediaError
from cosmos_rl_vla.data.columns import Frames
from cosmos_rl_vla.data.lerobot import EpisodeAt
from cosmos_rl_vla.data.parquet import AGAIN, open_parquet

if TYPE_CHECKING:
    import pyarrow as pa

_OPEN_FILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The unit of decoding."""

    path: Path
    camera: str
    number: int
    """Index of the run in a video, or of the row in a parquet file."""


class Source(Protocol):
    """The images of one camera. Thread-safe."""

    def find(self, episode: EpisodeAt, frame: int) -> tuple[Piece, int]:
        """Return the piece that contains a frame, and its index in it. Raises MediaError."""
        ...

    def decode(self, piece: Piece) -> np.ndarray:
        """Return uint8 [n, H, W, 3]. Raises MediaError."""
        ...


class Videos:
    """Images from mp4 files; see Source."""

    def __init__(self, camera: str, frames: Frames, *, fps: float) -> None:
        self._camera, self._frames, self._fps = camera, frames, fps
        self._open: OrderedDict[Path, VideoFile] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, episode: EpisodeAt, frame: int) -> tuple[Piece, int]:
        """See Source."""
        at = episode.videos[self._camera]
        table = self._file(at.path).table
        seconds = at.start_s + float(self._frames.seconds[self._frames.first[episode.number] + frame])
        try:
            place = table.place(seconds, fps=self._fps)
        except ValueError as error:
            raise MediaError(f"{at.path} {error}, where the parquet has frame {frame}; {AGAIN}") from None
        run = table.run_of(place)
        return Piece(path=at.path, camera=self._camera, number=run), place - int(table.runs[run])

    def decode(self, piece: Piece) -> np.ndarray:
        """See Source."""
        file = self._file(piece.path)
        images: dict[int, np.ndarray] = {}
        places = range(*(int(place) for place in file.table.runs[piece.number : piece.number + 2]))
        file.read(places, lambda frame, place: images.update({place: frame.to_ndarray(format="rgb24")}))
        return np.stack([images[place] for place in places])

    def _file(self, path: Path) -> VideoFile:
        """Return an open file; evicts the least recently used one."""
        with self._lock:
            if path not in self._open:
                file = VideoFile(path, remedy=AGAIN)
                if not len(file.table.seeks) or file.table.runs[0]:
                    raise file.error("the first frame in it cannot be decoded")
                self._open[path] = file
                if len(self._open) > _OPEN_FILES:
                    self._open.popitem(last=False)  # it closes once the last thread releases it
            self._open.move_to_end(path)
            return self._open[path]


class Column:
    """Images from a column of {"bytes": png, "path": name}; see Source. Row groups are cached encoded."""

    def __init__(self, camera: str, frames: Frames, *, cache_bytes: int) -> None:
        self._camera, self._frames = camera, frames
        self._row_groups: ByteCache[pa.Array] = ByteCache(cache_bytes)
        self._ends: dict[Path, np.ndarray] = {}
        """Cumulative number of rows at the end of each row group, by file."""

    def find(self, episode: EpisodeAt, frame: int) -> tuple[Piece, int]:
        """See Source."""
        row = self._frames.first_in_file[episode.number] + frame
        return Piece(path=episode.data, camera=self._camera, number=row), 0

    def decode(self, piece: Piece) -> np.ndarray:
        """See Source."""
        from PIL import Image, UnidentifiedImageError

        encoded = self._encoded(piece)
        if encoded is None:
            raise MediaError(f"{piece.path}: {piece.camera} of row {piece.number} is in another file; embed it")
        try:
            with Image.open(io.BytesIO(encoded)) as image:
                return np.asarray(image.convert("RGB"))[None]
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise MediaError(f"{piece.path}: {piece.camera} of row {piece.number} is not an image: {error}") from error

    def _encoded(self, piece: Piece) -> bytes | None:
        ends = self._ends_of(piece.path)
        group = int(np.searchsorted(ends, piece.number, side="right"))
        held = self._row_groups.get((piece.path, group))
        if held is None:
            held = self._read(piece.path, group)
            self._row_groups.put((piece.path, group), held)
        return held[piece.number - (int(ends[group - 1]) if group else 0)].as_py()

    def _ends_of(self, path: Path) -> np.ndarray:
        if path not in self._ends:
            with open_parquet(path) as file:
                rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            self._ends[path] = np.cumsum(rows)
        return self._ends[path]

    def _read(self, path: Path, group: int) -> pa.Array:
        import pyarrow as pa

        with open_parquet(path) as file:
            try:
                column: Any = file.read_row_group(group, columns=[self._camera]).column(self._camera)
            except (pa.ArrowException, OSError, KeyError) as error:
                raise MediaError(f"{path}: column {self._camera!r} is damaged: {error}; {AGAIN}") from error
        structs = column.combine_chunks()
        if not pa.types.is_struct(structs.type):
            raise MediaError(f"{path}: column {self._camera!r} holds {structs.type}, not PNG images")
        return structs.field("bytes")
