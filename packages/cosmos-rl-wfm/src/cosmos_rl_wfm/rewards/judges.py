"""Rewards of a model that compares frames with text: CLIP score and VLM judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, PrivateAttr, field_validator

from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.rewards.pretrained import Exclusive, Pretrained
from cosmos_rl_wfm.rewards.video import group_videos, row_text, sample_frames

if TYPE_CHECKING:
    from cosmos_rl_wfm.rewards.models import ClipEncoder, JudgeModel


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
        from cosmos_rl_wfm.rewards.models import ClipEncoder  # torch and transformers, with the first group

        return ClipEncoder(self)


QUESTION = 'These are frames of one video. Does it show "{caption}"? Answer with yes or no.'


class VlmJudgeReward(Pretrained):
    """Expected value of the answer: sum of p(answer) value(answer) / sum of p(answer), over the first token.

    No text is parsed: p is the model's distribution over its next token. With answers 1 to 5 it is a rating as
    G-Eval's (Liu et al. 2023, arXiv 2303.16634), with yes = 1 and no = 0 the probability of yes as VQAScore's (Lin et
    al. 2024, arXiv 2404.01291).
    """

    question: str = QUESTION
    """Question after the frames; {caption} is the text of the column."""
    answers: dict[str, float] = Field(default={"yes": 1.0, "no": 0.0})
    """Value of each answer; {"1" = 1, "2" = 2, ...} for a rating. Capitals and a blank before it do not matter."""
    column: str = "caption"
    """Column of the row that replaces {caption}."""
    min_mass: float = Field(default=0.1, ge=0, le=1)
    """Minimum total probability of the answers; below it the model answers something else, an error of the sample."""
    batch_size: int = Field(default=4, ge=1)
    """Maximum number of clips in one pass."""
    _judge: Exclusive[JudgeModel] = PrivateAttr()

    @field_validator("answers")
    @classmethod
    def _differ(cls, answers: dict[str, float]) -> dict[str, float]:
        if len({answer.strip().lower() for answer in answers} - {""}) < max(2, len(answers)):
            raise ValueError("must name two or more different answers")
        if len(set(answers.values())) < 2:
            raise ValueError("must give the answers values that are not all the same")
        return answers

    def model_post_init(self, context: Any, /) -> None:
        self._judge = Exclusive(self._load)

    def __call__(self, group: RolloutGroup) -> list[float]:
        question = self.question
        if "{caption}" in question:
            question = question.replace("{caption}", row_text(group, self.column))
        clips = [sample_frames(video, self.num_frames) for video in group_videos(group)]
        with self._judge.use() as judge:
            answered = judge.probabilities(clips, question)
        return [self._expected(probabilities, index) for index, probabilities in enumerate(answered)]

    def _expected(self, probabilities: Mapping[str, float], index: int) -> float:
        mass = sum(probabilities.values())
        if mass <= 0 or mass < self.min_mass:
            answers = ", ".join(self.answers)
            raise ValueError(
                f"for rollout {index} the judge gives the answers {answers} a total probability of {mass:.2g}, less "
                f"than min_mass = {self.min_mass:g}: change the question so that it answers with one of these words"
            )
        return sum(probability * self.answers[answer] for answer, probability in probabilities.items()) / mass

    def _load(self) -> JudgeModel:
        from cosmos_rl_wfm.rewards.models import JudgeModel  # torch and transformers, with the first group

        return JudgeModel(self, answers=tuple(self.answers))
