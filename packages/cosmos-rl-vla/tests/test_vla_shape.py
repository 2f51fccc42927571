"""What is known of a model before it is built."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.preflight.checks import look_up_parts
from cosmos_rl_core.parallel.config import PolicySection
from cosmos_rl_core.plan.memory import estimate_of
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig, VLASampling
from cosmos_rl_vla.domain import VLA
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.shape import read_shape

SIZES = {"action_dim": 2, "state_dim": 2, "words": ("reach the red square",)}


@pytest.fixture(scope="module", params=["pi05", "openvla_oft"])
def saved(request, tmp_path_factory):
    """A model and the folder it was saved to."""
    folder = tmp_path_factory.mktemp("model")
    loaded = load(VLAModelConfig(family=request.param, **SIZES), stats=ActionStats.unit(2))
    loaded.save_config(folder)
    tensors = {name: tensor.detach().contiguous() for name, tensor in loaded.weights().items()}
    save_file(tensors, folder / "model.safetensors")
    return loaded, folder


def test_the_sizes_are_those_of_the_built_model(saved):
    loaded, folder = saved
    shape = read_shape(VLAModelConfig(path=str(folder), dtype="bfloat16"), None)
    assert shape is not None
    assert {spec.name: spec.shape for spec in shape.weights} == {
        name: tuple(tensor.shape) for name, tensor in loaded.weights().items()
    }
    assert (shape.num_layers, shape.hidden, shape.compute_dtype) == (2, 96, "bfloat16")


def test_a_term_stands_for_its_part_of_a_decision(saved):
    model = VLAModelConfig(path=str(saved[1]), horizon=4, action_dim=2)
    tokens = {
        terms: read_shape(model, VLASampling(terms=terms)).tokens_per_term for terms in ("chunk", "action", "token")
    }
    assert tokens["chunk"] == read_shape(model, None).tokens_per_term  # a frame of a demonstration
    assert tokens["action"] == -(-tokens["chunk"] // 4)
    assert tokens["token"] == -(-tokens["chunk"] // 8)


@pytest.mark.parametrize("saved", ["pi05"], indirect=True)
def test_the_actions_of_a_decision_are_those_of_the_directory(saved):
    loaded, folder = saved
    config = loaded.model.config
    tokens = {
        terms: read_shape(VLAModelConfig(path=str(folder)), VLASampling(terms=terms)).tokens_per_term
        for terms in ("chunk", "action", "token")
    }
    assert tokens["action"] == -(-tokens["chunk"] // config.horizon)
    assert tokens["token"] == -(-tokens["chunk"] // (config.horizon * config.action_dim))


@pytest.mark.parametrize("saved", ["pi05"], indirect=True)
def test_with_the_expert_alone_the_language_and_vision_model_learns_nothing(saved):
    folder = saved[1]
    shape = read_shape(VLAModelConfig(path=str(folder), train="expert"), None)
    built = load(VLAModelConfig(path=str(folder), train="expert"))
    assert {spec.name for spec in shape.weights} - shape.frozen == set(built.trained_weights())
    whole = read_shape(VLAModelConfig(path=str(folder)), None)
    assert (shape.hidden, whole.hidden) == (built.model.config.expert.width, built.model.config.language.width)
    policy = PolicySection()
    assert estimate_of(shape, policy).gradients == 4 * sum(
        tensor.numel() for tensor in built.trained_weights().values()
    )
    assert estimate_of(shape, policy).activations < estimate_of(whole, policy).activations


def test_every_weight_is_counted(saved):
    loaded, folder = saved
    estimate = estimate_of(read_shape(VLAModelConfig(path=str(folder)), None), PolicySection())
    assert estimate.parameters == 4 * sum(tensor.numel() for tensor in loaded.weights().values())


def test_a_model_from_scratch_is_not_known():
    assert read_shape(VLAModelConfig(**SIZES), None) is None


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_axes_that_there_are_none_of_are_refused_before_anything_starts(saved, axis):
    recipe = {
        "run": {"domain": "vla", "max_steps": 1},
        "model": {"path": str(saved[1])},
        "data": {"demos": "somewhere"},
        "algorithm": {"name": "sft"},
        "policy": {"parallel": {axis: 2}},
    }
    with pytest.raises(UserError, match=rf"{axis} = 2: this model is spread over dp alone; use dp_shard"):
        look_up_parts(load_config(recipe), VLA)
