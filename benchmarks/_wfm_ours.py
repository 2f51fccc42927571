"""Our side of wfm_step.py: engine, rollouter, batcher and learner as a recipe builds them, in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import _wfm_work as w
import torch
from _wfm_work import Model, TextName, Work

from cosmos_rl_core import assemble
from cosmos_rl_core.algorithms.advantages import build_step_advantages
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.recipe.load import load_config, load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.train.batcher import Batcher
from cosmos_rl_core.train.learner import FrozenModels, PolicyLearner
from cosmos_rl_core.types import Prompt, RolloutGroup, Share


def recipe(model: Model, folder: Path, *, text: TextName, work: Work) -> dict[str, Any]:
    """The recipe of a training step."""
    return {
        "run": {"domain": "wfm", "max_steps": 1000},
        "model": model.section(folder, text),
        "data": model.data,
        "algorithm": {"name": "flow_grpo", "kl_coef": w.KL_COEF},  # the rest by its row of the table
        "policy": {
            "prompts_per_step": work.num_prompts,
            "microbatch_terms": work.terms,
            "max_grad_norm": w.MAX_GRAD_NORM,
            "optimizer": {"learning_rate": w.LEARNING_RATE},
        },
        "rollout": {
            "group_size": work.group_size,
            "sampling": {
                "num_steps": work.num_steps,
                "noise_level": w.NOISE_LEVEL,
                "window": "fixed",
                "steps": work.trained,
            },
            "options": {"samples_at_once": work.terms},
        },
        "reward": {"functions": [{"name": "brightness"}]},
    }


class OurLoop:
    """The framework's parts; rollouts and training take turns, so that one thread's work is compared."""

    def __init__(self, config: RunConfig) -> None:
        domain = load_domain("wfm")
        self.engine = assemble.build_engine(config, domain)
        self.rollouter = assemble.build_rollouter(config, domain, self.engine)
        self.trainer = assemble.build_trainer(config, domain)
        self.batcher = Batcher(
            assemble.build_collate(config, domain, Share()),
            max_staleness=0,
            advantages=build_step_advantages(config.algorithm),
        )
        self._compute = ThreadPoolExecutor(max_workers=1)
        self.learner = PolicyLearner(
            self.trainer,
            publisher=None,
            frozen=FrozenModels(reference=assemble.build_reference(config, domain, self.trainer)),
            compute=self._compute,
            timeline=Timeline("benchmark"),
            max_skipped_steps=0,
        )

    @classmethod
    async def make(cls, given: Mapping[str, Any]) -> Self:
        """Build the parts of a recipe, with the first weights in the engine."""
        loop = cls(load_config(given))
        await loop._compute_on(1)
        await loop.send()
        return loop

    async def step(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Roll out, train, update, and hand the weights to the engine; return seconds."""
        started = time.perf_counter()
        groups = await self.draw(prompts)
        drawn = time.perf_counter()
        await self.learner.forward_backward(self.batcher(groups, step=self.trainer.version))
        await self.learner.optim_step()
        await self.send()
        ended = time.perf_counter()
        return {"rollout_s": drawn - started, "train_s": ended - drawn, "step_s": ended - started}

    async def draw(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Scored groups, all in work together as in a rollout replica."""
        return await asyncio.gather(*(self.rollouter.run(prompt) for prompt in prompts))

    async def send(self) -> None:
        """Copy the weights into the engine."""
        trained = self.trainer.policy.rollout_weights()

        def copy() -> None:
            with torch.no_grad():
                for name, tensor in self.engine.weights().items():
                    tensor.copy_(trained[name])

        await self.engine.switch(self.trainer.version, copy)

    async def close(self) -> None:
        await self.engine.close()
        self._compute.shutdown()

    async def _compute_on(self, threads: int) -> None:
        """Threads of torch are counted per thread that asks."""
        await asyncio.get_running_loop().run_in_executor(self._compute, torch.set_num_threads, threads)
