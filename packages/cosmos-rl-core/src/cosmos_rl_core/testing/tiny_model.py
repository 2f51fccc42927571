"""The network, policy, engine and collation behind `testing.tiny`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import PromptError, UserError
from cosmos_rl_core.parallel.axes.fsdp import shard_fully
from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_core.parallel.offload.swap import Swap
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.testing.tiny_task import TinyModel, wanted
from cosmos_rl_core.train.balance import deal
from cosmos_rl_core.train.policy_base import PolicyBase
from cosmos_rl_core.types import (
    Microbatch,
    PolicyOutputs,
    Prompt,
    Rollout,
    RolloutGroup,
    Sampling,
    Share,
    TermBatch,
    TrainBatch,
)

PLACES = 16
"""Longest rollout: the network has an embedding for each of so many positions."""


class TinyNetwork(nn.Module):
    """(context, place) -> logits over actions."""

    def __init__(self, *, contexts: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.actions = actions
        self.context = nn.Embedding(contexts, hidden)
        self.place = nn.Embedding(PLACES, hidden)
        self.out = nn.Linear(hidden, actions)

    def forward(self, contexts: Tensor, places: Tensor) -> Tensor:
        return self.out(torch.tanh(self.context(contexts) * self.place(places)))


def build_network(model: TinyModel) -> TinyNetwork:
    with forked_rng(seed=model.seed):
        return TinyNetwork(contexts=model.contexts, actions=model.actions, hidden=model.hidden)


class TinyPolicy(PolicyBase[TinyNetwork]):
    """Implements `interfaces.Policy`. inputs: `contexts`, `places`, `actions`, each [T] int64."""

    def __init__(self, model: TinyModel, *, temperature: float, setup: ModelSetup) -> None:
        """Raises UserError for axes of `setup.mesh` other than dp_replicate and dp_shard."""
        network, mesh = build_network(model), setup.mesh
        if mesh is not None:
            if mesh.dims.num_shares != mesh.dims.world_size:
                raise UserError(
                    f"[policy.parallel] {mesh.dims.describe()}: the tiny domain is spread over dp_replicate and "
                    "dp_shard alone"
                )
            parallel, memory, precision = setup.parallel, setup.memory, setup.precision
            shard_fully(network, blocks=(), mesh=mesh, parallel=parallel, memory=memory, precision=precision)
        super().__init__(network)
        self.actions = model.actions
        self._temperature = temperature

    def _outputs(self, microbatch: Microbatch, *, with_entropy: bool) -> PolicyOutputs:
        inputs = microbatch.inputs
        logits = self.module(inputs["contexts"], inputs["places"]) / self._temperature
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None
        return PolicyOutputs(logprobs=logprobs.gather(-1, inputs["actions"][:, None])[:, 0], entropy=entropy)

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self.module.named_parameters())

    def save_config(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"actions": self.actions}) + "\n")


class TinyEngine:
    """Samples on the caller's loop, one term of all samples at a time; `delay_s` a term makes it slow on purpose.

    Not an example to follow: an engine with more to compute has a thread, see `rollout.engine_thread`.
    """

    def __init__(self, model: TinyModel, *, delay_s: float = 0.0) -> None:
        self._network, self._model, self._delay_s = build_network(model), model, delay_s
        self._swap = Swap(self._network.parameters)
        self.version = -1
        self.progress = 0
        self._is_whole = asyncio.Event()
        """Set unless the last switch has failed in the middle."""
        self._is_whole.set()
        self.sleeps = False

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self._network.named_parameters())

    async def sleep(self) -> None:
        self._swap.out()
        self.sleeps = True

    async def wake(self) -> None:
        self._swap.back()
        self.sleeps = False

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Sampling, seed: int
    ) -> tuple[str, list[Rollout]]:
        context = prompt.row["context"]
        if context >= (most := self._model.contexts):
            raise PromptError(f"{prompt.origin}: context {context} is not below [model] contexts = {most}")
        rng = np.random.default_rng(seed)
        terms: list[tuple[np.ndarray, np.ndarray]] = []
        versions: list[int] = []
        for place in range(sampling.max_terms):
            await self._is_whole.wait()
            assert not self.sleeps, "generates while it sleeps"
            terms.append(self._sample(context, place, rng, num_samples, sampling.temperature))
            versions.append(self.version)
            self.progress += 1
            await asyncio.sleep(self._delay_s)
        actions, logprobs = (np.stack(column, axis=1) for column in zip(*terms, strict=True))
        return f"context {context}", [
            rollout_of(*sample, versions, context=context, num_actions=self._model.actions)
            for sample in zip(actions, logprobs, strict=True)
        ]

    async def switch(self, version: int, apply: Callable[[], None]) -> None:
        self._is_whole.clear()
        apply()
        self.version = version
        self._is_whole.set()

    async def close(self) -> None:
        pass

    @torch.no_grad()
    def _sample(
        self, context: int, place: int, rng: np.random.Generator, num_samples: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample one action for each sample: actions [G] int32 and their log-probabilities [G] float32."""
        logits = self._network(torch.tensor([context]), torch.tensor([place]))[0]
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1).numpy()
        if temperature == 0.0:
            actions = np.full(num_samples, logprobs.argmax())
        else:
            cumulative = np.exp(logprobs.astype(np.float64)).cumsum()
            actions = np.minimum(np.searchsorted(cumulative, rng.random(num_samples)), len(logprobs) - 1)
        return actions.astype(np.int32), logprobs[actions].astype(np.float32)


def rollout_of(
    actions: np.ndarray, logprobs: np.ndarray, versions: Sequence[int], *, context: int, num_actions: int
) -> Rollout:
    """Return a rollout of `actions` [T] with their log-probabilities [T] and versions [T]."""
    return Rollout(
        arrays={
            "actions": actions,
            "context": np.array(context, np.int32),
            "num_actions": np.array(num_actions, np.int32),
        },
        rollout_logprobs=logprobs,
        versions=np.array(versions, np.int32),
        loss_mask=np.ones(len(actions), np.bool_),
        text=" ".join(map(str, actions)),
    )


EMPTY = Rollout(
    arrays={"actions": np.zeros(1, np.int32), "context": np.array(0, np.int32)},
    rollout_logprobs=np.zeros(1, np.float32),
    versions=np.zeros(1, np.int32),
    loss_mask=np.zeros(1, np.bool_),
)
"""Trains nothing: for a rank that has no more rollouts while others do."""


def collate(groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    dealt = deal([r.num_terms for r in rollouts], capacity=microbatch_terms, share=share)
    return TrainBatch(
        microbatches=tuple(_microbatch([rollouts[index] for index in members] or [EMPTY]) for members in dealt),
        num_terms=sum(int(r.loss_mask.sum()) for r in rollouts),
        num_rollouts=sum(bool(r.loss_mask.any()) for r in rollouts),
    )


def _microbatch(rollouts: Sequence[Rollout]) -> Microbatch:
    lengths = torch.tensor([r.num_terms for r in rollouts])
    terms = TermBatch(
        rollout_logprobs=torch.from_numpy(np.concatenate([r.rollout_logprobs for r in rollouts])),
        advantages=torch.tensor([r.advantage for r in rollouts], dtype=torch.float32).repeat_interleave(lengths),
        loss_mask=torch.from_numpy(np.concatenate([r.loss_mask for r in rollouts]).astype(np.float32)),
        rollout_index=torch.arange(len(rollouts)).repeat_interleave(lengths),
        num_rollouts=len(rollouts),
    )
    inputs = {
        "contexts": torch.tensor([int(r.arrays["context"]) for r in rollouts]).repeat_interleave(lengths),
        "places": torch.cat([torch.arange(int(n)) for n in lengths]),
        "actions": torch.from_numpy(np.concatenate([r.arrays["actions"] for r in rollouts]).astype(np.int64)),
    }
    return Microbatch(inputs=inputs, terms=terms)


def collate_answers(
    rows: Sequence[Mapping[str, Any]], *, actions: int, length: int, microbatch_terms: int, share: Share
) -> TrainBatch:
    """Rows -> a batch with the rewarded actions as targets."""
    groups = []
    for row in rows:
        answer = np.array([wanted(row["context"], place, actions=actions) for place in range(length)], np.int32)
        zeros = np.zeros(length, np.float32)
        rollout = rollout_of(answer, zeros, [0] * length, context=row["context"], num_actions=actions)
        groups.append(RolloutGroup(prompt=Prompt(sample_id=0, row=row), rollouts=(rollout,)))
    return collate(groups, microbatch_terms=microbatch_terms, share=share)
