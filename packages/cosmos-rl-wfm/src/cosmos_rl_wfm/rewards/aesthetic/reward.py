"""Aesthetic quality of a clip, by a small classifier fitted to human scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, PrivateAttr, field_validator

from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.rewards.aesthetic.features import clip_features, pixel_features
from cosmos_rl_wfm.rewards.aesthetic.head import Head, load_head
from cosmos_rl_wfm.rewards.exclusive import Exclusive
from cosmos_rl_wfm.rewards.pretrained import Pretrained
from cosmos_rl_wfm.rewards.video import group_videos

Describe = Callable[[Sequence[np.ndarray]], np.ndarray]
"""N clips, uint8 [F, H, W, 3] each -> float32 [N, D]."""


class AestheticReward(Strict):
    """Score of a head over metrics of the pixels or CLIP vectors, in [0, 10]."""

    head: str
    """Safetensors file made by `cosmos_rl_wfm.train_aesthetic`; it names its features and CLIP model."""
    device: str = "auto"
    """Device of the CLIP model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the CLIP model."""
    batch_size: int = Field(default=32, ge=1)
    """Maximum frames in one pass of the CLIP model."""
    _loaded: Exclusive[tuple[Head, Describe]] = PrivateAttr()

    @field_validator("head")
    @classmethod
    def _is_there(cls, head: str) -> str:
        if not Path(head).expanduser().is_file():
            raise ValueError("there is no such file")
        return head

    def model_post_init(self, context: Any, /) -> None:
        self._loaded = Exclusive(self._load)

    def __call__(self, group: RolloutGroup) -> list[float]:
        videos = group_videos(group)
        with self._loaded.use() as (head, describe):
            return head.score(describe(videos)).tolist()

    def _load(self) -> tuple[Head, Describe]:
        head = load_head(Path(self.head).expanduser())
        if head.features == "statistics":
            return head, pixel_features
        options = Pretrained(model=head.model, device=self.device, dtype=self.dtype, batch_size=self.batch_size)
        return head, clip_describe(options, num_frames=head.num_frames)


def clip_describe(options: Pretrained, *, num_frames: int) -> Describe:
    """Load a CLIP model and return the function from clips to its vectors."""
    from cosmos_rl_wfm.rewards.clip_encoder import ClipEncoder  # torch and transformers

    encoder = ClipEncoder(options)
    return lambda videos: clip_features(encoder, videos, num_frames=num_frames)
