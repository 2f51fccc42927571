"""The plain loop: FlowGRPO in one process, in the order of flow_grpo's scripts (arXiv 2505.05470).

    for each batch of samples: embed its captions, denoise, decode          rewards, advantages
    for each batch of samples: for each trained step: forward, reference, loss, backward
    optimizer step

As in those scripts, old log-probabilities and embeddings are kept from the rollout, guidance that is off makes no pass,
and a batch has samples at the same step.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import _wfm_work as w
import torch
from _wfm_work import Work
from torch import Tensor

from cosmos_rl_core.types import Prompt
from cosmos_rl_wfm.models.base import ClipSize
from cosmos_rl_wfm.models.codec import Codec, to_video
from cosmos_rl_wfm.models.model import DiffusersModel
from cosmos_rl_wfm.rewards.pixels import brightness


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The inputs of training, for N samples."""

    embeds: Tensor
    """[N, L, E]."""
    latents: Tensor
    """[N, steps + 1, C, f, h, w]."""
    logprobs: Tensor
    """[N, T]: of the trained steps."""

    def part(self, which: slice) -> Samples:
        return Samples(embeds=self.embeds[which], latents=self.latents[which], logprobs=self.logprobs[which])


class PlainLoop:
    """Network, frozen reference and optimizer, without a framework."""

    def __init__(self, model: DiffusersModel, *, size: ClipSize, work: Work, seed: int = 0) -> None:
        self.model, self.network, self.work = model, model.network, work
        self.network.requires_grad_(True).train()
        self.reference = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=w.LEARNING_RATE, weight_decay=0.0, fused=True)
        self.sigmas = torch.linspace(1, 0, work.num_steps + 1, dtype=torch.float64).float()
        self.generator = torch.Generator().manual_seed(seed)
        self._shape = model.latent_shape(size)
        self._codec = cast(Codec, model.codec)

    def step(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Roll out, train, update; return seconds."""
        started = time.perf_counter()
        captions = [prompt.row["caption"] for prompt in prompts for _ in range(self.work.group_size)]
        samples, videos = self.sample(captions)
        rewards = torch.tensor([brightness(video) for video in videos.numpy()], dtype=torch.float64)
        drawn = time.perf_counter()
        self.backward(samples, self.advantages(rewards))
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), w.MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        ended = time.perf_counter()
        return {"rollout_s": drawn - started, "train_s": ended - drawn, "step_s": ended - started}

    @torch.no_grad()
    def sample(self, captions: Sequence[str]) -> tuple[Samples, Tensor]:
        """Denoise samples of `captions`; return them with their clips uint8 [N, F, H, W, 3]."""
        parts, clips = [], []
        for first in range(0, len(captions), self.work.batch):
            embeds = self.embed(captions[first : first + self.work.batch])
            x = torch.randn(len(embeds), *self._shape, generator=self.generator)
            latents, logprobs = [x], []
            for i in range(self.work.num_steps):
                x, std = self.move(self.network, embeds, x, i)
                if i in self.work.trained:
                    mean, x = x, x + std * torch.randn(x.shape, generator=self.generator)
                    logprobs.append(logprob(x, mean, std))
                latents.append(x)
            clips.append(to_video(self._codec.decode(x)))  # the batch at once, as flow_grpo's scripts do
            parts.append(
                Samples(embeds=embeds, latents=torch.stack(latents, dim=1), logprobs=torch.stack(logprobs, dim=1))
            )
        embeds, latents, logprobs = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("embeds", "latents", "logprobs")
        )
        return Samples(embeds=embeds, latents=latents, logprobs=logprobs), torch.cat(clips)

    def embed(self, captions: Sequence[str]) -> Tensor:
        """[N, L, E], one caption after another, repeated or not."""
        condition = self.model.encode_text(captions)
        return condition.text * condition.text_mask[..., None]

    def advantages(self, rewards: Tensor) -> Tensor:
        """[N] float32, of rewards [N] float64: around the group's mean, over the deviation of all."""
        groups = rewards.view(-1, self.work.group_size)
        centred = groups - groups.mean(dim=1, keepdim=True)
        return (centred / (rewards.std(correction=0) + 1e-4)).flatten().float()

    def backward(self, samples: Samples, advantages: Tensor) -> None:
        """Add the gradient of clipped loss and KL, averaged over samples and trained steps."""
        trained, count = self.work.trained, len(advantages)
        for first in range(0, count, self.work.batch):
            which = slice(first, first + self.work.batch)
            batch, advantage = samples.part(which), advantages[which].clamp(-w.ADVANTAGE_CLIP, w.ADVANTAGE_CLIP)
            for place, i in enumerate(trained):
                mean, std = self.move(self.network, batch.embeds, batch.latents[:, i], i)
                with torch.no_grad():
                    ref_mean, _ = self.move(self.reference, batch.embeds, batch.latents[:, i], i)
                ratio = (logprob(batch.latents[:, i + 1], mean, std) - batch.logprobs[:, place]).exp()
                clipped = ratio.clamp(1 - w.CLIP, 1 + w.CLIP)
                policy = torch.maximum(-advantage * ratio, -advantage * clipped).sum()
                length = self.sigmas[i] - self.sigmas[i + 1]  # flow_grpo's scripts for images divide by std^2 / length
                divergence = ((mean - ref_mean).square().flatten(1).mean(1) * length / (2 * std**2)).sum()
                ((policy + w.KL_COEF * divergence) / (count * len(trained))).backward()

    def move(self, network: torch.nn.Module, embeds: Tensor, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the state after step i; steps that are not trained are the ODE's."""
        sigma, after = self.sigmas[i], self.sigmas[i + 1]
        timestep = (sigma * 1000).expand(len(x))
        v = network(hidden_states=x, timestep=timestep, encoder_hidden_states=embeds, return_dict=False)[0]
        dt = after - sigma
        if i not in self.work.trained:
            return x + v * dt, torch.zeros(())
        level = w.NOISE_LEVEL * torch.sqrt(sigma / (1 - (self.sigmas[1] if i == 0 else sigma)))
        pull = level**2 / (2 * sigma)
        return x * (1 + pull * dt) + v * (1 + pull * (1 - sigma)) * dt, level * torch.sqrt(-dt)


def logprob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """[N]: of next states, mean over elements."""
    each = -((x - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return each.flatten(1).mean(1)
