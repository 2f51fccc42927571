"""The images of frames, from all cameras: mp4 files, or a column of PNGs.

    (episode, frame) -- find --> Piece, index in it -- cached, else decoded by threads --> uint8 [H, W, 3]

A *piece* is the unit of decoding: a run of a video, or one PNG. Decoded pieces are in an LRU cache; while all images
fit, each is decoded once."""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from av.error import FFmpegError

from cosmos_rl_core.data.video import ByteCache, VideoFile, cut_off, open_container
from cosmos_rl_core.errors import MediaError, UserError
from cosmos_rl_vla.data.lerobot import EpisodeAt, Feature, Frames, LeRobotDataset
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


_MAX_THREADS = 4
_ENCODED = 4
"""1 / fraction of the cache for encoded PNGs, if there are any."""


class Images:
    """Images of some episodes.

    images, reasons = images.read([(3, 17), (0, 4)])        # frame 17 of episode 3, ...
    """

    def __init__(
        self,
        dataset: LeRobotDataset,
        cameras: Sequence[str],
        *,
        episodes: Sequence[EpisodeAt],
        frames: Frames,
        cache_bytes: int,
    ) -> None:
        """Check the files. Raises UserError for a missing or incomplete one, and for different image sizes."""
        features = {camera: dataset.feature(camera, key="cameras") for camera in cameras}
        self.size = _one_size(features)
        """Height and width."""
        self._episodes = {episode.number: episode for episode in episodes}
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="images")
        columns = sum(feature.dtype == "image" for feature in features.values())
        encoded = cache_bytes // _ENCODED if columns else 0
        self._cache: ByteCache[np.ndarray] = ByteCache(cache_bytes - encoded)
        self._sources: dict[str, Source] = {}
        for camera, feature in features.items():
            if feature.dtype == "video":
                _check_videos(self._threads, camera, episodes, frames, fps=dataset.fps)
                self._sources[camera] = Videos(camera, frames, fps=dataset.fps)
            else:
                self._sources[camera] = Column(camera, frames, cache_bytes=encoded // columns)

    def read(self, frames: Sequence[tuple[int, int]]) -> tuple[np.ndarray, dict[int, str]]:
        """Return the images of frames (episode, frame), black for unreadable ones, and the reasons for those.

        Returns: uint8 [B, cameras, H, W, 3]; reasons by index in the batch.
        """
        images = np.zeros((len(frames), len(self._sources), *self.size, 3), np.uint8)
        found: dict[tuple[int, int], tuple[Piece, int]] = {}
        reasons: dict[int, str] = {}
        for row, (number, frame) in enumerate(frames):
            for camera, source in enumerate(self._sources.values()):
                try:
                    found[row, camera] = source.find(self._episodes[number], frame)
                except MediaError as error:
                    reasons[row] = error.reason
        pieces = self._decoded(dict.fromkeys(piece for piece, _ in found.values()))
        for (row, camera), (piece, place) in found.items():
            decoded = pieces[piece]
            if isinstance(decoded, MediaError):
                reasons[row] = decoded.reason
            else:
                images[row, camera] = decoded[place]
        return images, reasons

    def _decoded(self, pieces: Iterable[Piece]) -> dict[Piece, np.ndarray | MediaError]:
        """Decode the pieces that are not cached, in threads."""
        held = {piece: self._cache.get(piece) for piece in pieces}
        missing = [piece for piece, array in held.items() if array is None]
        new = dict(zip(missing, self._threads.map(self._try, missing)))
        return {piece: new[piece] if array is None else array for piece, array in held.items()}

    def _try(self, piece: Piece) -> np.ndarray | MediaError:
        """Decode one piece; runs in a thread."""
        try:
            return self._decode(piece)
        except MediaError as error:
            return error

    def _decode(self, piece: Piece) -> np.ndarray:
        decoded = self._sources[piece.camera].decode(piece)
        if decoded.shape[1:] != (*self.size, 3):
            found, expected = (f"{height}x{width}" for height, width in (decoded.shape[1:3], self.size))
            raise MediaError(f"{piece.path}: {piece.camera} is {found}, meta/info.json has {expected}")
        self._cache.put(piece, decoded)
        return decoded


def _one_size(features: Mapping[str, Feature]) -> tuple[int, int]:
    if wrong := [name for name, feature in features.items() if not feature.is_image]:
        raise UserError(f"[data] cameras: {wrong[0]!r} holds {features[wrong[0]].dtype}, not images")
    sizes = {camera: feature.size for camera, feature in features.items()}
    if len(set(sizes.values())) > 1:
        raise UserError(f"images of several sizes, {sizes}: set [data] cameras to those of one size")
    return next(iter(sizes.values()), (1, 1))


def _check_videos(
    threads: ThreadPoolExecutor, camera: str, episodes: Sequence[EpisodeAt], frames: Frames, *, fps: float
) -> None:
    """Raise UserError for the first file that is missing, incomplete, or shorter than its frames."""
    until: dict[Path, float] = {}
    for episode in episodes:
        at, last = episode.videos[camera], frames.first[episode.number] + episode.length - 1
        until[at.path] = max(until.get(at.path, 0.0), at.start_s + float(frames.seconds[last]))
    checks = [
        threads.submit(check_video, path, until_s=seconds, fps=fps, camera=camera) for path, seconds in until.items()
    ]
    for check in checks:
        check.result()


def check_video(path: Path, *, until_s: float, fps: float, camera: str) -> None:
    """Read a file's header. Raises UserError if it is missing or incomplete, or ends before `until_s`."""
    try:
        with open_container(path) as container:
            if not container.streams.video:
                raise UserError(f"{path}: the file has no video stream; {AGAIN} ({camera})")
            stream = container.streams.video[0]
            assert stream.time_base is not None
            length_s = float((stream.duration or 0) * stream.time_base)
    except FileNotFoundError:
        raise UserError(f"{path} ({camera}) does not exist: the dataset is incomplete; {AGAIN}") from None
    except (FFmpegError, OSError) as error:
        reason = cut_off(path) or f"cannot be read, as after an interruption: {error.strerror or error}"
        raise UserError(f"{path} ({camera}) {reason}; {AGAIN}") from error
    if length_s and until_s > length_s + 0.5 / fps:
        raise UserError(
            f"{path} ({camera}) is shorter than its parquet: it ends after {length_s:.3f} s, the frames' column "
            f"'timestamp' ends at {until_s:.3f} s; {AGAIN}"
        )
