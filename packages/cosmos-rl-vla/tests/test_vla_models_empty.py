"""What a model holds before the weights of its folder are read, and where these are not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vla_fixtures import load_pi, save_pi, small_pi

from cosmos_rl_vla.config import ActionNoiseSection as Noise
from cosmos_rl_vla.config import CriticSection as Critic
from cosmos_rl_vla.models.checkpoint import HEADS, empty
from cosmos_rl_vla.models.pi.config import full
from cosmos_rl_vla.models.pi.family import random_pi
from cosmos_rl_vla.models.pi.model import PiModel


def test_a_model_of_real_size_takes_no_memory_before_its_weights_are_read():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    model = empty(PiModel, full("pi05", horizon=10, action_dim=7), seed=0)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 13e9
    assert resident() - before < 1e9


def test_heads_that_a_folder_lacks_are_drawn_by_the_seed(tmp_path):
    config = replace(small_pi(), noise=Noise(kind="learned"))
    drawn = [empty(PiModel, config, seed=seed) for seed in (3, 3, 4)]
    weights = [dict(model.named_parameters()) for model in drawn]
    heads = [name for name in weights[0] if name.startswith(HEADS) and weights[0][name].dim() == 2]
    assert {name.split(".")[0] for name in heads} == {"value_head", "denoiser"}
    for name in heads:
        assert torch.equal(weights[0][name], weights[1][name]), name
        assert not torch.equal(weights[0][name], weights[2][name]), name


@pytest.mark.parametrize(
    "value",
    [
        Critic(place="none"),
        Critic(pool="mean", hidden=(16, 8)),
        Critic(place="expert", pool="mean"),
    ],
)
def test_another_critic_than_the_folders_begins_as_it_is_drawn(value, tmp_path):
    saved = random_pi(small_pi(), seed=0)
    save_pi(saved, tmp_path)
    loaded, fresh = load_pi(tmp_path, config=replace(small_pi(), value=value), seed=5)
    drawn = empty(PiModel, replace(small_pi(), value=value), seed=5)
    mine = {name: tensor for name, tensor in loaded.state_dict().items() if name.startswith("value_head.")}
    assert sorted(mine) == fresh
    assert all(torch.equal(tensor, drawn.state_dict()[name]) for name, tensor in mine.items())
    others = {name: tensor for name, tensor in loaded.state_dict().items() if name not in mine}
    assert others and all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in others.items())
