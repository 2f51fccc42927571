"""pi models on disk: the public names, transformers' own pi0 as a judge, and directories that do not fit."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vla_fixtures import load_pi, save_pi, small_pi

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.config import ActionNoiseSection as Noise
from cosmos_rl_vla.config import CriticSection as Critic
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.checkpoint import Owner
from cosmos_rl_vla.models.families import make
from cosmos_rl_vla.models.instructions import word_instructions
from cosmos_rl_vla.models.pi.checkpoint import PiNames
from cosmos_rl_vla.models.pi.config import full
from cosmos_rl_vla.models.pi.family import random_pi, read_config
from cosmos_rl_vla.models.pi.model import PiModel

PI0 = small_pi(family="pi0", state="suffix", prompt="pi0", value=Critic(place="expert", pool="mean", hidden=(16,)))
PI05 = replace(PI0, family="pi05", state="text", prompt="pi05", value=Critic(pool="mean", hidden=(16,)))
DRAW = Randomness(seeds=[1, 2], places=[0, 0])


def observations(*, cameras=2):
    generator = torch.Generator().manual_seed(0)
    return Inputs(
        images=torch.randint(0, 256, (2, cameras, 16, 16, 3), generator=generator).to(torch.uint8),
        state=torch.randn(2, 6, generator=generator),
        tokens=torch.randint(3, 19, (2, 5), generator=generator),
        token_mask=torch.arange(5) < torch.tensor([[5], [3]]),
    )


def edit(directory, change):
    """Rewrite the weights of a directory: `change` takes and returns {name: tensor}."""
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)


@pytest.mark.parametrize("config", [PI0, PI05], ids=["pi0", "pi05"])
def test_a_saved_model_acts_as_it_did(config, tmp_path):
    model = random_pi(config, seed=0)
    save_pi(model, tmp_path)
    loaded, fresh = load_pi(tmp_path, seed=1)
    assert fresh == []
    assert loaded.config == config
    for name in ("actions", "logprobs", "values"):
        wanted, found = (getattr(m.act(observations(), randomness=DRAW), name) for m in (model, loaded))
        assert torch.equal(wanted, found)


def test_the_velocity_of_pi0_is_that_of_transformers():
    from transformers import PI0Config, PI0ForConditionalGeneration

    model, inputs = random_pi(PI0, seed=0), observations()
    paligemma, expert = model.backbone.paligemma.config, PI0.expert
    theirs = PI0ForConditionalGeneration(
        PI0Config(
            vlm_config={**paligemma.to_dict(), "image_token_index": 19},
            dit_config={
                "model_type": "gemma",
                "hidden_size": expert.width,
                "num_hidden_layers": expert.depth,
                "intermediate_size": expert.mlp,
                "num_attention_heads": expert.heads,
                "num_key_value_heads": expert.kv_heads,
                "head_dim": expert.head_dim,
                "vocab_size": 20,
            },
            chunk_size=4,
            max_state_dim=6,
            max_action_dim=5,
        )
    )
    renamed = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("backbone.paligemma.", "model.vlm.").replace("denoiser.expert.", "model.dit.")
        name = name.replace("denoiser.action_out_proj.", "action_out_proj.").replace("denoiser.", "embed_action_time.")
        renamed[name] = tensor
    loaded = theirs.load_state_dict({k: v for k, v in renamed.items() if not k.startswith("value_head.")}, strict=False)
    assert loaded.missing_keys == ["model.dit.embed_tokens.weight"]
    assert loaded.unexpected_keys == []

    x, tau = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0.3, 0.8])
    pixels = inputs.images.permute(0, 1, 4, 2, 3).float() / 127.5 - 1
    image_tokens = torch.full((2, 8), 19)
    with torch.no_grad():
        expected = theirs(
            state=inputs.state,
            noise=x,
            timestep=tau,
            input_ids=torch.cat([image_tokens, inputs.tokens], dim=1),
            attention_mask=torch.cat([torch.ones(2, 8, dtype=torch.int64), inputs.token_mask.long()], dim=1),
            pixel_values=pixels,
            pixel_attention_mask=torch.ones(2, 2, dtype=torch.bool),
        ).logits
        found = model.denoiser(x, tau=tau, state=inputs.state, prefix=model.backbone(inputs)).velocity
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)  # they turn the time into angles in float32


@pytest.mark.parametrize(
    ("name", "family", "ours"),
    [
        (
            "model.paligemma_with_expert.paligemma.model.vision_tower.vision_model.post_layernorm.bias",
            "pi05",
            "backbone.paligemma.vision_tower.post_layernorm.bias",
        ),
        (
            "paligemma_with_expert.paligemma.model.vision_tower.post_layernorm.bias",
            "pi05",
            "backbone.paligemma.vision_tower.post_layernorm.bias",
        ),
        (
            "model.paligemma_with_expert.paligemma.language_model.model.layers.3.mlp.up_proj.weight",
            "pi0",
            "backbone.paligemma.language_model.layers.3.mlp.up_proj.weight",
        ),
        (
            "paligemma_with_expert.paligemma.language_model.lm_head.weight",
            "pi0",
            "backbone.paligemma.language_model.embed_tokens.weight",
        ),
        (
            "paligemma_with_expert.paligemma.lm_head.weight",
            "pi05",
            "backbone.paligemma.language_model.embed_tokens.weight",
        ),
        (
            "paligemma_with_expert.gemma_expert.model.layers.0.input_layernorm.dense.bias",
            "pi05",
            "denoiser.expert.layers.0.input_layernorm.dense.bias",
        ),
        ("paligemma_with_expert.gemma_expert.lm_head.weight", "pi05", None),
        ("normalize_inputs.buffer_observation_state.mean", "pi0", None),
        ("state_proj.weight", "pi05", None),
        ("state_proj.weight", "pi0", "denoiser.state_proj.weight"),
        ("action_time_mlp_in.weight", "pi05", "denoiser.time_mlp_in.weight"),
        ("time_mlp_out.bias", "pi0", "denoiser.action_time_mlp_out.bias"),
        ("action_in_proj.bias", "pi0", "denoiser.action_in_proj.bias"),
    ],
)
def test_public_names_of_every_spelling_are_known(name, family, ours):
    assert PiNames(family).owners(name) == (() if ours is None else (Owner(ours),))


@pytest.mark.parametrize("config", [PI0, replace(PI05, state="prefix", aux_dim=1, noise=Noise(kind="learned"))])
def test_every_weight_has_a_public_name_and_comes_back(config):
    model = random_pi(config, seed=0)
    names = model.names
    for name in model.state_dict():
        assert names.owners(names.public_name(name)) == (Owner(name),)


def test_a_published_checkpoint_has_no_critic_and_its_own_is_drawn(tmp_path):
    save_pi(random_pi(PI05, seed=0), tmp_path)
    edit(tmp_path, lambda held: {f"model.{k}": v for k, v in held.items() if not k.startswith("value_head.")})
    _, fresh = load_pi(tmp_path)
    assert fresh
    assert all(name.startswith("value_head.") for name in fresh)


def test_noise_may_be_learned_from_a_checkpoint_that_knew_none(tmp_path):
    save_pi(random_pi(PI05, seed=0), tmp_path)
    config = replace(read_config(tmp_path), noise=Noise(kind="learned", steps="all"))
    _, fresh = load_pi(tmp_path, config=config)
    assert {name.rsplit(".", 2)[0] for name in fresh} == {"denoiser.noise_head"}


def test_missing_and_unknown_weights_are_named_as_the_file_names_them(tmp_path):
    save_pi(random_pi(PI05, seed=0), tmp_path)

    def change(held):
        del held["action_in_proj.bias"]
        return {**held, "lora.weight": torch.zeros(1)}

    edit(tmp_path, change)
    with pytest.raises(UserError, match=r"lacks 1 weights \(action_in_proj.bias\) and has unknown 1 .*lora.weight"):
        load_pi(tmp_path)


def test_a_pi0_checkpoint_read_as_pi05_is_refused(tmp_path):
    save_pi(random_pi(PI0, seed=0), tmp_path)
    with pytest.raises(UserError, match=r"input_layernorm\.dense.*pi0 or pi05"):
        load_pi(tmp_path, config=PI05)


def test_weights_for_other_action_dimensions_are_refused(tmp_path):
    save_pi(random_pi(PI05, seed=0), tmp_path)
    with pytest.raises(UserError, match=r"action_\w+_proj\.\w+ is .* model_action_dim"):
        load_pi(tmp_path, config=replace(PI05, model_action_dim=7))


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    PI05.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"model\.safetensors is not a safetensors"):
        load_pi(tmp_path)


def test_a_directory_without_weights_or_config_says_so(tmp_path):
    with pytest.raises(UserError, match=r"config\.json is not there"):
        load_pi(tmp_path)
    PI05.save(tmp_path)
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_pi(tmp_path)


def test_the_dtype_that_a_cast_export_adds_is_read_over(tmp_path):
    PI05.save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    assert read_config(tmp_path) == PI05


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"horizn": 3}, "unknown horizn"),
        ({"horizon": "three"}, "horizon"),
        ({"family": "pi1"}, "family"),
        ({"model_type": "bert"}, "not of a pi model"),
    ],
)
def test_a_config_with_a_wrong_key_is_refused(tmp_path, change, said):
    PI05.save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=said):
        read_config(tmp_path)


def test_an_unknown_key_inside_a_part_is_named_with_its_place(tmp_path):
    PI05.save(tmp_path)
    path = tmp_path / "config.json"
    held = json.loads(path.read_text())
    held["noise"]["sigma"] = 1
    path.write_text(json.dumps(held))
    with pytest.raises(UserError, match=r"unknown noise\.sigma"):
        read_config(tmp_path)


def test_the_config_of_lerobot_is_read(tmp_path):
    held = {
        "type": "pi05",
        "chunk_size": 50,
        "n_action_steps": 10,
        "max_action_dim": 32,
        "num_inference_steps": 10,
        "image_resolution": [224, 224],
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
    }
    (tmp_path / "config.json").write_text(json.dumps(held))
    assert read_config(tmp_path) == replace(full("pi05", horizon=10, action_dim=7), num_steps=10)


@pytest.mark.parametrize(("norm", "family"), [("dense.weight", "pi05"), ("weight", "pi0")])
def test_the_config_of_openpi_is_read_and_its_weights_tell_the_family(tmp_path, norm, family):
    held = {"action_dim": 32, "action_horizon": 10, "paligemma_variant": "gemma_2b", "precision": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(held))
    name = f"paligemma_with_expert.gemma_expert.model.layers.0.input_layernorm.{norm}"
    save_file({name: torch.zeros(1)}, tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    assert (config.family, config.horizon, config.model_action_dim) == (family, 10, 32)


def test_an_openpi_model_that_was_trained_without_the_state_in_its_prompt_may_say_so(tmp_path):
    held = {"action_dim": 32, "action_horizon": 10, "discrete_state_input": False}
    (tmp_path / "config.json").write_text(json.dumps(held))
    name = "paligemma_with_expert.gemma_expert.model.layers.0.input_layernorm.dense.weight"
    save_file({name: torch.zeros(1)}, tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    assert (config.state, config.prompt) == ("none", "pi0")


def test_a_variant_of_another_size_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"type": "pi0", "paligemma_variant": "gemma_7b"}))
    with pytest.raises(UserError, match="gemma_7b"):
        read_config(tmp_path)


def test_the_full_sizes_are_those_of_the_public_checkpoints():
    with torch.device("meta"):
        model = PiModel(full("pi05", horizon=10, action_dim=7))
    shapes = {model.names.public_name(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["paligemma_with_expert.paligemma.lm_head.weight"] == (257_152, 2048)
    assert shapes["paligemma_with_expert.gemma_expert.model.layers.17.mlp.up_proj.weight"] == (4096, 1024)
    assert shapes["paligemma_with_expert.gemma_expert.model.norm.dense.weight"] == (3072, 1024)
    assert shapes["action_in_proj.weight"] == (1024, 32)
    total = sum(np.prod(shape) for name, shape in shapes.items() if not name.startswith("value_head."))
    assert 3.2e9 < total < 3.4e9


def test_statistics_beside_an_openpi_model_are_read_as_its_family_takes_them(tmp_path):
    numbers = {"mean": [1.0] * 2, "std": [2.0] * 2, "q01": [-3.0] * 2, "q99": [5.0] * 2}
    for config, high in ((PI0, 3.0), (PI05, 5.0)):
        directory = tmp_path / config.family
        (directory / "assets/libero").mkdir(parents=True)
        (directory / "assets/libero/norm_stats.json").write_text(json.dumps({"norm_stats": {"actions": numbers}}))
        config.save(directory)
        word_instructions(["go"]).save(directory)
        stats = make(VLAModelConfig(path=str(directory))).stats
        assert stats.unnormalise(np.ones((1, 2), np.float32)) == pytest.approx(high, abs=1e-5)
