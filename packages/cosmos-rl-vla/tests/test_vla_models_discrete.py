"""A policy that chooses one of several actions, and discounted returns."""

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cosmos_rl_core import run
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_vla.build import build_policy
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.preflight import find_problems
from cosmos_rl_vla.rewards.simulator import SimulatorReward

CONFIG = VLAModelConfig(family="mlp", state_dim=2, action_dim=3, hidden=(8,), discrete=True)
PROBABILITIES = (0.5, 0.3, 0.2)


def inputs(count):
    empty = torch.zeros(count, 0)
    return Inputs(images=empty, state=torch.ones(count, 2), tokens=empty, token_mask=empty.bool())


def policy():
    """A policy with these probabilities in every state."""
    model = load(CONFIG).model
    with torch.no_grad():
        model.mean[-1].weight.zero_()
        model.mean[-1].bias.copy_(torch.tensor(PROBABILITIES).log() + 7)
    return model


def test_the_log_probability_is_that_of_the_choice():
    actions = torch.eye(3)[:, None]
    evaluated = policy().evaluate(inputs(3), {"actions": actions}, with_entropy=True)
    assert evaluated.logprobs.sum((1, 2)).tolist() == pytest.approx([math.log(p) for p in PROBABILITIES])
    entropy = -sum(p * math.log(p) for p in PROBABILITIES)
    assert evaluated.entropy.sum((1, 2)).tolist() == pytest.approx([entropy] * 3)


def test_choices_are_as_frequent_as_they_are_likely():
    count = 4000
    acted = policy().act(inputs(count), randomness=Randomness(seeds=range(count), places=[0] * count))
    assert acted.actions.sum(-1).eq(1).all()
    chosen = Counter(acted.actions.argmax(-1)[:, 0].tolist())
    for action, probability in enumerate(PROBABILITIES):
        assert chosen[action] / count == pytest.approx(probability, abs=4 * math.sqrt(0.25 / count))
    again = policy().evaluate(inputs(count), acted.replay)
    torch.testing.assert_close(again.logprobs, acted.logprobs)


def test_greedy_is_the_likeliest():
    acted = policy().act(inputs(2), randomness=Randomness(seeds=[0, 1], places=[0, 0]), greedy=True)
    assert acted.actions.tolist() == [[[1, 0, 0]]] * 2


def test_imitation_is_the_cross_entropy_of_the_demonstrated_choice():
    actions = torch.tensor([[[0.1, 0.9, 0.2]]])
    randomness = Randomness(seeds=[0], places=[0])
    loss = policy().supervised(inputs(1), actions, torch.ones(1, 1, dtype=torch.bool), randomness=randomness).loss
    assert loss.tolist() == pytest.approx([-math.log(0.3)])


def test_an_exported_folder_is_the_same_policy(tmp_path):
    loaded = load(CONFIG)
    loaded.model.write_config(tmp_path, loaded.stats)
    torch.manual_seed(1)
    from safetensors.torch import save_file

    save_file(loaded.model.state_dict(), tmp_path / "model.safetensors")
    again = load(VLAModelConfig(family="mlp", path=str(tmp_path), state_dim=1, action_dim=1)).model
    assert (type(again), again.hidden) == (type(loaded.model), (8,))
    torch.testing.assert_close(again.state_dict(), loaded.model.state_dict())


def recipe(**sampling):
    return {
        "run": {"domain": "vla", "max_steps": 2, "placement": "inline"},
        "model": {"family": "mlp", "state_dim": 4, "action_dim": 2, "hidden": [8], "discrete": True},
        "data": {"simulator": "gymnasium", "options": {"id": "CartPole-v1", "max_steps": 9}, "tasks": ["CartPole-v1"]},
        "policy": {"prompts_per_step": 2, "threads": 1, "microbatch_terms": 50},
        "rollout": {"group_size": 2, "sampling": {"max_steps": 9, **sampling}, "options": {"processes": 1}},
        "reward": {"functions": [{"name": "simulator", "options": {"discount": 0.9}}]},
        "logging": {"media_every": 1, "sinks": ["jsonl"]},
    }


def test_a_simulator_with_a_choice_and_without_a_camera_is_trained_in(tmp_path):
    tables = recipe(terms="action")
    tables["run"]["output_dir"] = str(tmp_path / "run")
    assert run(tables).steps == 2
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert line["reward_mean"] <= sum(0.9**step for step in range(9)), "1 a step, discounted"
    assert line["ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_terms_of_a_choice_are_not_its_components():
    config = load_config(recipe(terms="token"))
    (problem,) = find_problems(config)
    assert (problem.key, problem.suggestion) == ("rollout.sampling.terms", 'set it to "action"')
    with pytest.raises(UserError, match='set terms = "action"'):
        build_policy(config.model, data=config.data, sampling=config.policy_sampling, seed=0, setup=ModelSetup())


@pytest.mark.parametrize(
    ("options", "rewards"),
    [
        ({}, [1, 2, 4]),
        ({"discount": 0.5}, [1, 1, 1]),
        ({"discount": 0.5, "difference": True, "scale": 2}, [0, 1, 1]),
    ],
)
def test_a_later_reward_is_discounted(options, rewards):
    rollout = SimpleNamespace(media={"sim_rewards": np.array([1.0, 2.0, 4.0])})
    (found,) = SimulatorReward(**options)(SimpleNamespace(rollouts=[rollout]))
    assert found.tolist() == rewards


@pytest.mark.parametrize("discount", [0, 1.5])
def test_a_discount_is_above_0_and_at_most_1(discount):
    with pytest.raises(UserError, match="must be above 0 and at most 1"):
        SimulatorReward(discount=discount)
