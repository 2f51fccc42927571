"""A training step has the gradient of FlowGRPO by hand: a sample and a step at a time, by flow_grpo's formulas."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from wfm_fixtures import NETWORK, prompt

from cosmos_rl_core import assemble
from cosmos_rl_core.algorithms.advantages import build_step_advantages
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.recipe.load import load_config, load_domain
from cosmos_rl_core.train.batcher import Batcher
from cosmos_rl_core.train.learner import FrozenModels, PolicyLearner
from cosmos_rl_core.types import Share

NUM_STEPS, TRAINED, LEVEL, KL_COEF, CLIP, GROUP_SIZE = 6, (0, 1, 3), 0.7, 0.04, 1e-4, 4
CAPTIONS = ["a square moving left", "a disc moving up"]


def recipe(microbatch_terms):
    return load_config(
        {
            "run": {"domain": "wfm", "max_steps": 1},
            "model": {
                "family": "wan",
                "codec": "pixels",
                "network": {**NETWORK, "num_layers": 2},
                "text": {"encoder": "words", "length": 4},
            },
            "data": {"kind": "mock", "size": {"frames": 4, "height": 8, "width": 8}},
            "algorithm": {"name": "flow_grpo", "kl_coef": KL_COEF},
            "policy": {"prompts_per_step": 2, "microbatch_terms": microbatch_terms},
            "rollout": {
                "group_size": GROUP_SIZE,
                "sampling": {"num_steps": NUM_STEPS, "noise_level": LEVEL, "window": "fixed", "steps": TRAINED},
            },
            "reward": {"functions": [{"name": "brightness"}]},
        }
    )


def moved(network):
    """The network after an update: ratios are not 1, and some are clipped."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 1e-2 * parameter.square().mean().sqrt() * torch.randn(parameter.shape, generator=generator)


async def sampled(config, domain, weights):
    """Scored groups of both captions, sampled with `weights`."""
    engine = assemble.build_engine(config, domain)

    def copy():
        with torch.no_grad():
            for name, tensor in engine.weights().items():
                tensor.copy_(weights[name])

    await engine.switch(0, copy)
    rollouter = assemble.build_rollouter(config, domain, engine)
    groups = await asyncio.gather(*(rollouter.run(prompt(i, caption)) for i, caption in enumerate(CAPTIONS)))
    await engine.close()
    return groups


async def trained(microbatch_terms):
    """Sample rollouts, move the weights, and return the groups, the reference and the trainer with its gradients."""
    config, domain = recipe(microbatch_terms), load_domain("wfm")
    trainer = assemble.build_trainer(config, domain)
    reference = assemble.build_reference(config, domain, trainer)
    groups = await sampled(config, domain, trainer.policy.weights())
    moved(trainer.policy.module)
    batcher = Batcher(
        assemble.build_collate(config, domain, Share()),
        max_staleness=0,
        advantages=build_step_advantages(config.algorithm),
    )
    with ThreadPoolExecutor(max_workers=1) as compute:
        learner = PolicyLearner(
            trainer,
            publisher=None,
            frozen=FrozenModels(reference=reference),
            compute=compute,
            timeline=Timeline("test"),
            max_skipped_steps=0,
        )
        await learner.forward_backward(batcher(groups, step=0))
    return groups, reference.module, trainer


def mean_and_std(network, text, x, step):
    """FlowGRPO's step of x [1, C, f, h, w]: x + (v + sigma^2 / (2 t) (x + (1 - t) v)) dt, sigma sqrt(-dt), sigma."""
    times = [1 - i / NUM_STEPS for i in range(NUM_STEPS + 1)]
    t, dt = times[step], times[step + 1] - times[step]
    sigma = LEVEL * math.sqrt(t / (1 - (times[1] if step == 0 else t)))
    timestep = torch.tensor([t], dtype=torch.float64).float() * 1000
    v = network(hidden_states=x, timestep=timestep, encoder_hidden_states=text, return_dict=False)[0]
    return x + (v + sigma**2 / (2 * t) * (x + (1 - t) * v)) * dt, sigma * math.sqrt(-dt), sigma


def loss_by_hand(groups, network, reference):
    """Mean over samples and trained steps of clipped loss + coef KL; how many ratios were clipped."""
    rewards = np.array([[rollout.reward for rollout in group.rollouts] for group in groups])
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    advantages = centred / (rewards.std() + 1e-4)  # of all rewards: global_std
    total, clipped = 0.0, 0
    for group, of_group in zip(groups, advantages, strict=True):
        text = torch.from_numpy(group.rollouts[0].arrays["text"])[None]
        for rollout, advantage in zip(group.rollouts, of_group, strict=True):
            for place, step in enumerate(TRAINED):
                before, after = rollout.arrays["path_from"][place], rollout.arrays["path_to"][place]
                x, x_next = (torch.from_numpy(rollout.arrays["path"][row])[None] for row in (before, after))
                mean, std, sigma = mean_and_std(network, text, x, step)
                with torch.no_grad():
                    ref_mean, _, _ = mean_and_std(reference, text, x, step)
                each = -((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
                ratio = (each.mean() - float(rollout.rollout_logprobs[place])).exp()
                held = ratio.clamp(1 - CLIP, 1 + CLIP)
                clipped += int(advantage * ratio > advantage * held)
                kl = ((mean - ref_mean) ** 2).mean() / (2 * sigma**2)  # not std: as its scripts for images
                total = total - torch.minimum(advantage * ratio, advantage * held) + KL_COEF * kl
    return total / (rewards.size * len(TRAINED)), clipped


@pytest.mark.parametrize("microbatch_terms", [5, 24])
def test_a_step_has_the_gradient_of_the_loop_by_hand(microbatch_terms):
    groups, reference, trainer = asyncio.run(trained(microbatch_terms))
    network = trainer.policy.module
    names = [name for name, parameter in network.named_parameters() if parameter.grad is not None]
    ours = {name: parameter.grad.clone() for name, parameter in network.named_parameters() if name in names}
    network.zero_grad(set_to_none=True)
    loss, clipped = loss_by_hand(groups, network, reference)
    loss.backward()
    by_hand = {name: network.get_parameter(name).grad for name in names}
    assert 0 < clipped < len(CAPTIONS) * GROUP_SIZE * len(TRAINED)
    norm = torch.stack([grad.norm() for grad in by_hand.values()]).norm()
    difference = torch.stack([(ours[name] - by_hand[name]).norm() for name in names]).norm()
    assert norm > 1e-4
    assert difference < 1e-5 * norm
