"""What is known of a model before it is built."""

import pytest

from cosmos_rl_core import assemble
from cosmos_rl_core.config.load import load_config
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_wfm.build import build_policy
from cosmos_rl_wfm.domain import WFM
from cosmos_rl_wfm.shape import read_shape
from cosmos_rl_wfm.testing import mock_data, pixel_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a model, and its parameters' shapes."""
    folder = tmp_path_factory.mktemp("model")
    policy = build_policy(pixel_model(), data=mock_data(), sampling=None, seed=0, setup=ModelSetup())
    policy.save_config(folder)
    return folder, {name: tuple(tensor.shape) for name, tensor in policy.module.named_parameters()}


def model_at(folder):
    return pixel_model(path=str(folder), network={}, family="auto")


def test_the_weights_are_those_of_the_built_model_and_a_term_passes_over_a_whole_clip(saved):
    folder, parameters = saved
    shape = read_shape(model_at(folder), mock_data())
    assert shape is not None
    assert {spec.name: spec.shape for spec in shape.weights} == parameters
    assert shape.tokens_per_term == 2 * 2 * 2  # 4 frames of 8 x 8 in patches of 2 x 4 x 4


def test_a_model_on_a_hub_is_not_known():
    assert read_shape(model_at("someone/model"), mock_data()) is None


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_axes_that_there_are_none_of_are_refused_before_anything_starts(saved, axis):
    recipe = {
        "run": {"domain": "wfm", "max_steps": 1},
        "model": {"path": str(saved[0]), "codec": "pixels", "text": {"encoder": "words", "length": 4}},
        "data": {"kind": "mock", "size": {"frames": 4, "height": 8, "width": 8}},
        "algorithm": {"name": "sft"},
        "policy": {"parallel": {axis: 2}},
    }
    with pytest.raises(UserError, match=rf"{axis} = 2: this model is spread over dp and cp alone"):
        assemble.look_up_parts(load_config(recipe), WFM)
