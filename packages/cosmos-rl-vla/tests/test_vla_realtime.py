"""Real-time chunking: the paper's weights and guidance, and chunks of a served policy that continue those before."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from vla_fixtures import small_pi
from vla_serving import layout

from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.models.instructions import word_instructions
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.models.pi.family import random_pi
from cosmos_rl_vla.models.realtime import BETA, guided_velocity, prefix_weights
from cosmos_rl_vla.normalise import Spread
from cosmos_rl_vla.serving.observations import RobotObservation
from cosmos_rl_vla.serving.served import ServedPolicy


def test_the_weights_are_those_of_equation_5():
    horizon, executed, delay = 8, 2, 3  # the chunk before has 8 - 2 actions left
    expected = []
    for place in range(horizon):
        share = (horizon - executed - place) / (horizon - executed - delay + 1)
        soft = share * (math.exp(share) - 1) / (math.e - 1)
        expected.append(1.0 if place < delay else soft if place < horizon - executed else 0.0)
    torch.testing.assert_close(prefix_weights(horizon, left=horizon - executed, delay=delay), torch.tensor(expected))
    assert prefix_weights(4, left=2, delay=2).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("time", [0.0, 0.25, 0.75])
def test_the_guidance_is_that_of_equations_2_to_4(time):
    """In the paper's convention: time from 0, noise, to 1; velocity from noise to action."""
    torch.manual_seed(0)
    matrix, x, previous = torch.randn(6, 6), torch.randn(1, 3, 2), torch.randn(1, 3, 2)
    weights = prefix_weights(3, left=2, delay=1)[None, :, None].expand(1, 3, 2)

    def towards_action(state):
        return torch.tanh(state.flatten() @ matrix).view(1, 3, 2)

    jacobian = torch.autograd.functional.jacobian(lambda s: s + (1 - time) * towards_action(s), x).view(6, 6)
    action = x + (1 - time) * towards_action(x)
    pull = ((previous - action) * weights).flatten() @ jacobian
    spread = (1 - time) ** 2 / (time**2 + (1 - time) ** 2)
    strength = min(BETA, (1 - time) / (time * spread)) if time else BETA
    expected = towards_action(x) + strength * pull.view(1, 3, 2)
    guided = guided_velocity(lambda s: -towards_action(s), x, tau=1 - time, previous=previous, weights=weights)
    torch.testing.assert_close(-guided, expected)


@pytest.fixture(scope="module")
def policy():
    """A pi0.5 with chunks of four, whose actions are in other units than the robot's."""
    config = small_pi(horizon=4, state="suffix", family="pi0", num_steps=8)
    stats = ActionStats(action=Spread.between([-10.0, 0.0], [10.0, 4.0]))
    loaded = LoadedPolicy(
        model=random_pi(config, seed=1), stats=stats, instructions=word_instructions(("open the door",)), directory=None
    )
    return ServedPolicy(loaded, layout(stats=stats, image_size=(16, 16)), name="small")


def requests(policy, *, previous=(None, None), delay=0):
    rng = np.random.default_rng(0)
    made = []
    for robot, left in enumerate(previous):
        images = rng.integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
        state = rng.uniform(-1, 1, 3).astype(np.float32)
        seen = RobotObservation(images=images, state=state, prompt="open the door", previous=left, delay=delay)
        made.append(policy.admit(seen, seed=robot, place=robot + 3))
    return made


def test_a_chunk_is_the_models_own_in_the_robots_units(policy):
    asked = requests(policy)
    chunks = policy.act(asked)
    for chunk, one in zip(chunks, asked, strict=True):
        tokens = policy._loaded.instructions(["open the door"], one.state[None])
        inputs = Inputs(
            images=torch.from_numpy(one.observation.images[None]),
            state=torch.from_numpy(one.state[None]),
            tokens=torch.from_numpy(tokens.tokens),
            token_mask=torch.from_numpy(tokens.mask),
        )
        randomness = Randomness(seeds=[one.seed], places=[one.place])
        actions = policy._loaded.model.act(inputs, randomness=randomness, greedy=True).actions[0].numpy()
        np.testing.assert_allclose(chunk, actions * [10, 2] + [0, 2], rtol=1e-4, atol=1e-4)


def test_a_continued_chunk_begins_with_what_is_executed_and_goes_on_near_the_chunk_before(policy):
    free = policy.act(requests(policy))
    left = np.array([[3.0, 1.0], [4.0, 1.5], [5.0, 2.0]], np.float32)
    continued = policy.act(requests(policy, previous=(left, None), delay=1))
    np.testing.assert_array_equal(continued[0][0], left[0])
    apart = [np.abs((chunk[0][1:3] - left[1:]) / [10, 2]).max(1) for chunk in (continued, free)]
    assert (apart[0] < apart[1]).all()
    np.testing.assert_allclose(continued[1], free[1], rtol=1e-4, atol=1e-4)  # that robot has no chunk before


def test_a_policy_without_a_flow_blends_by_the_same_weights():
    model = VLAModelConfig(family="mlp", action_dim=2, state_dim=3)
    loaded = load(model)
    made = ServedPolicy(loaded, layout(cameras=(), horizon=1), name="mlp")
    seen = RobotObservation(images=np.zeros((0, 1, 1, 3), np.uint8), state=np.ones(3, np.float32), prompt="go")
    (free,) = made.act([made.admit(seen, seed=0, place=0)])
    left = np.array([[0.5, -0.5]], np.float32)
    (soft,) = made.act([made.admit(replace(seen, previous=left), seed=0, place=0)])
    (frozen,) = made.act([made.admit(replace(seen, previous=left, delay=1), seed=0, place=0)])
    weight = prefix_weights(1, left=1, delay=0)[0].item()
    np.testing.assert_allclose(soft, weight * left + (1 - weight) * free, rtol=1e-5)
    np.testing.assert_array_equal(frozen, left)
