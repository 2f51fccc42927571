"""Fits the head of the aesthetic reward to clips with scores.

rows -- features [N, D] -- held-out part set aside --> AdamW over the rest, all rows per step --> head, its errors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.rewards.aesthetic import AestheticHead, clip_describe, pixel_features
from cosmos_rl_wfm.rewards.pretrained import Pretrained


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A head and its errors."""

    head: AestheticHead
    train_error: float
    """Root of the mean squared error over the rows it was fitted to, in points of the score."""
    held_out_error: float
    """The same over the held-out rows."""
    constant_error: float
    """Baseline on the held-out rows: the error of predicting the mean score of the fitted rows."""


def train_aesthetic(
    rows: Iterable[Mapping[str, Any]],
    *,
    clip: Pretrained | None = None,
    hidden: Sequence[int] = (),
    held_out: float = 0.2,
    steps: int = 500,
    learning_rate: float = 0.02,
    weight_decay: float = 0.01,
    seed: int = 0,
) -> Trained:
    """Fit a head to rows of `video` (uint8 [F, H, W, 3]) and `score` (0 to 10), by the squared error of the score.

    With `clip`, its features are the model's vectors of `clip.num_frames` frames; else metrics of the pixels. `hidden`
    are the widths of layers between; none makes it linear.

    Raises:
        UserError: a score outside [0, 10], or too few rows for a fitted and a held-out part.
    """
    videos, scores = _checked(rows)
    order = np.random.default_rng(seed).permutation(len(videos))
    num_held = max(1, round(held_out * len(videos)))
    validation, used = order[:num_held], order[num_held:]
    if len(used) < 2:
        raise UserError(f"{len(videos)} rows are too few: at least 2 to fit and 1 held out are needed")
    describe = pixel_features if clip is None else clip_describe(clip, num_frames=clip.num_frames)
    x = describe(videos)
    mean, scale = x[used].mean(axis=0), np.maximum(x[used].std(axis=0), 1e-3)
    network = _network([x.shape[1], *hidden, 1], seed=seed)
    inputs = torch.from_numpy((x - mean) / scale).float()
    _fit(network, inputs[used], torch.from_numpy(scores[used]), steps, learning_rate, weight_decay)
    head = AestheticHead(
        features="statistics" if clip is None else "clip",
        model="" if clip is None else clip.model,
        num_frames=1 if clip is None else clip.num_frames,
        mean=mean,
        scale=scale,
        layers=tuple((m.weight.detach().numpy(), m.bias.detach().numpy()) for m in network if isinstance(m, nn.Linear)),
    )
    error = head.score(x) - scores
    return Trained(
        head=head,
        train_error=_rms(error[used]),
        held_out_error=_rms(error[validation]),
        constant_error=_rms(scores[validation] - scores[used].mean()),
    )


def _checked(rows: Iterable[Mapping[str, Any]]) -> tuple[list[np.ndarray], np.ndarray]:
    videos: list[np.ndarray] = []
    scores: list[float] = []
    for number, row in enumerate(rows):
        score = row.get("score")
        if not isinstance(score, int | float) or not 0 <= score <= 10:
            raise UserError(f"row {number} has score {score!r}; it must be a number from 0 to 10")
        video = row.get("video")
        if not isinstance(video, np.ndarray) or video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3:
            raise UserError(f"row {number} has no video, uint8 [F, H, W, 3]")
        videos.append(video)
        scores.append(float(score))
    return videos, np.asarray(scores, np.float32)


def _network(widths: Sequence[int], *, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    parts = [part for layer in layers for part in (layer, nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def _fit(
    network: nn.Module, inputs: Tensor, scores: Tensor, steps: int, learning_rate: float, weight_decay: float
) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (10 * torch.sigmoid(network(inputs)[:, 0]) - scores).square().mean()
        loss.backward()
        optimizer.step()


def _rms(error: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(error, dtype=np.float64))))
