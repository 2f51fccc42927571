"""A whole domain: a contextual bandit over short sequences that learns in seconds on a CPU.

A prompt is a number c; a rollout is `length` actions drawn one after another from a small network that sees c and the
place; the reward is the fraction of actions equal to (c + place) mod `actions`. It exists so that the controller, the
loop, the placements and every algorithm can be tested without a model library; a recipe names it
`domain = "cosmos_rl_core.testing.tiny:TINY"`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_core.errors import PromptError
from cosmos_rl_core.interfaces import Policy, RewardFn, RolloutEngine
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.sections import SamplingSection
from cosmos_rl_core.testing.tiny_task import TinyData, TinyModel, hits, not_a_number, too_few, words
from cosmos_rl_core.types import Prompt, RolloutGroup, Sampling, Share, TrainBatch


class Tiny:
    """The domain. Torch is imported when a model is built."""

    name = "tiny"
    Model = TinyModel
    Data = TinyData
    Sampling = SamplingSection
    rewards = ("hits", "nan", "short", "text")
    engines = ("tiny", "torch")

    def load_rows(self, data: TinyData) -> tuple[Sequence[Mapping[str, Any]], str]:
        return [{"context": data.start + i} for i in range(data.rows)], "tiny"

    def build_policy(
        self, model: TinyModel, *, data: TinyData, sampling: Sampling | None, seed: int, setup: ModelSetup
    ) -> Policy:
        from cosmos_rl_core.testing.tiny_model import TinyPolicy

        return TinyPolicy(model, temperature=sampling.temperature if sampling else 1.0, setup=setup)

    def build_engine(self, model: TinyModel, *, data: TinyData, name: str, options: Mapping[str, Any]) -> RolloutEngine:
        from cosmos_rl_core.testing.tiny_model import build_network

        return TinyEngine(build_network(model), contexts=model.contexts, delay_s=float(options.get("delay_s", 0.0)))

    def weight_specs(self, model: TinyModel) -> None:
        return None

    def model_shape(self, model: TinyModel, *, data: TinyData, sampling: Any) -> None:
        return None

    def recorder(self, directory: Path, *, name: str, groups: int, every: int) -> None:
        """None: rollouts are text."""

    def reward(self, name: str) -> Callable[..., RewardFn] | None:
        return {
            "hits": lambda: hits,
            "nan": lambda: not_a_number,
            "text": lambda: words,
            "short": lambda: too_few,
        }.get(name)

    def collate(self, groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
        from cosmos_rl_core.testing.tiny_model import collate

        return collate(groups, microbatch_terms=microbatch_terms, share=share)

    def collate_sft(
        self, prompts: Sequence[Prompt], *, data: Any, policy: Any, microbatch_terms: int, share: Share
    ) -> TrainBatch:
        from cosmos_rl_core.testing.tiny_model import collate_answers

        rows = [prompt.row for prompt in prompts]
        return collate_answers(rows, actions=policy.actions, length=3, microbatch_terms=microbatch_terms, share=share)

    def export_weights(
        self, model: TinyModel, tensors: Iterable[tuple[str, Any]], *, merge_adapters: bool
    ) -> Iterable[tuple[str, Any]]:
        return tensors


TINY = Tiny()


class TinyEngine:
    """Draws on the caller's loop, one term of all samples at a time; `delay_s` a term makes it slow on purpose."""

    def __init__(self, network: Any, *, contexts: int, delay_s: float = 0.0) -> None:
        self._network = network
        self._contexts = contexts
        self._delay_s = delay_s
        self._version = -1
        self._steps = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def progress(self) -> int:
        return self._steps

    def weights(self) -> Mapping[str, Any]:
        return dict(self._network.named_parameters())

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Sampling, seed: int
    ) -> tuple[str, list[Any]]:
        from cosmos_rl_core.testing.tiny_model import draw_place, rollouts_of

        context = prompt.row["context"]
        if context >= self._contexts:
            raise PromptError(f"{prompt.origin}: context {context} is not below [model] contexts = {self._contexts}")
        rng = np.random.default_rng(seed)
        actions, logprobs, versions = [], [], []
        for place in range(sampling.max_terms):
            drawn, logp = draw_place(
                self._network, context, place, rng, num_samples=num_samples, temperature=sampling.temperature
            )
            actions.append(drawn)
            logprobs.append(logp)
            versions.append(self._version)
            self._steps += 1
            await asyncio.sleep(self._delay_s)
        rollouts = rollouts_of(actions, logprobs, versions, context=context, num_actions=self._network.actions)
        return f"context {context}", rollouts

    async def switch(self, version: int, apply: Callable[[], None]) -> None:
        apply()
        self._version = version

    async def close(self) -> None:
        pass
