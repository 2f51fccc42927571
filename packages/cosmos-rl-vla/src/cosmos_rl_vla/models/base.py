"""What a family of action models has to offer: act at an observation, and say again how likely that was.

    Inputs -- act(draw) --> Acted: actions, log-probs, values, replay        in the rollout, without gradient
    Inputs, replay -- evaluate --> Evaluated: log-probs, values, entropy     in training, with gradient
    Inputs, actions -- supervised --> loss                                   on demonstrations

Letters: B observations, H actions executed a decision, D dimensions of an action; L instruction tokens, V values.
A *decision* is one pass of the policy at one observation. Log-probabilities are always dense, [B, H, D]; the loss
sums them into terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Replay = Mapping[str, Tensor]
"""What `evaluate` needs beside the observation to find the same draw again, every tensor [B, ...]: token ids, or flow
states and the denoising steps they belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Observations as a model reads them."""

    images: Tensor
    """uint8 [B, cameras, height, width, 3]: as the simulator drew them; the model resizes."""
    state: Tensor
    """[B, n] float32: proprioception, normalised by the model's statistics to about [-1, 1]."""
    tokens: Tensor
    """[B, L] int64: the instruction."""
    token_mask: Tensor
    """[B, L] bool: tokens that are there."""

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> Inputs:
        """Return the same on another device."""
        return Inputs(
            images=self.images.to(device),
            state=self.state.to(device),
            tokens=self.tokens.to(device),
            token_mask=self.token_mask.to(device),
        )

    def select(self, index: Tensor) -> Inputs:
        """Return the observations `index` [N] int64."""
        return Inputs(
            images=self.images[index],
            state=self.state[index],
            tokens=self.tokens[index],
            token_mask=self.token_mask[index],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Where the randomness of each sample comes from: batching changes nothing of what an episode draws."""

    seeds: Sequence[int]
    """[B]: one of each episode, or of each demonstrated sample."""
    places: Sequence[int]
    """[B]: which decision of its episode; 0 where there is only one."""
    version: int = 0
    """Of the weights: noise may become less from one to the next."""

    def generators(self) -> list[np.random.Generator]:
        """Return one counter-based generator (Philox) a sample, at the start of its stream."""
        streams = zip(self.seeds, self.places, strict=True)
        return [
            np.random.Generator(np.random.Philox(key=seed & _WORD, counter=(0, 0, place & _WORD, 0)))
            for seed, place in streams
        ]


_WORD = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Acted:
    """What a policy does at B observations."""

    actions: Tensor
    """[B, H, D] float32, normalised to [-1, 1] (it may lie somewhat outside): `ActionStats` leads to the simulator's
    units."""
    logprobs: Tensor
    """[B, H, D] float32 under the distribution that was drawn from; 0 where the policy was greedy."""
    values: Tensor
    """[B, V] float32: the critic's; V = 0 for a model that has none."""
    replay: Replay
    """Empty where the policy was greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The same draws under the present weights, with gradient."""

    logprobs: Tensor
    """[B, H, D] float32."""
    values: Tensor
    """[B, V] float32."""
    entropy: Tensor | None = None
    """[B, H, D] float32; None where it was not asked for, or where the weights do not decide it."""
    whitened: Tensor | None = None
    """[B, H, D] float32, where a draw is one Gaussian whose std the weights do not decide: mean / std, so that half the
    squared distance of two of them is their KL divergence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised:
    """Losses on demonstrations."""

    loss: Tensor
    """[B] float32: flow matching or cross-entropy, the mean over the components that count; 0 where none does."""
    aux: Tensor | None = None
    """[B] float32: squared error of the auxiliary targets; None without any."""


class ActionModel(Protocol):
    """A loaded policy: an `nn.Module` whose critic's parameters are named "value_head.".

    acted = model.act(inputs, draw=draw, greedy=False)            no gradient
    evaluated = model.evaluate(inputs, acted.replay)              == acted.logprobs and acted.values, before any step
    losses = model.supervised(inputs, actions, mask, draw=draw)
    """

    @property
    def horizon(self) -> int:
        """H: actions executed a decision."""
        ...

    @property
    def model_horizon(self) -> int:
        """Actions the network predicts a decision, H or more: the length of a demonstrated chunk."""
        ...

    @property
    def action_dim(self) -> int:
        """D."""
        ...

    @property
    def value_dim(self) -> int:
        """V: 1 for one value a chunk, H for one an action, 0 without a critic."""
        ...

    def act(self, inputs: Inputs, *, draw: Draw, greedy: bool = False) -> Acted:
        """Decide. No gradient."""
        ...

    def evaluate(self, inputs: Inputs, replay: Replay, *, with_entropy: bool = False) -> Evaluated:
        """Return log-probabilities, values and entropy of what `act` drew."""
        ...

    def supervised(
        self, inputs: Inputs, actions: Tensor, mask: Tensor, *, draw: Draw, aux: Tensor | None = None
    ) -> Supervised:
        """Return the losses of demonstrated chunks.

        actions: [B, model_horizon, D] float32, normalised. mask: [B, model_horizon] bool, actions that are there: none
        for a sample that only has auxiliary targets.
        aux: [B, n] float32 targets to be read off the observation, such as objects' positions; NaN where there is none.
        """
        ...
