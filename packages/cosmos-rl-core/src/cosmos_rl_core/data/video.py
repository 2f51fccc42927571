"""Videos and images read with PyAV (the extra `media`): the times of all frames, then the pixels of some. No torch.

    packets, not decoded --> times of all frames, keyframes --> seek to the keyframe before --> decode frame by frame

The times come from the packets (about a millisecond a video), so that neither variable frame rates nor wrong headers
matter. A *run* is a keyframe with the frames up to the next; a frame is decoded from the start of its run on. Decoding
releases the GIL, and each file uses one thread: decode as many files at once as there are cores.

Decoders report "Invalid data" for a file that was cut off; `cut_off` finds the reason in its headers. ISO base media
files (.mp4, .mov; ISO/IEC 14496-12) are a sequence of boxes, each with its size and a type of four letters. Their
index, the box "moov", is written last by most encoders: a recording or copy that was ended early has none. RIFF files
(.avi) begin with their size.
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Generic, Self, TypeVar

import av
import numpy as np
from av.error import FFmpegError

from cosmos_rl_core.errors import MediaError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

Source = str | Path | bytes
"""A file on this machine, or the content of one."""

_FIRST = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")
"""Types that a file of boxes begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameTable:
    """The times of a video's frames, in display order."""

    pts: np.ndarray
    """[N] int64, in units of `time_base`, increasing."""
    time_base: float
    """Seconds."""
    seconds: np.ndarray
    """[N] float64."""
    runs: np.ndarray
    """[R + 1] int64: the first frame of each run, and N."""
    seeks: tuple[int, ...]
    """[R]: the time to seek to for each run, in units of `time_base`."""

    def places(self, seconds: np.ndarray, *, tolerance_s: float) -> np.ndarray:
        """Return the indices [n] of the frames at increasing times [n].

        Raises ValueError where no frame is within the tolerance of a time, or one frame is at two of them.
        """
        after = np.clip(np.searchsorted(self.seconds, seconds), 1, max(1, len(self.seconds) - 1))
        before = after - 1
        after = np.minimum(after, len(self.seconds) - 1)
        nearer = np.abs(self.seconds[after] - seconds) < np.abs(self.seconds[before] - seconds)
        nearest = np.where(nearer, after, before)
        far = np.flatnonzero(np.abs(self.seconds[nearest] - seconds) > tolerance_s)
        if len(far) and (last := seconds[far[-1]]) > self.seconds[-1] + tolerance_s:
            raise ValueError(f"it ends at {self.seconds[-1]:.4f} s, before the time {last:.4f} s")
        if len(far):
            raise ValueError(f"no frame within {1000 * tolerance_s:g} ms of the time {seconds[far[0]]:.4f} s")
        if len(same := np.flatnonzero(np.diff(nearest) <= 0)):
            raise ValueError(f"two times have the frame at {self.seconds[nearest[same[0]]]:.4f} s")
        return nearest

    def run_of(self, place: int) -> int:
        """Return the index of a frame's run; -1 for a frame before the first keyframe."""
        return int(np.searchsorted(self.runs, place, side="right")) - 1


class VideoFile:
    """An open video, or an image as a video of one frame. Any thread may read; one decodes at a time.

    with VideoFile("a.mp4") as video:
        places = video.table.places(np.array([1.5, 2.0]), tolerance_s=1e-4)
        video.read(places, lambda frame, place: images.append(frame.to_ndarray(format="rgb24")))
    """

    def __init__(self, source: Source, *, name: str = "", remedy: str = "") -> None:
        """Open it and read the times of its frames.

        Args:
            source: a file, or the content of one.
            name: of the file in errors; its path by default.
            remedy: appended to errors.

        Raises:
            MediaError: there is no such file, no frame in it, or it cannot be decoded.
        """
        self._source = source
        self._name = name or (f"{len(source)} bytes" if isinstance(source, bytes) else str(source))
        self._remedy = remedy and f"; {remedy}"
        self._lock = threading.Lock()
        with self._decoder_errors():
            self._container, self._stream = self._open()
            self.table = self._read_table()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width that the file gives before anything is decoded; None where it gives none."""
        context = self._stream.codec_context
        return (context.height, context.width) if context.height and context.width else None

    def read(
        self, places: Sequence[int] | np.ndarray, take: Callable[[VideoFrame, int], None], *, retry: bool = False
    ) -> None:
        """Decode the frames at increasing indices of the table; call `take` with each frame and its index.

        retry: decode once more from the beginning where seeking does not reach all of them; `take` is then called
        again for the frames it has got.

        Raises:
            MediaError: not all of them can be decoded.
        """
        with self._lock, self._decoder_errors():
            self._seek(int(places[0]))
            if self._decode(places, take):
                return
            if retry:
                self._container.close()
                self._container, self._stream = self._open()
                if self._decode(places, take):
                    return
        shown = self.table.seconds[places[0]]
        raise self.error(f"{cut_off(self._source) or 'is damaged'}: not all frames after {shown:.3f} s can be decoded")

    def error(self, reason: str) -> MediaError:
        """Return the error that names the file, the reason and the remedy."""
        return MediaError(f"{self._name}: {reason}{self._remedy}")

    def _seek(self, place: int) -> None:
        run = self.table.run_of(place)
        self._container.seek(self.table.seeks[run] if run >= 0 else int(self.table.pts[0]), stream=self._stream)

    def _decode(self, places: Sequence[int] | np.ndarray, take: Callable[[VideoFrame, int], None]) -> bool:
        """Return whether all frames were decoded."""
        place_of = {int(self.table.pts[place]): int(place) for place in places}
        last = max(place_of)
        for frame in self._frames():
            if frame.pts is None or frame.pts not in place_of:
                if frame.pts is not None and frame.pts > last:
                    return False
                continue
            if frame.is_corrupt:
                return False
            take(frame, place_of.pop(frame.pts))
            if not place_of:
                return True
        return False

    def _frames(self) -> Iterator[VideoFrame]:
        """Yield decoded frames in display order, up to the first packet that cannot be decoded."""
        for packet in self._container.demux(self._stream):
            try:
                yield from packet.decode()  # pyright: ignore[reportReturnType]  # those of a video
            except FFmpegError:
                yield from self._stream.codec_context.decode(None)  # frames before it, which the decoder held back
                return

    def _open(self) -> tuple[InputContainer, VideoStream]:
        container = open_container(self._source)
        if not container.streams.video:
            container.close()
            raise self.error("there is no video in it")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            container.close()
            raise self.error("there is no decoder for the video in it")
        stream.codec_context.thread_count = 1  # files are decoded side by side instead
        return container, stream

    def _read_table(self) -> FrameTable:
        shown: list[int] = []
        keyframes: dict[int, int] = {}
        for packet in self._container.demux(self._stream):
            if not packet.size or packet.is_discard:
                continue
            if packet.pts is None:
                raise self.error("frames without times; copy it to an .mp4: ffmpeg -i IN -c copy OUT.mp4")
            shown.append(packet.pts)
            if packet.is_keyframe:
                keyframes[packet.pts] = packet.pts if packet.dts is None else packet.dts
        if not shown:
            raise self.error("there is no frame in it")
        pts = np.unique(np.array(shown, np.int64))
        starts = sorted(keyframes)
        assert self._stream.time_base is not None
        time_base = float(self._stream.time_base)
        return FrameTable(
            pts=pts,
            time_base=time_base,
            seconds=pts * time_base,
            runs=np.array([*np.searchsorted(pts, starts), len(pts)], np.int64),
            seeks=tuple(keyframes[start] for start in starts),
        )

    @contextmanager
    def _decoder_errors(self) -> Iterator[None]:
        """Raise errors of the decoder as MediaError."""
        try:
            yield
        except (FFmpegError, OSError) as error:
            reason = cut_off(self._source) or f"cannot be decoded: {error.strerror or error}"
            raise self.error(f"{reason}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Upright:
    """The way to show stored frames upright: rows and columns exchanged, then each read forwards (1) or backwards (-1).

    Cameras store videos sideways, and mirrored ones of a selfie, with a matrix for the player.
    """

    exchanged: bool
    down: int
    across: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a frame after `show`; of a shown frame, those before."""
        return (width, height) if self.exchanged else (height, width)

    def show(self, pixels: np.ndarray) -> np.ndarray:
        """[H, W, ...] -> a view of it, upright."""
        turned = pixels.swapaxes(0, 1) if self.exchanged else pixels
        return turned[:: self.down, :: self.across]


AS_STORED = Upright(exchanged=False, down=1, across=1)


def upright(frame: VideoFrame) -> Upright:
    """Return how to show a frame, by its display matrix (ISO/IEC 14496-12, `tkhd`), which players apply too.

    It maps (column, row) to (a column + c row, b column + d row). Angles are rounded to quarter turns.
    """
    a, b, c, d = _display_matrix(frame)
    exchanged = abs(b) > abs(a)
    down, across = (b, c) if exchanged else (d, a)
    return Upright(exchanged=exchanged, down=-1 if down < 0 else 1, across=-1 if across < 0 else 1)


def _display_matrix(frame: VideoFrame) -> tuple[int, int, int, int]:
    """The entries a, b, c, d."""
    try:
        data = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV does not know all kinds of side data of its own FFmpeg, and then gives none but the angle
        return {0: (1, 0, 0, 1), 1: (0, -1, 1, 0), 2: (-1, 0, 0, -1), 3: (0, 1, -1, 0)}[round(frame.rotation / 90) % 4]
    if data is None:
        return 1, 0, 0, 1
    a, b, _, c, d, *_ = np.frombuffer(data, np.int32).tolist()
    return a, b, c, d


def open_container(source: Source) -> InputContainer:
    """Return PyAV's container of a file or of the content of one; raises what PyAV raises."""
    file = io.BytesIO(source) if isinstance(source, bytes) else str(source)
    return av.open(file, "r", metadata_errors="replace")  # titles and the like need not be UTF-8


def cut_off(source: Source) -> str:
    """Describe how a video file is cut off, as a phrase that follows its name; "" where its headers do not show it.

    source: a file's path or its content. A file that cannot be read gives "" too.
    """
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(0)
            return _missing(file, length)
    except OSError:
        return ""


def _missing(file: BinaryIO, length: int) -> str:
    head = file.read(12)
    file.seek(0)
    if not head:
        return "is empty: it has 0 bytes"
    if head[:4] == b"RIFF" and len(head) >= 8:
        size = int.from_bytes(head[4:8], "little")
        return _short(length, 8 + size) if size < 2**32 - 1 else ""  # a stream of unknown length
    return _missing_box(file, length) if head[4:8] in _FIRST else ""


def _missing_box(file: BinaryIO, length: int) -> str:
    begin, indexed = 0, False
    while begin < length:
        file.seek(begin)
        head = file.read(16)
        size, kind = int.from_bytes(head[:4], "big"), head[4:8]
        size = {0: length - begin, 1: int.from_bytes(head[8:16], "big")}.get(size, size)
        if size < 8:
            return _short(length, begin + 8) if len(head) < 8 else ""  # no box at all: damaged in another way
        if begin + size > length:
            return _short(length, begin + size)
        indexed = indexed or kind == b"moov"
        begin += size
    return "" if indexed else "has no index (moov): the recording or the copy was ended before it was written"


def _short(length: int, least: int) -> str:
    return f"is cut off: it has {length:,} bytes of at least {least:,}" if length < least else ""


V = TypeVar("V")


class ByteCache(Generic[V]):
    """Values by key, such as arrays, within a number of bytes. Any thread may use it."""

    def __init__(self, max_bytes: int, *, evict: bool = True) -> None:
        """evict: the least recently used make room; without it the first ones stay and later ones are not kept."""
        self._max_bytes = max_bytes
        self._evict = evict
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Of all values."""

    def get(self, key: Hashable) -> V | None:
        """Return the value of a key."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: V, num_bytes: int) -> None:
        """Keep a value of this size, unless it is larger than all the memory that may be used."""
        with self._lock:
            room = self._max_bytes if self._evict else self._max_bytes - self.num_bytes
            if key in self._values or num_bytes > room:
                return
            self._values[key] = value, num_bytes
            self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes:
                _, (_, freed) = self._values.popitem(last=False)
                self.num_bytes -= freed
