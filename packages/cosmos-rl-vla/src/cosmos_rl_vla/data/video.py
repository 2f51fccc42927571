"""One video file of a dataset: which frame is shown when, and its frames decoded with PyAV. No torch.

    packets, not decoded --> times of all frames, places of keyframes --> seek to a keyframe --> decode up to the next

The times come from the packets, so that neither variable frame rates nor wrong headers matter. A *run* is a keyframe
with the frames up to the next: what has to be decoded to see any of them, and lost where one is damaged. Decoding
lets go of the interpreter's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
from av.error import FFmpegError

from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.video_file import cut_off
from cosmos_rl_vla.data.parquet import AGAIN

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream


class PictureError(SampleError):
    """A picture that cannot be had from a file that seemed sound. Names the file; trying again cannot help."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, final=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameTable:
    """When frames are shown, in that order."""

    pts: np.ndarray
    """[N] int64, in the stream's unit, increasing."""
    seconds: np.ndarray
    """[N] float64."""
    runs: np.ndarray
    """[R + 1] int64: the frame each run begins with, and N."""
    seeks: tuple[int, ...]
    """[R]: where to seek to for it, in the stream's unit."""

    def place(self, seconds: float, *, fps: float) -> int:
        """Return the frame that is shown then. Raises ValueError where none is within half a frame's time."""
        at = int(np.abs(self.seconds - seconds).argmin())
        if abs(self.seconds[at] - seconds) > 0.5 / fps:
            raise ValueError(f"has {len(self.pts)} frames up to {self.seconds[-1]:.3f} s, none at {seconds:.3f} s")
        return at

    def run_of(self, place: int) -> int:
        """Return the run that holds a frame."""
        return int(np.searchsorted(self.runs, place, side="right")) - 1


class VideoFile:
    """An open file. Any thread may ask; one decodes at a time."""

    def __init__(self, path: Path) -> None:
        """Open it and read the times of its frames. Raises PictureError."""
        self._path = path
        self._lock = threading.Lock()
        try:
            self._container = _open(path)
            self._stream = _video_stream(self._container, path)
            self.table = _read_table(self._container, self._stream, path)
        except (FFmpegError, OSError) as error:
            raise PictureError(f"{path}: {_why(path, error)}; {AGAIN}") from error

    def decode(self, run: int) -> np.ndarray:
        """Return the frames of a run, uint8 [n, H, W, 3] RGB. Raises PictureError where one does not come."""
        with self._lock:
            try:
                return self._decode(run)
            except (FFmpegError, OSError) as error:
                raise PictureError(f"{self._path}: {_why(self._path, error)}; {AGAIN}") from error

    def _decode(self, run: int) -> np.ndarray:
        first, stop = (int(place) for place in self.table.runs[run : run + 2])
        wanted = self.table.pts[first:stop]
        frames: dict[int, np.ndarray] = {}
        self._container.seek(self.table.seeks[run], stream=self._stream)
        for frame in self._frames():
            if frame.pts is None or frame.pts < wanted[0]:
                continue  # of the run before, where the file cannot seek closer
            if frame.pts > wanted[-1] or frame.is_corrupt:
                break
            frames[frame.pts] = frame.to_ndarray(format="rgb24")
            if len(frames) == len(wanted):
                break
        if len(frames) < len(wanted):
            shown = self.table.seconds[first]
            damage = cut_off(self._path) or "is damaged"
            raise PictureError(f"{self._path}: {damage}: not all frames after {shown:.3f} s can be decoded; {AGAIN}")
        return np.stack([frames[int(pts)] for pts in wanted])

    def _frames(self) -> Iterator[VideoFrame]:
        """Yield decoded frames in the order they are shown, up to what cannot be decoded."""
        for packet in self._container.demux(self._stream):
            try:
                yield from packet.decode()  # pyright: ignore[reportReturnType]  # those of a video
            except FFmpegError:
                yield from self._stream.codec_context.decode(None)  # frames before it, which the decoder held back
                return


def check_video(path: Path, *, until_s: float, fps: float, camera: str) -> None:
    """Look into a file's header. Raises UserError where it is not there, not whole, or ends before `until_s`."""
    try:
        with _open(path) as container:
            stream = _video_stream(container, path)
            assert stream.time_base is not None
            length_s = float((stream.duration or 0) * stream.time_base)
    except FileNotFoundError:
        raise UserError(f"{path} ({camera}) is not there: the dataset is not whole; {AGAIN}") from None
    except (FFmpegError, OSError) as error:
        reason = cut_off(path) or f"cannot be read, as after an interruption: {error.strerror or error}"
        raise UserError(f"{path} ({camera}) {reason}; {AGAIN}") from error
    except PictureError as error:
        raise UserError(f"{error.reason} ({camera})") from error
    if length_s and until_s > length_s + 0.5 / fps:
        raise UserError(
            f"{path} ({camera}) is shorter than its parquet: it ends after {length_s:.3f} s, the frames' column "
            f"'timestamp' goes on to {until_s:.3f} s; {AGAIN}"
        )


def _why(path: Path, error: FFmpegError | OSError) -> str:
    return cut_off(path) or f"cannot be decoded: {error.strerror or error}"


def _open(path: Path) -> InputContainer:
    return av.open(str(path), "r")


def _video_stream(container: InputContainer, path: Path) -> VideoStream:
    if not container.streams.video:
        raise PictureError(f"{path}: there is no video in it; {AGAIN}")
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1  # files are decoded side by side instead
    return stream


def _read_table(container: InputContainer, stream: VideoStream, path: Path) -> FrameTable:
    shown: list[int] = []
    keyframes: dict[int, int] = {}
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard or packet.pts is None:
            continue
        shown.append(packet.pts)
        if packet.is_keyframe:
            keyframes[packet.pts] = packet.pts if packet.dts is None else packet.dts
    if not shown or min(shown) not in keyframes:
        raise PictureError(f"{path}: no frame in it can be decoded; {AGAIN}")
    pts = np.unique(np.array(shown, np.int64))
    starts = sorted(keyframes)
    assert stream.time_base is not None
    return FrameTable(
        pts=pts,
        seconds=pts * float(stream.time_base),
        runs=np.array([*np.searchsorted(pts, starts), len(pts)], np.int64),
        seeks=tuple(keyframes[start] for start in starts),
    )
