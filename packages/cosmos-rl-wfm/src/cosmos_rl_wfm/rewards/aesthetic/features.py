"""Features of an aesthetic head: metrics of a clip's pixels, or its frames in the space of a CLIP model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_wfm.rewards.statistics import flicker, motion, saturation
from cosmos_rl_wfm.rewards.video import luma, sample_frames

if TYPE_CHECKING:
    from cosmos_rl_wfm.rewards.clip_encoder import ClipEncoder

BINS = 8
"""Bins of the histogram of brightness."""


def pixel_features(videos: Sequence[np.ndarray]) -> np.ndarray:
    """N clips, uint8 [F, H, W, 3] each -> float32 [N, D]: brightness, colour, edges and movement."""
    return np.stack([_metrics(video) for video in videos])


def clip_features(encoder: ClipEncoder, videos: Sequence[np.ndarray], *, num_frames: int) -> np.ndarray:
    """N clips -> float32 [N, E]: the mean over `num_frames` frames of their vectors of length 1."""
    clips = [sample_frames(video, num_frames) for video in videos]
    vectors = encoder.images([frame for clip in clips for frame in clip])
    ends = np.cumsum([len(clip) for clip in clips])[:-1]
    return np.stack([part.mean(axis=0) for part in np.split(vectors, ends)])


def _metrics(video: np.ndarray) -> np.ndarray:
    y = luma(video)
    histogram = np.histogram(y, bins=BINS, range=(0.0, 1.0))[0] / y.size
    edges = [float(np.abs(np.diff(y, axis=axis)).mean()) if y.shape[axis] > 1 else 0.0 for axis in (1, 2)]
    metrics = [
        *video.mean(axis=(0, 1, 2)) / 255,
        float(y.std(axis=(1, 2)).mean()),
        saturation(video),
        *edges,
        motion(video) if len(video) > 1 else 0.0,
        flicker(video) if len(video) > 2 else 0.0,
        *histogram,
    ]
    return np.asarray(metrics, np.float32)
