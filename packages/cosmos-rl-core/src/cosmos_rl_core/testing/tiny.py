"""A complete domain: a contextual bandit over short sequences that learns in seconds on a CPU.

A prompt is a number c; a rollout is a sequence of actions sampled one after another from a small network of c and the
position (`place`); the reward is the fraction of actions equal to (c + place) mod `actions`. It exists so that the
controller, the loop, the placements and every algorithm can be tested without a model library; a recipe names it
`domain = "cosmos_rl_core.testing.tiny:TINY"`. Network, policy, engine and collation are in `tiny_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.interfaces import Policy, RewardFn, RolloutEngine
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.sections import SamplingSection
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import Prompt, RolloutGroup, Sampling, Share, TrainBatch


class TinyModel(Strict):
    """[model]"""

    actions: int = Field(default=5, ge=2)
    """V: actions to choose from."""
    contexts: int = Field(default=10, ge=1)
    """Different prompts."""
    hidden: int = Field(default=16, ge=1)
    seed: int = 0
    """Of the initial weights."""


class TinyData(Strict):
    """[data]"""

    rows: int = Field(default=10, ge=0)
    start: int = 0


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

    def reward_table(self) -> Mapping[str, Callable[..., RewardFn]]:
        return {
            "hits": lambda: hits,
            "nan": lambda: not_a_number,
            "text": lambda: words,
            "short": lambda: too_few,
        }

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


def wanted(context: int, place: int, *, actions: int) -> int:
    """The action that is rewarded."""
    return (context + place) % actions


def hits(group: RolloutGroup) -> list[float]:
    """Fraction of actions that are the wanted ones."""
    context = group.prompt.row["context"]
    fractions = []
    for rollout in group.rollouts:
        actions, num_actions = rollout.arrays["actions"], int(rollout.arrays["num_actions"])
        right = [action == wanted(context, place, actions=num_actions) for place, action in enumerate(actions)]
        fractions.append(float(np.mean(right)))
    return fractions


def not_a_number(group: RolloutGroup) -> list[float]:
    return [float("nan")] * len(group.rollouts)


def words(group: RolloutGroup) -> Any:
    return ["good"] * len(group.rollouts)


def too_few(group: RolloutGroup) -> list[float]:
    return [1.0] * (len(group.rollouts) - 1)
