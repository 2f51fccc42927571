"""The inputs of rewards: the clips of a group and the columns of its row."""

from __future__ import annotations

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import RolloutGroup

LUMA = (0.2126, 0.7152, 0.0722)
"""Weights of red, green and blue in brightness (ITU-R BT.709)."""


def group_videos(group: RolloutGroup, *, min_frames: int = 1) -> list[np.ndarray]:
    """Return the clips of a group, uint8 [F, H, W, 3] each.

    Raises:
        UserError: a rollout without a clip, one of another shape or type, or with fewer than `min_frames` frames.
    """
    return [_checked(rollout.media.get("video"), i, min_frames) for i, rollout in enumerate(group.rollouts)]


def row_text(group: RolloutGroup, column: str) -> str:
    """Return the text in a column of the group's row.

    Raises:
        UserError: the row has no such column, or no text in it.
    """
    text = group.prompt.row.get(column)
    if not isinstance(text, str) or not text.strip():
        known = ", ".join(group.prompt.row) or "none"
        raise UserError(f"the row has no text in column {column!r}; its columns: {known}")
    return text


def sample_frames(video: np.ndarray, num_frames: int) -> np.ndarray:
    """Return at most `num_frames` frames [N, H, W, 3], each from the middle of one of N equal parts of the clip."""
    total = len(video)
    num = min(num_frames, total)
    return video[(np.arange(num) * 2 + 1) * total // (2 * num)]


def luma(video: np.ndarray) -> np.ndarray:
    """uint8 [..., 3] -> brightness of each pixel, float32 [...] in [0, 1]."""
    red, green, blue = (np.float32(weight / 255) for weight in LUMA)
    out = np.multiply(video[..., 0], red, dtype=np.float32)  # channel by channel: a float copy of a long clip is large
    out += np.multiply(video[..., 1], green, dtype=np.float32)
    out += np.multiply(video[..., 2], blue, dtype=np.float32)
    return out


def _checked(video: np.ndarray | None, index: int, min_frames: int) -> np.ndarray:
    if video is None:
        raise UserError(f"rollout {index} has no video; rewards of the wfm domain need the engine of that domain")
    if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3 or 0 in video.shape:
        described = f"{video.dtype} {list(video.shape)}"
        raise UserError(f"the video of rollout {index} is {described}; it must be uint8 [F, H, W, 3]")
    if len(video) < min_frames:
        raise UserError(f"the video of rollout {index} has {len(video)} frames; this reward needs {min_frames} or more")
    return video
