"""Compares the gradients of both sides of wfm_step.py, on our rollouts: by our trainer and by the plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from _wfm_ours import OurLoop, recipe
from _wfm_peer import PlainLoop, Samples
from _wfm_work import Model, TextName, Work
from torch import Tensor

from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.models.base import ClipSize
from cosmos_rl_wfm.models.build import build_model

AWAY = 1e-2
"""How far the trained weights are from those that drew the rollouts, in parts of each tensor's own size: ratios are not
1 then, and some are clipped."""


def plain_loop(model: Model, folder: Path, *, text: TextName, work: Work, checkpointing: bool = False) -> PlainLoop:
    """The plain loop around the folder's model."""
    loaded = build_model(model.config(folder, text), parts=("network", "codec", "text"))
    loop = PlainLoop(loaded, size=ClipSize(**model.size), work=work)
    if checkpointing:
        loop.network.enable_gradient_checkpointing()
    return loop


async def gradient_difference(model: Model, folder: Path, *, text: TextName, work: Work) -> float:
    """Return |ours - plain| / |ours| over all parameters, in float32."""
    ours = await OurLoop.make(recipe(model, folder, text=text, work=work))
    groups = await ours.draw(model.prompts[: work.num_prompts])
    trained = ours.trainer.policy.module
    move_away(trained)
    await ours.learner.forward_backward(ours.batcher(groups, step=0))
    await ours.close()
    plain = plain_loop(model, folder, text=text, work=work)
    plain.network.load_state_dict(trained.state_dict())
    rewards = torch.tensor([rollout.reward for group in groups for rollout in group.rollouts], dtype=torch.float64)
    plain.backward(samples_of(groups, plain), plain.advantages(rewards))
    return relative_difference(gradient(trained), gradient(plain.network))


@torch.no_grad()
def move_away(network: torch.nn.Module) -> None:
    """Change every weight a little, in the same way at each call."""
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        size = parameter.square().mean().sqrt()
        parameter += AWAY * size * torch.randn(parameter.shape, generator=generator)


def samples_of(groups: Sequence[RolloutGroup], plain: PlainLoop) -> Samples:
    """Our rollouts in the format of the plain loop."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    captions = [group.prompt.row["caption"] for group in groups for _ in group.rollouts]
    path = torch.stack([torch.tensor(rollout.arrays["path"]) for rollout in rollouts])
    latents = path.new_zeros(len(path), plain.work.num_steps + 1, *path.shape[2:])
    arrays = rollouts[0].arrays
    for step, before, after in zip(plain.work.trained, arrays["path_from"], arrays["path_to"], strict=True):
        latents[:, step], latents[:, step + 1] = path[:, before], path[:, after]
    logprobs = torch.stack([torch.tensor(rollout.rollout_logprobs) for rollout in rollouts])
    return Samples(embeds=plain.embed(captions), latents=latents, logprobs=logprobs)


def gradient(network: torch.nn.Module) -> Tensor:
    """All gradients, concatenated."""
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters() if parameter.grad is not None])


def relative_difference(ours: Tensor, plain: Tensor) -> float:
    return ((ours.double() - plain.double()).norm() / ours.double().norm()).item()
