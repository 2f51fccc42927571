"""A complete domain: a contextual bandit over short sequences that learns in seconds on a CPU.

A prompt is a number c; a rollout is a sequence of actions sampled one after another from a small network of c and the
position (`place`); the reward is the fraction of actions equal to (c + place) mod `actions`. It exists so that the
controller, the loop, the placements and every algorithm can be tested without a model library; a recipe names it
`domain = "cosmos_rl_core.testing.tiny:TINY"`. Settings and rewards are in `tiny_task`; network, policy,
engine and collation in `tiny_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.interfaces import Policy, RewardFn, RolloutEngine
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.sections import SamplingSection
from cosmos_rl_core.reward.specimen import text_specimen
from cosmos_rl_core.testing.tiny_task import TinyData, TinyModel, hits, not_a_number, too_few, words
from cosmos_rl_core.types import Prompt, RolloutGroup, Sampling, Share, TrainBatch


class Tiny(DomainBase):
    """The domain. Torch is imported when a model is built."""

    name = "tiny"
    Model, Data, Sampling = TinyModel, TinyData, SamplingSection
    engines = ("tiny", "torch")

    def load_rows(self, data: TinyData) -> tuple[Sequence[Mapping[str, Any]], str]:
        return [{"context": data.start + i} for i in range(data.rows)], "tiny"

    def build_policy(
        self, model: TinyModel, *, data: TinyData, sampling: Sampling | None, seed: int, setup: ModelSetup
    ) -> Policy:
        from cosmos_rl_core.testing.tiny_model import TinyPolicy

        return TinyPolicy(model, temperature=sampling.temperature if sampling else 1.0, setup=setup)

    def build_engine(self, model: TinyModel, *, data: TinyData, name: str, options: Mapping[str, Any]) -> RolloutEngine:
        from cosmos_rl_core.testing.tiny_model import TinyEngine

        return TinyEngine(model, delay_s=float(options.get("delay_s", 0.0)))

    def sleeping_engine(self, name: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return options

    def reward_table(self) -> Mapping[str, Callable[..., RewardFn]]:
        return {
            "hits": lambda: hits,
            "nan": lambda: not_a_number,
            "text": lambda: words,
            "short": lambda: too_few,
        }

    def specimen(self, config: RunConfig, row: Mapping[str, Any], *, origin: str) -> RolloutGroup:
        arrays = {
            "actions": np.array([0, 1], np.int32),
            "context": np.array(row["context"], np.int32),
            "num_actions": np.array(config.model.actions, np.int32),
        }
        texts = ["0 1"] * config.rollout.group_size
        return text_specimen(row, texts=texts, origin=origin, arrays=arrays, num_terms=2)

    def collate(self, groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
        from cosmos_rl_core.testing.tiny_model import collate

        return collate(groups, microbatch_terms=microbatch_terms, share=share)

    def collate_sft(
        self, prompts: Sequence[Prompt], *, data: Any, policy: Any, microbatch_terms: int, share: Share
    ) -> TrainBatch:
        from cosmos_rl_core.testing.tiny_model import collate_answers

        rows = [prompt.row for prompt in prompts]
        return collate_answers(rows, actions=policy.actions, length=3, microbatch_terms=microbatch_terms, share=share)


TINY = Tiny()
