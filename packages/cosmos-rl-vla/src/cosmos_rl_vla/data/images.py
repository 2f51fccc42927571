"""The images of frames, from all cameras: mp4 files, or a column of PNGs.

    (episode, frame) -- find --> segment, index in it -- cached, else decoded by threads --> uint8 [H, W, 3]

A *segment* is the unit of decoding: a run of a video from a keyframe on, or one PNG. Decoded segments are in an LRU
cache; while all images fit, each is decoded once.
"""

from __future__ import annotations

import io
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from av.error import FFmpegError

from cosmos_rl_core.data.video import ByteCache, VideoFile, cut_off, open_container, upright
from cosmos_rl_core.errors import MediaError, UserError
from cosmos_rl_vla.data.lerobot import EpisodeAt, Feature, Frames, LeRobotDataset
from cosmos_rl_vla.data.parquet import AGAIN, open_parquet

if TYPE_CHECKING:
    import pyarrow as pa


TOLERANCE_S = 1e-4
"""Most between a row's time and that of its frame, as in lerobot."""
_DEEP = ("I", "F")
"""Beginnings of Pillow's modes of more than 8 bits; converted to colours, all but the least values are white."""
_OPEN_FILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSegment:
    """The unit of decoding."""

    path: Path
    camera: str
    number: int
    """Index of the run in a video, or of the row in a parquet file."""


class Videos:
    """One camera's images from mp4 files. Thread-safe.

    Row n of a file's episodes has frame n where the file has as many frames as rows: cameras and clocks drift. In other
    files a row has the frame that is shown at its time.
    """

    def __init__(self, camera: str, dataset: LeRobotDataset, *, episodes: Sequence[EpisodeAt], frames: Frames) -> None:
        """episodes: those that are read, of which `frames` has the times."""
        self._camera, self._episodes, self._frames = camera, episodes, frames
        self._open: OrderedDict[Path, VideoFile] = OrderedDict()
        self._lock = threading.Lock()
        self._by_time: dict[int, np.ndarray] = {}
        """Places of the rows of episodes whose file has more or fewer frames than rows."""
        self._rows: Counter[Path] = Counter()
        """Number of rows of a file."""
        self._rows_before: dict[int, int] = {}
        """Number of rows of earlier episodes in the file of an episode."""
        for episode in sorted(dataset.episodes, key=lambda episode: (episode.videos[camera].start_s, episode.number)):
            path = episode.videos[camera].path
            self._rows_before[episode.number] = self._rows[path]
            self._rows[path] += episode.length

    def check(self, path: Path) -> None:
        """Raise UserError for a file that is missing, incomplete, or without the frames of its rows."""
        if frames_in(path, camera=self._camera) == self._rows[path]:
            return
        try:
            for episode in self._episodes:
                if episode.videos[self._camera].path == path:
                    self._places(episode)
        except MediaError as error:
            raise UserError(error.reason) from error

    def find(self, episode: EpisodeAt, frame: int) -> tuple[VideoSegment, int]:
        """Return the segment that contains a frame, and its index in it. Raises MediaError."""
        path = episode.videos[self._camera].path
        table, place = self._file(path).table, int(self._places(episode)[frame])
        run = table.run_of(place)
        return VideoSegment(path=path, camera=self._camera, number=run), place - int(table.runs[run])

    def _places(self, episode: EpisodeAt) -> range | np.ndarray:
        """Return the places of an episode's rows in its file. Raises MediaError."""
        at = episode.videos[self._camera]
        table, rows, before = self._file(at.path).table, self._rows[at.path], self._rows_before[episode.number]
        if len(table.pts) == rows:
            return range(before, before + episode.length)
        if episode.number not in self._by_time:
            first = self._frames.first[episode.number]
            seconds = at.start_s + self._frames.seconds[first : first + episode.length]
            try:
                self._by_time[episode.number] = table.places(seconds, tolerance_s=TOLERANCE_S)
            except ValueError as error:
                raise MediaError(
                    f"{at.path} ({self._camera}), episode {episode.number}, {len(table.pts)} frames for {rows} rows: "
                    f"{error}; {AGAIN}"
                ) from None
        return self._by_time[episode.number]

    def decode(self, segment: VideoSegment) -> np.ndarray:
        """Return uint8 [n, H, W, 3]. Raises MediaError."""
        file = self._file(segment.path)
        images: dict[int, np.ndarray] = {}
        places = range(*(int(place) for place in file.table.runs[segment.number : segment.number + 2]))
        file.read(
            places, lambda frame, place: images.update({place: upright(frame).show(frame.to_ndarray(format="rgb24"))})
        )
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
    """One camera's images from a column of {"bytes": png, "path": name}. Thread-safe. Row groups are cached encoded."""

    def __init__(self, camera: str, frames: Frames, *, cache_bytes: int) -> None:
        self._camera, self._frames = camera, frames
        self._row_groups: ByteCache[pa.Array] = ByteCache(cache_bytes)
        self._ends: dict[Path, np.ndarray] = {}
        """Cumulative number of rows at the end of each row group, by file."""

    def find(self, episode: EpisodeAt, frame: int) -> tuple[VideoSegment, int]:
        """Return the segment that contains a frame, and its index in it. Raises MediaError."""
        row = self._frames.first_in_file[episode.number] + frame
        return VideoSegment(path=episode.data, camera=self._camera, number=row), 0

    def decode(self, segment: VideoSegment) -> np.ndarray:
        """Return uint8 [n, H, W, 3]. Raises MediaError."""
        from PIL import Image, UnidentifiedImageError

        encoded, where = self._encoded(segment), f"{segment.path}: {segment.camera} of row {segment.number}"
        if encoded is None:
            raise MediaError(f"{where} is in another file; embed it")
        try:
            with Image.open(io.BytesIO(encoded)) as image:
                if image.mode.startswith(_DEEP):
                    raise MediaError(
                        f"{where} has pixels of mode {image.mode}, as a depth map: set [data] cameras to the others"
                    )
                return np.asarray(image.convert("RGB"))[None]
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise MediaError(f"{where} is not an image: {error}") from error

    def _encoded(self, segment: VideoSegment) -> bytes | None:
        ends = self._ends_of(segment.path)
        group = int(np.searchsorted(ends, segment.number, side="right"))
        column = self._row_groups.get((segment.path, group))
        if column is None:
            column = self._read(segment.path, group)
            self._row_groups.put((segment.path, group), column, column.nbytes)
        return column[segment.number - (int(ends[group - 1]) if group else 0)].as_py()

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
        self._sources: dict[str, Videos | Column] = {}
        for camera, feature in features.items():
            if feature.dtype == "video":
                videos = Videos(camera, dataset, episodes=episodes, frames=frames)
                files = dict.fromkeys(episode.videos[camera].path for episode in episodes)
                list(self._threads.map(videos.check, files))
                self._sources[camera] = videos
            else:
                self._sources[camera] = Column(camera, frames, cache_bytes=encoded // columns)

    def read(self, frames: Sequence[tuple[int, int]]) -> tuple[np.ndarray, dict[int, str]]:
        """Return the images of frames (episode, frame), black for unreadable ones, and the reasons for those.

        Returns: uint8 [B, cameras, H, W, 3]; reasons by index in the batch.
        """
        images = np.zeros((len(frames), len(self._sources), *self.size, 3), np.uint8)
        segments: dict[tuple[int, int], tuple[VideoSegment, int]] = {}
        reasons: dict[int, str] = {}
        for row, (number, frame) in enumerate(frames):
            for camera, source in enumerate(self._sources.values()):
                try:
                    segments[row, camera] = source.find(self._episodes[number], frame)
                except MediaError as error:
                    reasons[row] = error.reason
        decoded = self._decoded(dict.fromkeys(segment for segment, _ in segments.values()))
        for (row, camera), (segment, place) in segments.items():
            frames_of_segment = decoded[segment]
            if isinstance(frames_of_segment, MediaError):
                reasons[row] = frames_of_segment.reason
            else:
                images[row, camera] = frames_of_segment[place]
        return images, reasons

    def _decoded(self, segments: Iterable[VideoSegment]) -> dict[VideoSegment, np.ndarray | MediaError]:
        """Decode the segments that are not cached, in threads."""
        cached = {segment: self._cache.get(segment) for segment in segments}
        missing = [segment for segment, array in cached.items() if array is None]
        new = dict(zip(missing, self._threads.map(self._try, missing)))
        return {segment: new[segment] if array is None else array for segment, array in cached.items()}

    def _try(self, segment: VideoSegment) -> np.ndarray | MediaError:
        """Decode one segment; runs in a thread."""
        try:
            return self._decode(segment)
        except MediaError as error:
            return error

    def _decode(self, segment: VideoSegment) -> np.ndarray:
        decoded = self._sources[segment.camera].decode(segment)
        if decoded.shape[1:] != (*self.size, 3):
            size, expected = (f"{height}x{width}" for height, width in (decoded.shape[1:3], self.size))
            raise MediaError(f"{segment.path}: {segment.camera} is {size}, meta/info.json has {expected}")
        self._cache.put(segment, decoded, decoded.nbytes)
        return decoded


def _one_size(features: Mapping[str, Feature]) -> tuple[int, int]:
    if wrong := [name for name, feature in features.items() if not feature.is_image]:
        raise UserError(f"[data] cameras: {wrong[0]!r} holds {features[wrong[0]].dtype}, not images")
    if depth := [name for name, feature in features.items() if feature.is_depth]:
        raise UserError(
            f"{depth[0]!r} is a depth map by meta/info.json, and models here read colours: set [data] cameras to the "
            "others"
        )
    sizes = {camera: feature.size for camera, feature in features.items()}
    if len(set(sizes.values())) > 1:
        raise UserError(f"images of several sizes, {sizes}: set [data] cameras to those of one size")
    return next(iter(sizes.values()), (1, 1))


def frames_in(path: Path, *, camera: str) -> int:
    """Return the number of frames by a file's header, 0 where it has none.

    Raises UserError for a file that is missing or incomplete, and for a depth map.
    """
    try:
        with open_container(path) as container:
            if not container.streams.video:
                raise UserError(f"{path}: the file has no video stream; {AGAIN} ({camera})")
            stream = container.streams.video[0]
            layout = stream.codec_context.format if stream.codec_context is not None else None
    except FileNotFoundError:
        raise UserError(f"{path} ({camera}) does not exist: the dataset is incomplete; {AGAIN}") from None
    except (FFmpegError, OSError) as error:
        reason = cut_off(path) or f"cannot be read, as after an interruption: {error.strerror or error}"
        raise UserError(f"{path} ({camera}) {reason}; {AGAIN}") from error
    if layout is not None and len(layout.components) == 1 and layout.components[0].bits > 8:
        raise UserError(
            f"{path} ({camera}) has pixels of {layout.name}, as a depth map: set [data] cameras to the others"
        )
    return stream.frames
