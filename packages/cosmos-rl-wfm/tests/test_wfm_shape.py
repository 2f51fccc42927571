"""What is known of a model before it is built."""

import inspect
import json

import pytest
from wfm_fixtures import mock_data, pixel_model

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.preflight.checks import look_up_parts
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_wfm.build import build_policy
from cosmos_rl_wfm.domain import WFM
from cosmos_rl_wfm.models.classes import compression
from cosmos_rl_wfm.models.config import WFMLoraSection, WFMModelConfig
from cosmos_rl_wfm.models.networks.tiny import tiny_network
from cosmos_rl_wfm.parallel.shape import read_shape


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


WAN_2_2_5B = {
    "_class_name": "WanTransformer3DModel",
    "added_kv_proj_dim": None,
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "ffn_dim": 14336,
    "freq_dim": 256,
    "image_dim": None,
    "in_channels": 48,
    "num_attention_heads": 24,
    "num_layers": 30,
    "out_channels": 48,
    "patch_size": [1, 2, 2],
    "text_dim": 4096,
}
RESIDUAL_VAE = {
    "_class_name": "AutoencoderKLWan",
    "z_dim": 48,
    "patch_size": 2,
    "temperal_downsample": [False, True, True],
}


def pipeline(root, **parts):
    for name, config in parts.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    index = {name: ["diffusers", config["_class_name"]] for name, config in parts.items()}
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def test_tokens_are_counted_by_the_autoencoder_that_the_model_has(tmp_path):
    folder = pipeline(tmp_path, transformer=WAN_2_2_5B, vae=RESIDUAL_VAE)
    model = WFMModelConfig(path=str(folder))
    shape = read_shape(model, mock_data(size={"frames": 33, "height": 480, "width": 832}))
    assert shape is not None
    assert (
        shape.tokens_per_term == 9 * (480 // 32) * (832 // 32) == 3510
    )  # 4 x 16 x 16 to a place, 1 x 2 x 2 to a token


def test_a_model_without_an_autoencoder_is_refused_before_anything_starts(tmp_path):
    folder = pipeline(tmp_path, transformer=WAN_2_2_5B)
    with pytest.raises(UserError, match="has no vae"):
        read_shape(WFMModelConfig(path=str(folder)), mock_data())


@pytest.mark.parametrize("name", ["AutoencoderKLWan", "AutoencoderKL", "AutoencoderDC"])
def test_what_a_configuration_leaves_out_is_as_in_diffusers(name):
    import diffusers

    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    assert compression(name, {}) == compression(name, defaults)


@pytest.mark.parametrize("targets", ["family", "all-linear", ("to_q",)])
def test_adapters_are_counted_on_the_layers_that_get_them(tmp_path, targets):
    pytest.importorskip("peft", reason="an extra of the package")
    folder = tmp_path / "model"
    config = {"family": "cosmos", "network": {**tiny_network("cosmos", codec="pixels")}, "codec": "pixels"}
    policy = build_policy(pixel_model(**config), data=mock_data(), sampling=None, seed=0, setup=ModelSetup())
    policy.save_config(folder)
    model = model_at(folder).model_copy(update={"lora": WFMLoraSection(rank=2, target_modules=targets)})
    shape = read_shape(model, mock_data())
    built = build_policy(
        pixel_model(**config, lora=model.lora.model_dump()),
        data=mock_data(),
        sampling=None,
        seed=0,
        setup=ModelSetup(),
    )
    trained = [parameter for parameter in built.module.parameters() if parameter.requires_grad]
    assert shape is not None and shape.adapter_parameters == sum(parameter.numel() for parameter in trained)


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
        look_up_parts(load_config(recipe), WFM)
