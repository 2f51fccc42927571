"""Cuts clips out of videos and images: chooses the frames, scales and crops them. No torch.

    times of all frames (core's VideoFile) --> choose --> decode, scale, crop

All times are read before a frame is decoded, so that a clip that fits exactly is found.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from cosmos_rl_core.data.pictures import open_picture, upright_rgb
from cosmos_rl_core.data.video import AS_STORED, Source, Upright, VideoFile, upright
from cosmos_rl_core.errors import MediaError

if TYPE_CHECKING:
    from cosmos_rl_wfm.data.config import Start

PICTURES = ("JPEG", "PNG", "WEBP")
"""Formats that are read with Pillow, which knows their orientation and transparency."""

FASTEST = 1.1
"""Largest ratio of a clip's frame rate to its video's; above it, too many frames would be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Decoded frames."""

    video: np.ndarray
    """uint8 [F, H, W, 3], RGB."""
    fps: float
    """Frames a second; 0 for a still image."""

    @property
    def nbytes(self) -> int:
        """Memory of the frames."""
        return self.video.nbytes


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

    With `fps`, frames are the nearest to times 1 / fps apart; without it, every `stride`th. `start` is where the clip
    begins in a longer video; "random" samples it from `rng`. `name` is the name of bytes in messages.

    Raises:
        MediaError: the file is missing, damaged, too short or too slow.
    """
    if frames == 1 and (still := _read_picture(source, sizes, name=name)) is not None:
        return Clip(video=still, fps=fps or 0.0)
    with VideoFile(source, name=name) as file:
        seconds = (file.table.pts - file.table.pts[0]) * file.table.time_base
        try:
            chosen = choose_frames(seconds, frames=frames, fps=fps, stride=stride, start=start, rng=rng)
        except ValueError as error:
            raise file.error(str(error)) from None
        video = _read(file, chosen, sizes)
    step = frame_step(seconds)
    return Clip(video=video, fps=fps or (1 / (step * stride) if step else 0.0))


def choose_frames(
    seconds: np.ndarray,
    *,
    frames: int,
    fps: float | None = None,
    stride: int = 1,
    start: Start = "first",
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Return the indices [frames] int64 of a clip's frames in a video; `read_clip` documents the keys.

    seconds: [N] float64, the times of the video's frames since the first.

    Raises:
        ValueError: the video is too short, or too slow for `fps`.
    """
    step = frame_step(seconds)
    if fps is None:
        starts = len(seconds) - (frames - 1) * stride
    else:
        if step and fps * step > FASTEST:
            raise ValueError(f"has {1 / step:.3g} frames a second, fewer than data.fps = {fps:g}")
        last_start = seconds[-1] + step / 2 - (frames - 1) / fps
        starts = int(np.searchsorted(seconds, last_start, side="right"))
    if starts < 1:
        need = f"{frames} frames" + (f", every {stride}th" if stride > 1 else "") + (f" at {fps:g}/s" if fps else "")
        raise ValueError(f"is too short for {need}: it has {len(seconds)} in {seconds[-1] + step:.3g} s")
    first = _first(starts, start=start, rng=rng)
    if fps is None:
        return first + stride * np.arange(frames)
    halfway = (seconds[1:] + seconds[:-1]) / 2
    return np.searchsorted(halfway, seconds[first] + np.arange(frames) / fps)


def frame_step(seconds: np.ndarray) -> float:
    """Return the seconds from a frame to the next, the median; 0 for a single frame."""
    return float(np.median(np.diff(seconds))) if len(seconds) > 1 else 0.0


def nearest_size(height: float, width: float, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the height and width of `sizes` whose aspect ratio is nearest, as a factor; of equal ones the first."""
    return min(sizes, key=lambda size: abs(log(size[1] / size[0]) - log(width / height)))


def _first(starts: int, *, start: Start, rng: np.random.Generator | None) -> int:
    if start == "random":
        assert rng is not None, "a random start needs rng"
        return int(rng.integers(starts))
    return (starts - 1) // 2 if start == "centre" else 0


def _read_picture(source: Source, sizes: Sequence[tuple[int, int]], *, name: str) -> np.ndarray | None:
    """Return a picture as uint8 [1, H, W, 3]; None for another file, and for one that cannot be opened."""
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            opened = open_picture(file, formats=PICTURES)
            if opened is None:
                return None
            frame = VideoFrame.from_ndarray(np.asarray(upright_rgb(opened)), format="rgb24")
    except MediaError as error:
        shown = name or (f"{len(source)} bytes" if isinstance(source, bytes) else source)
        raise MediaError(f"{shown}: {error.reason}") from error
    except OSError:  # `VideoFile` names the reason
        return None
    image = np.empty((1, *nearest_size(frame.height, frame.width, sizes), 3), np.uint8)
    _fit(frame, image[0], VideoReformatter(), AS_STORED)
    return image


def _read(file: VideoFile, chosen: np.ndarray, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the chosen frames, which may repeat, as uint8 [F, H, W, 3]."""
    scaler = VideoReformatter()  # one per clip: it keeps the tables of its filter between frames
    video = np.empty(0, np.uint8)

    def take(frame: VideoFrame, place: int) -> None:
        nonlocal video
        if not len(video):
            shown = upright(frame).size(frame.height, frame.width)
            video = np.empty((len(chosen), *nearest_size(*shown, sizes), 3), np.uint8)
        first, stop = np.searchsorted(chosen, [place, place + 1])
        _fit(frame, video[first], scaler, upright(frame))
        video[first + 1 : stop] = video[first]

    file.read(np.unique(chosen), take, retry=True)
    return video


def _fit(frame: VideoFrame, image: np.ndarray, scaler: VideoReformatter, way: Upright) -> None:
    """Scale a frame to cover `image` [H, W, 3], and copy its centre, shown upright."""
    height, width = way.size(*image.shape[:2])
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
    image[:] = way.show(middle)
