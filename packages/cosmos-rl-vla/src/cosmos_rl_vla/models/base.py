"""Action models: act at an observation, and recompute the log-probability of that action.

    Inputs -- act(randomness) --> Acted: actions, log-probs, values, replay  in the rollout, without gradient
    Inputs, replay -- evaluate --> Evaluated: log-probs, values, entropy     in training, with gradient
    Inputs, actions -- supervised --> loss                                   on demonstrations

Letters: B observations, H executed actions per decision, D dimensions of an action; L instruction tokens, V values.
A *decision* is one forward pass of the policy at one observation. Log-probabilities are always dense, [B, H, D]; the
loss sums them into terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cosmos_rl_vla.actions import ActionStats

Replay = Mapping[str, Tensor]
"""Sampled values from which `evaluate` recomputes log-probabilities, every tensor [B, ...]: token ids, or flow states
with their denoising steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Observations as model inputs."""

    images: Tensor
    """uint8 [B, cameras, height, width, 3]: as the simulator rendered them; the model resizes."""
    state: Tensor
    """[B, n] float32: proprioception, normalised by the model's statistics to about [-1, 1]."""
    tokens: Tensor
    """[B, L] int64: the instruction."""
    token_mask: Tensor
    """[B, L] bool: False for padding."""

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> Inputs:
        """Return the same on another device."""
        return Inputs(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def select(self, index: Tensor) -> Inputs:
        """Return the observations `index` [N] int64."""
        return Inputs(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Randomness:
    """Seeds of each sample's noise: an episode samples the same values in any batch."""

    seeds: Sequence[int]
    """[B]: one per episode, or per demonstrated sample."""
    places: Sequence[int]
    """[B]: index of the decision in its episode; 0 where there is only one."""
    version: int = 0
    """Version of the weights, for noise schedules."""

    def generators(self) -> list[np.random.Generator]:
        """Return one counter-based generator (Philox) per sample, at the start of its stream."""
        streams = zip(self.seeds, self.places, strict=True)
        return [
            np.random.Generator(np.random.Philox(key=seed & _WORD, counter=(0, 0, place & _WORD, 0)))
            for seed, place in streams
        ]


_WORD = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Acted:
    """Actions of a policy at B observations."""

    actions: Tensor
    """[B, H, D] float32, normalised to about [-1, 1]; `ActionStats` converts them to the simulator's units."""
    logprobs: Tensor
    """[B, H, D] float32 under the sampling distribution; 0 if greedy."""
    values: Tensor
    """[B, V] float32: the critic's; V = 0 without a critic."""
    replay: Replay
    """Empty if greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredActions:
    """The sampled actions under the current weights, with gradient."""

    logprobs: Tensor
    """[B, H, D] float32."""
    values: Tensor
    """[B, V] float32."""
    entropy: Tensor | None = None
    """[B, H, D] float32; None if not requested, or independent of the weights."""
    whitened: Tensor | None = None
    """[B, H, D] float32: mean / std of a single Gaussian whose std is independent of the weights, so that half the
    squared distance of two of them is their KL divergence. None for other distributions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedLosses:
    """Losses on demonstrations."""

    loss: Tensor
    """[B] float32: flow matching or cross-entropy, the mean over unmasked components; 0 without any."""
    aux: Tensor | None = None
    """[B] float32: squared error of the auxiliary targets; None without any."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A parameter whose value is a tensor of a file, or a part of it."""

    name: str
    part: int = 0
    """Index among `parts`."""
    parts: int = 1
    """Number of equal pieces of the tensor along its first dimension."""


class WeightNames:
    """Mapping between weight names in public checkpoints and the module's: the identity, for a family without any."""

    def public_name(self, name: str) -> str:
        """Return the name of a parameter in a public checkpoint."""
        return name

    def owners(self, name: str) -> tuple[Owner, ...]:
        """Return the parameters whose values a tensor of a public checkpoint holds; none for an unused tensor.

        Raises KeyError for an unknown name.
        """
        return (Owner(name),)


class ActionModel(nn.Module, ABC):
    """A policy's network; its critic's parameters have the prefix "value_head.".

    acted = model.act(inputs, randomness=..., greedy=False)       no gradient
    evaluated = model.evaluate(inputs, acted.replay)              == acted.logprobs and acted.values, before any step
    losses = model.supervised(inputs, actions, mask, randomness=...)
    """

    horizon: int
    """H: actions executed per decision."""
    model_horizon: int
    """Actions that the network predicts per decision, >= H: the length of a demonstrated chunk."""
    action_dim: int
    """D: dimensions of an action."""
    value_dim: int
    """V: 1 for a value per chunk, H for a value per action, 0 without a critic."""
    aux_dim: int = 0
    """Dimensions of the auxiliary target of supervised training."""
    state_dim: int = 0
    """Maximum length of the proprioceptive state; 0: no state is read, or its length is not limited."""
    sees: bool = True
    """Whether it takes images."""
    is_choice: bool = False
    """Whether an action is one of several, with one log-probability for all of its components."""
    names: WeightNames
    """Names of its weights in public checkpoints."""
    hint: str = ""
    """Remedy where weights and config.json do not belong together."""

    def init_heads(self) -> None:
        """Recreate the heads that public checkpoints lack, with random initial values."""

    def blocks(self) -> list[nn.Module]:
        """Return the layers in the order they run, each a unit of sharding, checkpointing and compilation."""
        return []

    def root_blocks(self) -> list[nn.Module]:
        """Return those whose inner tensors are also read from outside: they are sharded with the root module."""
        return []

    def exact(self) -> list[list[nn.Module]]:
        """Return the modules that stay in float32 if the rest computes in bfloat16, in groups that run together."""
        return []

    @abstractmethod
    def write_config(self, directory: Path, stats: ActionStats) -> None:
        """Write config.json."""

    @abstractmethod
    def act(self, inputs: Inputs, *, randomness: Randomness, greedy: bool = False) -> Acted:
        """Sample a chunk of actions per observation, without gradient."""

    def act_after(self, inputs: Inputs, *, randomness: Randomness, previous: Tensor, weights: Tensor) -> Tensor:
        """Return greedy chunks [B, H, D] that continue those before, in overlap `previous` [B, H, D]; see `realtime`.

        weights: [B, H], of the actions of `previous`. By default a weighted mean of both chunks.
        """
        actions = self.act(inputs, randomness=randomness, greedy=True).actions
        return weights[..., None] * previous + (1 - weights[..., None]) * actions

    @abstractmethod
    def evaluate(self, inputs: Inputs, replay: Replay, *, with_entropy: bool = False) -> ScoredActions:
        """Return log-probabilities, values and entropy of the actions that `act` sampled."""

    @abstractmethod
    def supervised(
        self, inputs: Inputs, actions: Tensor, mask: Tensor, *, randomness: Randomness, aux: Tensor | None = None
    ) -> SupervisedLosses:
        """Return the losses of demonstrated chunks.

        actions: [B, model_horizon, D] float32, normalised. mask: [B, model_horizon] bool, demonstrated actions: none
        for a sample with auxiliary targets alone.
        aux: [B, n] float32 targets to predict from the observation, such as objects' positions; NaN where missing.
        """


def masked_mean(errors: Tensor, mask: Tensor) -> Tensor:
    """Return the mean [B] of the errors [B, N] that `mask` bool selects; 0 without any."""
    return torch.where(mask, errors, 0).sum(1) / mask.sum(1).clamp(min=1)
