"""Distance between the clips of a group; it falls with mode collapse."""

from __future__ import annotations

import numpy as np
from PIL import Image
from pydantic import Field

from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.rewards.video import group_videos, sample_frames


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
