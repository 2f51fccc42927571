"""MLP policies on the state alone, with a separate critic, as common in control.

    state -- tanh layers --> mean [D];  log std [D] is a parameter        actions ~ N(mean, std^2)
    state -- tanh layers --> logits [D]                                  action: one of D, as a vector with a 1
    state -- tanh layers --> value                                       "value_head."

Sizes, initial weights and initial standard deviation are those of Stable-Baselines3, for comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.base import (
    Acted,
    ActionModel,
    Inputs,
    Randomness,
    Replay,
    ScoredActions,
    SupervisedLosses,
    masked_mean,
)
from cosmos_rl_vla.models.checkpoint import WeightNames
from cosmos_rl_vla.models.instructions import word_instructions
from cosmos_rl_vla.models.loaded import LoadedPolicy

HIDDEN = (64, 64)


class _MLP(ActionModel):
    """The layers, with a horizon of one action."""

    horizon = model_horizon = value_dim = 1
    names = WeightNames()
    sees = False

    def __init__(self, *, state_dim: int, action_dim: int, hidden: Sequence[int] = HIDDEN) -> None:
        super().__init__()
        self.state_dim, self.action_dim, self.hidden = state_dim, action_dim, tuple(hidden)
        self.mean = _layers((state_dim, *hidden, action_dim), last_gain=0.01)
        self.value_head = _layers((state_dim, *hidden, 1), last_gain=1.0)

    def write_config(self, directory: Path, stats: ActionStats) -> None:
        config = {"model_type": "cosmos_rl_mlp", "state_dim": self.state_dim, "action_dim": self.action_dim}
        config |= {"hidden": list(self.hidden), "discrete": self.is_choice}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class DiscreteMLPModel(_MLP):
    """Chooses one of D actions, for a simulator that takes the highest of D scores.

    The action is a vector with a 1 at its place. The components of its log-probability are 0 but for that place, and
    those of the entropy are -p_d log p_d: their sums are those of the choice, which is one term under terms = "action".
    """

    is_choice = True

    @torch.no_grad()
    def act(self, inputs: Inputs, *, randomness: Randomness, greedy: bool = False) -> Acted:
        """Sample an action, or return the likeliest."""
        logprobs, values = self.mean(inputs.state).log_softmax(-1), self.value_head(inputs.state)
        if greedy:
            chosen = self._one_hot(logprobs)
            return Acted(actions=chosen, logprobs=torch.zeros_like(chosen), values=values, replay={})
        noise = [torch.from_numpy(g.gumbel(size=self.action_dim)) for g in randomness.generators()]
        chosen = self._one_hot(logprobs + torch.stack(noise).to(logprobs))  # the highest of these is a sample
        return Acted(actions=chosen, logprobs=logprobs[:, None] * chosen, values=values, replay={"actions": chosen})

    def evaluate(self, inputs: Inputs, replay: Replay, *, with_entropy: bool = False) -> ScoredActions:
        """Return the log-probabilities of `actions` [B, 1, D]."""
        logprobs = self.mean(inputs.state).log_softmax(-1)[:, None]
        return ScoredActions(
            logprobs=logprobs * replay["actions"],
            values=self.value_head(inputs.state),
            entropy=-logprobs.exp() * logprobs if with_entropy else None,
        )

    def supervised(
        self, inputs: Inputs, actions: Tensor, mask: Tensor, *, randomness: Randomness, aux: Tensor | None = None
    ) -> SupervisedLosses:
        """Return the cross-entropy of the demonstrated choice, the highest of its D scores."""
        logprobs = self.mean(inputs.state).log_softmax(-1)[:, None]
        error = -logprobs.gather(-1, actions.argmax(-1, keepdim=True))[..., 0]
        return SupervisedLosses(loss=masked_mean(error, mask))

    def _one_hot(self, scores: Tensor) -> Tensor:
        """Scores [B, D] -> [B, 1, D]."""
        return nn.functional.one_hot(scores.argmax(-1), self.action_dim)[:, None].float()


class MLPModel(_MLP):
    """Samples normally distributed actions."""

    def __init__(self, *, state_dim: int, action_dim: int, hidden: Sequence[int] = HIDDEN) -> None:
        super().__init__(state_dim=state_dim, action_dim=action_dim, hidden=hidden)
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    @torch.no_grad()
    def act(self, inputs: Inputs, *, randomness: Randomness, greedy: bool = False) -> Acted:
        """Sample an action, or return the mean."""
        mean, values = self.mean(inputs.state), self.value_head(inputs.state)
        if greedy:
            return Acted(actions=mean[:, None], logprobs=torch.zeros_like(mean)[:, None], values=values, replay={})
        noise = [torch.from_numpy(g.standard_normal(self.action_dim, dtype="float32")) for g in randomness.generators()]
        actions = mean + self.log_std.exp() * torch.stack(noise).to(mean.device)
        logprobs = self._logprob(mean, actions)[:, None]
        return Acted(actions=actions[:, None], logprobs=logprobs, values=values, replay={"actions": actions[:, None]})

    def evaluate(self, inputs: Inputs, replay: Replay, *, with_entropy: bool = False) -> ScoredActions:
        """Return the log-probabilities of `actions` [B, 1, D]."""
        mean = self.mean(inputs.state)
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).expand_as(mean)[:, None]
        return ScoredActions(
            logprobs=self._logprob(mean, replay["actions"][:, 0])[:, None],
            values=self.value_head(inputs.state),
            entropy=entropy if with_entropy else None,
        )

    def supervised(
        self, inputs: Inputs, actions: Tensor, mask: Tensor, *, randomness: Randomness, aux: Tensor | None = None
    ) -> SupervisedLosses:
        """Return the squared error of the mean."""
        error = (self.mean(inputs.state)[:, None] - actions).square().mean(-1)
        return SupervisedLosses(loss=masked_mean(error, mask))

    def _logprob(self, mean: Tensor, actions: Tensor) -> Tensor:
        return -0.5 * ((actions - mean) / self.log_std.exp()) ** 2 - self.log_std - 0.5 * math.log(2 * math.pi)


def make_mlp(config: VLAModelConfig, *, stats: ActionStats | None) -> LoadedPolicy:
    """Build a directory's model, or a randomly initialised one."""
    directory = Path(config.path).expanduser()
    sizes: dict[str, Any] = {"state_dim": config.state_dim, "action_dim": config.action_dim, "hidden": config.hidden}
    discrete = config.discrete
    if config.path:
        sizes = _read(directory)
        discrete = sizes.pop("discrete")
    with forked_rng(seed=config.seed):
        model = DiscreteMLPModel(**sizes) if discrete else MLPModel(**sizes)
    return LoadedPolicy(
        model=model,
        stats=stats or ActionStats.unit(model.action_dim),
        instructions=word_instructions(("",)),
        directory=directory if config.path else None,
    )


def _layers(widths: Sequence[int], *, last_gain: float) -> nn.Sequential:
    """Linear layers with tanh between them; orthogonal initial weights, zero initial bias."""
    layers: list[nn.Module] = []
    for place, (before, after) in enumerate(pairwise(widths)):
        linear, last = nn.Linear(before, after), place == len(widths) - 2
        nn.init.orthogonal_(linear.weight, gain=last_gain if last else math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, nn.Tanh()]
    return nn.Sequential(*layers)


def _read(directory: Path) -> dict[str, Any]:
    config = read_json_object(directory / "config.json")
    try:
        return {name: config[name] for name in ("state_dim", "action_dim", "hidden")} | {
            "discrete": bool(config.get("discrete", False))
        }
    except KeyError as error:
        raise UserError(f"{directory / 'config.json'} has no {error}") from None
