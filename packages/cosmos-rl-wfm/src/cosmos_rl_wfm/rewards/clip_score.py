"""Similarity of a clip's frames to a text, by a CLIP or SigLIP model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import PrivateAttr, field_validator

from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.rewards.exclusive import Exclusive
from cosmos_rl_wfm.rewards.pretrained import Pretrained
from cosmos_rl_wfm.rewards.video import group_videos, row_text, sample_frames

if TYPE_CHECKING:
    from cosmos_rl_wfm.rewards.clip_encoder import ClipEncoder


class ClipScoreReward(Pretrained):
    """Cosine between text and frame in the space of a CLIP or SigLIP model, mean over frames: in [-1, 1].

    CLIPScore (Hessel et al. 2021, arXiv 2104.08718) is 2.5 times this, cut at 0; PickScore is a CLIP model too, and its
    score is this times the model's logit scale.
    """

    column: str = "caption"
    """Column of the row with the text."""
    template: str = "{caption}"
    """Text that is compared with the frames; {caption} is the text of the column."""
    _encoder: Exclusive[ClipEncoder] = PrivateAttr()

    @field_validator("template")
    @classmethod
    def _has_caption(cls, template: str) -> str:
        if "{caption}" not in template:
            raise ValueError("must contain {caption}")
        return template

    def model_post_init(self, context: Any, /) -> None:
        self._encoder = Exclusive(self._load)

    def __call__(self, group: RolloutGroup) -> list[float]:
        text = self.template.replace("{caption}", row_text(group, self.column))
        clips = [sample_frames(video, self.num_frames) for video in group_videos(group)]
        with self._encoder.use() as encoder:
            frames = encoder.images([frame for clip in clips for frame in clip])  # [sum of N, E]
            cosines = frames @ encoder.texts([text])[0]
        ends = np.cumsum([len(clip) for clip in clips])[:-1]
        return [float(part.mean()) for part in np.split(cosines, ends)]

    def _load(self) -> ClipEncoder:
        from cosmos_rl_wfm.rewards.clip_encoder import ClipEncoder  # torch and transformers, with the first group

        return ClipEncoder(self)
