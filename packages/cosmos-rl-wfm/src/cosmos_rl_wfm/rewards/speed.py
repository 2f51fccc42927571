"""Speed of the bright object in the direction that the caption names: a reward verifiable from pixels."""

from __future__ import annotations

import re

import numpy as np
from pydantic import Field

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.rewards.video import group_videos, luma, row_text

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
        found = " and ".join(sorted(named)) or "none"
        raise UserError(f"the caption {caption[:80]!r} must name one of moving left, right, up, down; found: {found}")
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
