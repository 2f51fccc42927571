"""Metrics of the pixels alone: cheap, verifiable, and easy to game. Each is a function of a clip, and a reward.

A clip is uint8 [F, H, W, 3]; brightness is luma in [0, 1].
"""

from __future__ import annotations

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.rewards.video import group_videos, luma


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
