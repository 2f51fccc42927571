"""Clips out of videos and images, decoded with PyAV, and videos out of clips. No torch.

    packets, not decoded --> times of all frames --> which ones --> seek to the keyframe before --> decode, scale, crop

The times of all frames come from the packets (about a millisecond a video), so that nothing is guessed: neither
variable frame rates nor wrong headers matter, and a clip that fits exactly is found. Decoding lets go of the
interpreter's lock, and each call uses one thread: run as many calls as there are cores.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
from av.error import FFmpegError
from av.video.reformatter import Interpolation, VideoReformatter

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.video_file import cut_off

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

    from cosmos_rl_wfm.data.config import Start

Source = str | Path | bytes
"""A file on this machine, or what is in one."""

FASTEST = 1.1
"""A clip may ask for this many times the frames a second that its video has; above, too many frames would be double."""


class ClipError(SampleError):
    """A video that gives no clip: not there, damaged, too short. Names the file; trying again cannot help."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, final=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Decoded frames."""

    video: np.ndarray
    """uint8 [F, H, W, 3], RGB."""
    fps: float
    """Frames a second; 0 for a still image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameTable:
    """When the frames of a video are shown, in that order."""

    pts: np.ndarray
    """[N] int64: in the stream's own unit, increasing."""
    seconds: np.ndarray
    """[N] float64: since the first."""
    keyframes: Sequence[tuple[int, int]]
    """Pts and place to seek to of frames that decode without others, by pts."""

    @property
    def step(self) -> float:
        """Seconds from a frame to the next; 0 for a single one."""
        return float(np.median(np.diff(self.seconds))) if len(self.seconds) > 1 else 0.0


def read_clip(
    source: Source,
    *,
    frames: int,
    sizes: Sequence[tuple[int, int]],
    fps: float | None = None,
    stride: int = 1,
    start: Start = "first",
    rng: np.random.Generator | None = None,
    name: str = "",
) -> Clip:
    """Decode `frames` frames, scaled to cover and cropped in the middle to the size of `sizes` nearest in shape.

    With `fps` frames are taken by the clock, the nearest to each time; without it every `stride`th. `start` says where
    in a longer video they begin; "random" draws from `rng`. `name` is what messages call bytes.

    Raises:
        ClipError: the file is missing, damaged, too short or too slow.
    """
    name = name or (f"{len(source)} bytes" if isinstance(source, bytes) else str(source))
    try:
        with _open(source) as container:
            stream = _video_stream(container, name=name)
            table = read_table(container, stream, name=name)
            try:
                chosen = choose_frames(table, frames=frames, fps=fps, stride=stride, start=start, rng=rng)
            except ValueError as error:
                raise ClipError(f"{name}: {error}") from None
            video = _decode(container, stream, table, chosen, sizes)
        if video is None:  # the container cannot seek to where its index points
            with _open(source) as container:
                video = _decode(container, _video_stream(container, name=name), table, chosen, sizes, seek=False)
    except (FFmpegError, OSError) as error:
        raise ClipError(f"{name}: {cut_off(source) or f'cannot be decoded: {error.strerror or error}'}") from error
    if video is None:
        damage = cut_off(source) or "is damaged"
        raise ClipError(f"{name}: {damage}: of {frames} frames asked for, not all can be decoded")
    return Clip(video=video, fps=fps or (1 / (table.step * stride) if table.step else 0.0))


def choose_frames(
    table: FrameTable,
    *,
    frames: int,
    fps: float | None = None,
    stride: int = 1,
    start: Start = "first",
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Return the places [frames] int64 of a clip's frames in the table; `read_clip` says what the keys mean.

    Raises:
        ValueError: the video is too short, or too slow for `fps`.
    """
    seconds, step = table.seconds, table.step
    if fps is None:
        starts = len(seconds) - (frames - 1) * stride
    else:
        if step and fps * step > FASTEST:
            raise ValueError(f"has {1 / step:.3g} frames a second, fewer than data.fps = {fps:g}")
        last_start = seconds[-1] + step / 2 - (frames - 1) / fps
        starts = int(np.searchsorted(seconds, last_start, side="right"))
    if starts < 1:
        wanted = f"{frames} frames" + (f", every {stride}th" if stride > 1 else "") + (f" at {fps:g}/s" if fps else "")
        raise ValueError(f"is too short for {wanted}: it has {len(seconds)} in {seconds[-1] + step:.3g} s")
    first = _first(starts, start=start, rng=rng)
    if fps is None:
        return first + stride * np.arange(frames)
    halfway = (seconds[1:] + seconds[:-1]) / 2
    return np.searchsorted(halfway, seconds[first] + np.arange(frames) / fps)


def nearest_size(height: float, width: float, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the height and width of `sizes` whose aspect ratio is nearest, as a factor; of equal ones the first."""
    return min(sizes, key=lambda size: abs(log(size[1] / size[0]) - log(width / height)))


def read_table(container: InputContainer, stream: VideoStream, *, name: str) -> FrameTable:
    """Read the packets of a stream without decoding them.

    Raises:
        ClipError: there are none, or they do not say when they are shown.
    """
    shown: list[int] = []
    keyframes: list[tuple[int, int]] = []
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        if packet.pts is None:
            raise ClipError(f"{name}: frames without times; copy it to an .mp4: ffmpeg -i IN -c copy OUT.mp4")
        shown.append(packet.pts)
        if packet.is_keyframe:
            keyframes.append((packet.pts, packet.pts if packet.dts is None else packet.dts))
    if not shown:
        raise ClipError(f"{name}: there is no frame in it")
    pts = np.unique(np.array(shown, np.int64))
    assert stream.time_base is not None
    return FrameTable(pts=pts, seconds=(pts - pts[0]) * float(stream.time_base), keyframes=sorted(keyframes))


def _first(starts: int, *, start: Start, rng: np.random.Generator | None) -> int:
    if start == "random":
        assert rng is not None, "a random start is drawn from rng"
        return int(rng.integers(starts))
    return (starts - 1) // 2 if start == "centre" else 0


def _open(source: Source) -> InputContainer:
    return av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source), "r")


def _video_stream(container: InputContainer, *, name: str) -> VideoStream:
    if not container.streams.video:
        raise ClipError(f"{name}: there is no video in it")
    stream = container.streams.video[0]
    stream.codec_context.thread_count = 1
    return stream


def _decode(
    container: InputContainer,
    stream: VideoStream,
    table: FrameTable,
    chosen: np.ndarray,
    sizes: Sequence[tuple[int, int]],
    *,
    seek: bool = True,
) -> np.ndarray | None:
    """Return uint8 [F, H, W, 3], or None if one of the chosen frames did not come."""
    wanted = table.pts[chosen]
    if seek:
        before = [place for pts, place in table.keyframes if pts <= wanted[0]]
        container.seek(before[-1] if before else int(table.pts[0]), stream=stream)
    scaler = VideoReformatter()  # one a clip: it keeps the tables of its filter between frames
    video: np.ndarray | None = None
    done = 0
    for frame in container.decode(stream):
        if frame.pts is None or frame.pts < wanted[done]:
            continue
        if frame.pts > wanted[done] or frame.is_corrupt:
            return None
        if video is None:
            turned = abs(frame.rotation) == 90
            shown = (frame.width, frame.height) if turned else (frame.height, frame.width)
            video = np.empty((len(chosen), *nearest_size(*shown, sizes), 3), np.uint8)
        first, done = done, int(np.searchsorted(wanted, frame.pts, side="right"))
        _fit(frame, video[first], scaler)
        video[first + 1 : done] = video[first]
        if done == len(wanted):
            return video
    return None


def _fit(frame: VideoFrame, image: np.ndarray, scaler: VideoReformatter) -> None:
    """Scale a frame until it covers `image` [H, W, 3], turn it upright, and copy its middle."""
    turns = round(frame.rotation / 90)
    height, width = image.shape[:2] if turns % 2 == 0 else image.shape[1::-1]
    scale = max(height / frame.height, width / frame.width)
    scaled = scaler.reformat(
        frame,
        width=max(width, round(frame.width * scale)),
        height=max(height, round(frame.height * scale)),
        format="rgb24",
        interpolation=Interpolation.BICUBIC,
        threads=1,
    )
    plane = scaled.planes[0]
    pixels = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)[
        : scaled.height, : 3 * scaled.width
    ]
    top, left = (scaled.height - height) // 2, (scaled.width - width) // 2
    middle = pixels.reshape(scaled.height, scaled.width, 3)[top : top + height, left : left + width]
    image[:] = np.rot90(middle, turns)
