"""pi0 and pi0.5 (Physical Intelligence; arXiv 2410.24164, 2504.16054), with the log-probabilities of pi-RL.

    act:       backbone once -> K denoising steps over its keys and values -> the last state is the chunk of actions
    evaluate:  backbone once -> the S stochastic steps again, from their recorded initial states

Letters as in `base`; S stochastic steps of a decision (1, or all of them), M actions and A dimensions of the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.models import flow
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
from cosmos_rl_vla.models.flow import ActionGaussian
from cosmos_rl_vla.models.pi.backbone import Backbone
from cosmos_rl_vla.models.pi.checkpoint import HINT, PiNames
from cosmos_rl_vla.models.pi.config import PiConfig
from cosmos_rl_vla.models.pi.expert import Denoised, Denoiser, Prefix, pad_last
from cosmos_rl_vla.models.realtime import guided_velocity
from cosmos_rl_vla.models.value import Readout


class PiModel(ActionModel):
    """Parameters: "backbone.", "denoiser." (the expert), "value_head.", "aux_head."."""

    hint = HINT

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.horizon, self.action_dim, self.value_dim = config.horizon, config.action_dim, config.value_dim
        self.model_horizon, self.aux_dim = config.model_horizon, config.aux_dim
        self.state_dim = config.max_state_dim
        self.names = PiNames(config.family)
        self.backbone = Backbone(config)
        self.denoiser = Denoiser(config)
        self.value_head = _value_head(config)
        self.aux_head = _aux_head(config)

    def init_heads(self) -> None:
        self.denoiser.init_noise_head()
        self.value_head, self.aux_head = _value_head(self.config), _aux_head(self.config)

    def write_config(self, directory: Path, stats: ActionStats) -> None:
        self.config.save(directory)

    def blocks(self) -> list[nn.Module]:
        paligemma = self.backbone.paligemma
        return [*paligemma.vision_tower.encoder.layers, *paligemma.language_model.layers, *self.denoiser.expert.layers]

    def root_blocks(self) -> list[nn.Module]:
        """The language model's last layer: the expert reads its keys and values, and its output may be unused."""
        return [self.backbone.paligemma.language_model.layers[-1]]

    def exact(self) -> list[list[nn.Module]]:
        """Norms, input and output projections of the expert, and heads, as openpi keeps them.

        Log-probs are differences of close numbers, so the last operations before them need the precision. Adapters are
        cast with the rest.
        """
        parts = self.denoiser.expert.named_modules()
        networks = [part for name, part in parts if name.endswith((".self_attn", ".mlp"))]
        inside = {id(module) for part in networks for module in part.modules()}
        own = {name: module for name, module in self.denoiser.named_modules() if ".lora_" not in name}
        around: list[nn.Module] = [
            module
            for module in own.values()
            if id(module) not in inside and next(module.parameters(recurse=False), None) is not None
        ]
        return [around, *([head] for head in (self.value_head, self.aux_head) if head is not None)]

    @torch.no_grad()
    def act(self, inputs: Inputs, *, randomness: Randomness, greedy: bool = False) -> Acted:
        """Denoise from each sample's own noise; `greedy` follows the ODE (the initial noise is still sampled)."""
        prefix = self.backbone(inputs)
        noises = self._noises(randomness, device=inputs.state.device)
        # All K steps keep their states, log-probs and outputs: which of them is stochastic differs by sample.
        states, logprobs, hidden = [noises.start], [], []
        for step in range(self.config.num_steps):
            denoised = self._denoise(
                states[-1], index=torch.full_like(noises.index[:, 0], step), state=inputs.state, prefix=prefix
            )
            after, logprob = self._advance(states[-1], denoised, step=step, noises=None if greedy else noises)
            states.append(after)
            logprobs.append(logprob)
            hidden.append(denoised.hidden[:, : self.horizon])
        # Then each sample picks its S stochastic steps; training runs these alone again, from their own states.
        before, after = (_pick(torch.stack(x, dim=1), noises.index) for x in (states[:-1], states[1:]))
        replay = {"before": before, "after": self._executed(after), "index": noises.index, "level": noises.level}
        logprob = self._averaged(_pick(torch.stack(logprobs, dim=1), noises.index), start=before[:, 0])
        return Acted(
            actions=self._executed(states[-1]),
            logprobs=torch.zeros_like(logprob) if greedy else logprob,
            values=self._values(prefix, _pick(torch.stack(hidden, dim=1), noises.index).unbind(1)),
            replay={} if greedy else replay,
        )

    @torch.no_grad()
    def act_after(self, inputs: Inputs, *, randomness: Randomness, previous: Tensor, weights: Tensor) -> Tensor:
        """Follow the ODE, guided to the chunks before."""
        prefix, x = self.backbone(inputs), self._noises(randomness, device=inputs.state.device).start
        target, mask = torch.zeros_like(x), torch.zeros_like(x)
        self._executed(target).copy_(previous)
        self._executed(mask).copy_(weights[..., None].expand_as(previous))
        for step in range(self.config.num_steps):
            denoise = partial(self._denoise, index=torch.full((len(x),), step, device=x.device))
            guided = guided_velocity(
                lambda chunk, denoise=denoise: denoise(chunk, state=inputs.state, prefix=prefix).velocity,
                x,
                tau=1 - step / self.config.num_steps,
                previous=target,
                weights=mask,
            )
            x = flow.ode_step(x, guided, num_steps=self.config.num_steps)
        return self._executed(x)

    def evaluate(self, inputs: Inputs, replay: Replay, *, with_entropy: bool = False) -> ScoredActions:
        """Run the steps of `replay` again.

        It has `before` [B, S, M, A], `after` [B, S, H, D], `index` [B, S] int64, and the noise's `level` [B].
        """
        prefix = self.backbone(inputs)
        gaussians, hidden = [], []
        for step in range(replay["index"].shape[1]):
            before, index = replay["before"][:, step], replay["index"][:, step]
            denoised = self._denoise(before, index=index, state=inputs.state, prefix=prefix)
            gaussians.append(self._of_executed(self._gaussian(before, denoised, index=index, level=replay["level"])))
            hidden.append(denoised.hidden[:, : self.horizon])
        logprobs = [
            gaussian.logprob(after) for gaussian, after in zip(gaussians, replay["after"].unbind(1), strict=True)
        ]
        learned = self.config.noise.kind == "learned"
        entropy = (
            torch.stack([gaussian.entropy() for gaussian in gaussians]).mean(0) if learned and with_entropy else None
        )
        return ScoredActions(
            logprobs=self._averaged(torch.stack(logprobs, dim=1), start=replay["before"][:, 0]),
            values=self._values(prefix, hidden),
            entropy=entropy,
            whitened=gaussians[0].whitened() if len(gaussians) == 1 and not learned else None,
        )

    def supervised(
        self, inputs: Inputs, actions: Tensor, mask: Tensor, *, randomness: Randomness, aux: Tensor | None = None
    ) -> SupervisedLosses:
        """Flow matching: the squared error of the velocity at one time per sample, over its unpadded dimensions."""
        prefix = self.backbone(inputs)
        size = self.model_horizon * self.config.model_action_dim
        sampled = _stacked(
            [(g.random(1), g.standard_normal(size)) for g in randomness.generators()], device=actions.device
        )
        tau, noise = flow.supervised_times(sampled[:, 0]), sampled[:, 1:].unflatten(1, (self.model_horizon, -1))
        clean = pad_last(actions, self.config.model_action_dim)
        denoised = self.denoiser(flow.mix(clean, noise, tau), tau=tau, state=inputs.state, prefix=prefix)
        error = (denoised.velocity - (noise - clean)).square()[..., : self.action_dim].mean(-1)
        return SupervisedLosses(loss=masked_mean(error, mask), aux=None if aux is None else self._aux_loss(prefix, aux))

    def _advance(self, x: Tensor, denoised: Denoised, *, step: int, noises: Noises | None) -> tuple[Tensor, Tensor]:
        """Return the state after a step and its log-prob [B, H, D], 0 for samples whose stochastic step is another."""
        after = flow.ode_step(x, denoised.velocity, num_steps=self.config.num_steps)
        if noises is None or not self._may_sample(step):
            return after, torch.zeros_like(self._executed(x))
        # A batch mixes samples for which this step is stochastic with others, so both results are computed, and each
        # sample takes its own. `own` is the noise of the one stochastic step that this is, 0 for the others.
        mine = noises.index == step  # [B, S]
        own = torch.einsum("bs,bsma->bma", mine.float(), noises.steps)
        stochastic = mine.any(1)[:, None, None]
        gaussian = self._gaussian(x, denoised, index=torch.full_like(noises.index[:, 0], step), level=noises.level)
        after = torch.where(stochastic, gaussian.mean + gaussian.std * own, after)
        return after, torch.where(stochastic, self._of_executed(gaussian).logprob(self._executed(after)), 0)

    def _may_sample(self, step: int) -> bool:
        last = self.config.noise.num_stochastic(self.config.num_steps) - 1
        return step == last if self.config.noise.steps == "last" else step <= last

    def _denoise(self, x: Tensor, *, index: Tensor, state: Tensor, prefix: Prefix) -> Denoised:
        return self.denoiser(x, tau=flow.times(index, num_steps=self.config.num_steps), state=state, prefix=prefix)

    def _gaussian(self, x: Tensor, denoised: Denoised, *, index: Tensor, level: Tensor) -> ActionGaussian:
        return flow.transition(
            x,
            denoised.velocity,
            index=index,
            num_steps=self.config.num_steps,
            noise=self.config.noise,
            level=level,
            std=denoised.std,
        )

    def _of_executed(self, gaussian: ActionGaussian) -> ActionGaussian:
        return ActionGaussian(
            mean=self._executed(gaussian.mean), std=self._executed(gaussian.std.expand_as(gaussian.mean))
        )

    def _executed(self, chunk: Tensor) -> Tensor:
        """[..., M, A] -> [..., H, D]: the part that is executed and has log-probs."""
        return chunk[..., : self.horizon, : self.action_dim]

    def _averaged(self, logprobs: Tensor, *, start: Tensor) -> Tensor:
        """[B, S, H, D] -> [B, H, D]. With steps = "all" the initial noise counts as one more step."""
        if self.config.noise.steps != "all":
            return logprobs.mean(1)
        first = self._executed(start)
        normal = ActionGaussian(mean=torch.zeros_like(first), std=torch.ones_like(first))
        return (logprobs.sum(1) + normal.logprob(first)) / (logprobs.shape[1] + 1)

    def _values(self, prefix: Prefix, hidden: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        """hidden: S times [B, H, width], of the stochastic steps."""
        if self.value_head is None:
            return prefix.hidden.new_zeros(len(prefix.hidden), 0, dtype=torch.float32)
        if self.config.value.place == "prefix":
            return self.value_head(prefix.hidden, prefix.mask)
        tokens = torch.cat(tuple(hidden), dim=1)
        return self.value_head(tokens, torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device))

    def _aux_loss(self, prefix: Prefix, targets: Tensor) -> Tensor:
        if self.aux_head is None:
            raise ValueError(f"{targets.shape[1]} auxiliary targets for a model without any: build it with aux_dim")
        error = (self.aux_head(prefix.hidden, prefix.mask) - targets.nan_to_num()).square()
        return masked_mean(error, ~targets.isnan())

    def _noises(self, randomness: Randomness, *, device: torch.device) -> Noises:
        noise, steps, shape = (
            self.config.noise,
            self.config.num_steps,
            (self.model_horizon, self.config.model_action_dim),
        )
        choices, size = noise.num_stochastic(steps), shape[0] * shape[1]
        count = choices if noise.steps == "all" else 1
        # One array a sample holds the initial noise and that of its stochastic steps, sampled in a fixed order, so
        # that an episode is the same in any batch. The index of a random step comes from the same stream, after them.
        generators = randomness.generators()
        sampled = _stacked(
            [(g.standard_normal((count + 1) * size, dtype=np.float32),) for g in generators], device=device
        )
        first, *rest = sampled.view(-1, count + 1, *shape).unbind(1)
        if noise.steps == "all":
            index = torch.arange(count, device=device).expand(len(sampled), -1)
        elif noise.steps == "last":
            index = torch.full((len(sampled), 1), choices - 1, device=device)
        else:
            index = to_device(torch.tensor([[int(g.integers(choices))] for g in generators]), device)
        level = torch.full((len(sampled),), noise.level_at(randomness.version), device=device)
        return Noises(start=first, steps=torch.stack(rest, dim=1), index=index, level=level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noises:
    """The noise of a decision."""

    start: Tensor
    """[B, M, A]: initial noise."""
    steps: Tensor
    """[B, S, M, A]: noise of the stochastic steps."""
    index: Tensor
    """[B, S] int64: indices of the stochastic steps, ascending."""
    level: Tensor
    """[B] float32: noise level."""


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """x [B, K, ...], index [B, S] -> [B, S, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def _stacked(rows: list[tuple[np.ndarray, ...]], *, device: torch.device) -> Tensor:
    stacked = np.stack([np.concatenate(row).astype(np.float32, copy=False) for row in rows])
    return to_device(torch.from_numpy(stacked), device)


def _value_head(config: PiConfig) -> Readout | None:
    value = config.value
    if value.place == "none":
        return None
    width = config.language.width if value.place == "prefix" else config.expert.width
    return Readout(width, outputs=config.value_dim, pool=value.pool, hidden=value.hidden, detach=value.detach)


def _aux_head(config: PiConfig) -> Readout | None:
    if not config.aux_dim:
        return None
    return Readout(config.language.width, outputs=config.aux_dim, pool="attention", hidden=(64,), detach=False)
