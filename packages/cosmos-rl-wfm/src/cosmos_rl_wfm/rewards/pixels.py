"""Rewards computed from pixels, without a model: statistics of a clip, diversity of a group, speed of an object."""

from __future__ import annotations

import re

import numpy as np
from PIL import Image
from pydantic import Field

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.rewards.video import group_videos, luma, row_text, sample_frames


def brightness(video: np.ndarray) -> float:
    """Return the mean brightness, in [0, 1]."""
    return float(luma(video).mean(dtype=np.float64))


def contrast(video: np.ndarray) -> float:
    """Return the standard deviation of brightness within a frame, in [0, 0.5], mean over frames."""
    return float(luma(video).std(axis=(1, 2), dtype=np.float64).mean())


def saturation(video: np.ndarray) -> float:
    """Return the mean of (max - min) / max over the three colours of a pixel, in [0, 1]; black pixels have 0."""
    red, green, blue = video[..., 0], video[..., 1], video[..., 2]
    high = np.maximum(np.maximum(red, green), blue)
    low = np.minimum(np.minimum(red, green), blue)
    return float(np.divide(high - low, np.maximum(high, 1), dtype=np.float32).mean(dtype=np.float64))


def sharpness(video: np.ndarray) -> float:
    """Return the variance of the Laplacian of brightness within a frame, mean over frames.

    Raises:
        UserError: the clip is smaller than 3 x 3 pixels.
    """
    if min(video.shape[1:3]) < 3:
        raise UserError(f"sharpness needs clips of at least 3 x 3 pixels, not {video.shape[1]} x {video.shape[2]}")
    y = luma(video)
    inner = y[:, 1:-1, 1:-1]
    laplacian = y[:, :-2, 1:-1] + y[:, 2:, 1:-1] + y[:, 1:-1, :-2] + y[:, 1:-1, 2:] - 4 * inner
    return float(laplacian.var(axis=(1, 2), dtype=np.float64).mean())


def motion(video: np.ndarray) -> float:
    """Return the mean absolute change of brightness of a pixel from frame to frame, in [0, 1]. Needs 2 frames."""
    return float(np.abs(np.diff(luma(video), axis=0)).mean(dtype=np.float64))


def flicker(video: np.ndarray) -> float:
    """Return the mean of |y[f-1] - 2 y[f] + y[f+1]| / 2 over pixels, in [0, 1]. Needs 3 frames.

    A second difference: 0 for constant brightness or a constant rate of change, 1 for alternating black and white.
    """
    y = luma(video)
    return float(np.abs(y[:-2] - 2 * y[1:-1] + y[2:]).mean(dtype=np.float64) / 2)


class BrightnessReward(Strict):
    """Mean brightness, in [0, 1]."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [brightness(video) for video in group_videos(group)]


class ContrastReward(Strict):
    """Standard deviation of brightness within a frame, in [0, 0.5]."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [contrast(video) for video in group_videos(group)]


class SaturationReward(Strict):
    """Distance of colours from grey, in [0, 1]."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [saturation(video) for video in group_videos(group)]


class SharpnessReward(Strict):
    """Variance of the Laplacian of brightness."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [sharpness(video) for video in group_videos(group)]


class MotionReward(Strict):
    """Mean absolute change of a pixel from frame to frame, in [0, 1]."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [motion(video) for video in group_videos(group, min_frames=2)]


class FlickerReward(Strict):
    """Minus the mean absolute second difference of a pixel in time, halved: in [-1, 0], 0 for steady clips."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        return [-flicker(video) for video in group_videos(group, min_frames=3)]


class DiversityReward(Strict):
    """Mean distance of a clip to the others of its group, in [0, 1]; 0 for a clip alone, as in an evaluation.

    The distance of two clips is the root mean squared difference of their downscaled pixels. The mean reward of a group
    is the mean over its pairs.
    """

    num_frames: int = Field(default=16, ge=1)
    """Compared frames, from equal parts of the clip."""
    side: int = Field(default=64, ge=1)
    """Most pixels of the longer side; larger frames are averaged down by a whole factor."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        videos = group_videos(group)
        if len(videos) == 1:
            return [0.0]
        small = np.stack([shrink(sample_frames(video, self.num_frames), side=self.side) for video in videos])
        return (distances(small).sum(axis=1) / (len(videos) - 1)).tolist()


def distances(videos: np.ndarray) -> np.ndarray:
    """uint8 [G, F, H, W, 3] -> float64 [G, G]: root mean squared differences of pixels in [0, 1]."""
    flat = videos.reshape(len(videos), -1) / 255
    flat -= flat.mean(axis=0)  # |a - b|^2 = aa - 2 ab + bb loses digits if all clips share a large part
    products = flat @ flat.T
    squares = np.diag(products)
    return np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0.0) / flat.shape[1])


def shrink(video: np.ndarray, *, side: int) -> np.ndarray:
    """uint8 [F, H, W, 3] -> [F, h, w, 3] with neither h nor w above `side`, each pixel the mean of a square."""
    factor = -(-max(video.shape[1:3]) // side)
    return video if factor == 1 else np.stack([np.asarray(Image.fromarray(frame).reduce(factor)) for frame in video])


DIRECTIONS = {"left": (0.0, -1.0), "right": (0.0, 1.0), "up": (-1.0, 0.0), "down": (1.0, 0.0)}
"""Unit vectors (row, column) in the image."""

_MOVING = re.compile(r"\bmov(?:ing|es)\s+(?:to\s+the\s+)?(left|right|up|down)", re.IGNORECASE)


class SpeedReward(Strict):
    """Speed of the centre of brightness along the caption's "moving left|right|up|down", in pixels per frame.

    It is negative against the direction, 0 across it, and 0 for a clip in which fewer than two frames have a pixel
    brighter than `floor`.
    """

    column: str = "caption"
    """Column of the row that names the direction."""
    floor: float = Field(default=0.1, ge=0, lt=1)
    """Maximum brightness of background pixels; excludes the noise of codec and model from the centre."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        towards = direction(row_text(group, self.column))
        return [speed(video, towards, floor=self.floor) for video in group_videos(group, min_frames=2)]


def direction(caption: str) -> tuple[float, float]:
    """Return the unit vector (row, column) of the direction in a caption.

    Raises:
        UserError: it names none, or more than one.
    """
    named = {word.lower() for word in _MOVING.findall(caption)}
    if len(named) != 1:
        directions = " and ".join(sorted(named)) or "none"
        raise UserError(
            f"the caption {caption[:80]!r} must name one of moving left, right, up, down; found: {directions}"
        )
    return DIRECTIONS[named.pop()]


def speed(video: np.ndarray, towards: tuple[float, float], *, floor: float = 0.1) -> float:
    """Return the slope of the centre of brightness along `towards` (row, column), in pixels per frame.

    Least squares over the frames that have a centre; `video` is uint8 [F, H, W, 3].
    """
    weight = np.maximum(luma(video) - floor, 0.0).astype(np.float64)
    mass = weight.sum(axis=(1, 2))
    seen = np.flatnonzero(mass > 0)
    if len(seen) < 2:
        return 0.0
    rows = weight.sum(axis=2)[seen] @ np.arange(video.shape[1]) / mass[seen]
    columns = weight.sum(axis=1)[seen] @ np.arange(video.shape[2]) / mass[seen]
    along = towards[0] * rows + towards[1] * columns
    times = seen - seen.mean()
    return float(times @ along / (times @ times))
