"""OpenVLA's public files: names both ways, what is missing or unknown, statistics, configuration, tokenizer."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.actions import ActionStats, Gripper
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.families import export_weights, load
from cosmos_rl_vla.models.instructions import Instructions
from cosmos_rl_vla.models.openvla.checkpoint import OpenVLANames
from cosmos_rl_vla.models.openvla.config import TOWERS, tiny
from cosmos_rl_vla.models.openvla.family import random_openvla, read_config
from cosmos_rl_vla.models.openvla.stats import published_stats, to_published
from cosmos_rl_vla.normalise import Spread

SCRATCH = VLAModelConfig(
    family="openvla_oft", action_dim=2, state_dim=2, horizon=3, words=("reach the red square",), temperature=1.6
)
TIMM = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")


def observations():
    generator = torch.Generator().manual_seed(0)
    return Inputs(
        images=torch.randint(0, 256, (2, 1, 32, 32, 3), generator=generator).to(torch.uint8),
        state=torch.rand(2, 2, generator=generator),
        tokens=torch.tensor([[2, 3, 4], [2, 5, 0]]),
        token_mask=torch.tensor([[True, True, True], [True, True, False]]),
    )


def act(loaded):
    return loaded.model.act(observations(), randomness=Randomness(seeds=[1, 2], places=[0, 0]))


@pytest.fixture
def saved(tmp_path):
    """A tiny model as OpenVLA publishes one: timm's names, with the parts of its towers that are never read."""
    loaded = load(SCRATCH, stats=ActionStats.unit(2))
    weights = dict(export_weights(SCRATCH, loaded.weights().items(), merge_adapters=True))
    unread = {"norm.weight": 48, "blocks.2.norm1.weight": 48, "blocks.2.attn.qkv.bias": 144, "attn_pool.latent": 48}
    for place in ("featurizer", "fused_featurizer"):
        weights |= {f"vision_backbone.{place}.{name}": torch.ones(size) for name, size in unread.items()}
    weights["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    loaded.save_config(tmp_path)
    save_file({name: tensor.detach() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    return tmp_path, loaded


def test_a_model_in_the_public_form_acts_as_the_one_that_was_saved(saved):
    directory, loaded = saved
    again = load(VLAModelConfig(path=str(directory), seed=7))
    found, expected = act(again), act(loaded)
    assert torch.equal(found.replay["tokens"], expected.replay["tokens"])
    assert torch.equal(found.logprobs, expected.logprobs) and torch.equal(found.values, expected.values)
    assert again.instructions(["reach red"], np.zeros((1, 2))).tokens.tolist() == [[2, 3, 4]]


def test_names_are_those_of_the_public_files(saved):
    names = load_file(saved[0] / "model.safetensors")
    vision = "vision_backbone.featurizer"
    for name, shape in {
        f"{vision}.cls_token": (1, 1, 48),
        f"{vision}.reg_token": (1, 4, 48),
        f"{vision}.pos_embed": (1, 16, 48),
        f"{vision}.patch_embed.proj.weight": (48, 3, 8, 8),
        f"{vision}.blocks.1.attn.qkv.weight": (144, 48),
        f"{vision}.blocks.1.attn.proj.bias": (48,),
        f"{vision}.blocks.1.ls2.scale_factor": (48,),
        f"{vision}.blocks.1.mlp.fc1.weight": (192, 48),
        "vision_backbone.fused_featurizer.pos_embed": (1, 16, 48),
        "vision_backbone.fused_featurizer.blocks.0.norm2.bias": (48,),
        "projector.fc3.bias": (96,),
        "proprio_projector.fc1.weight": (96, 2),
        "language_model.model.embed_tokens.weight": (7 + 256 + 64, 96),
        "language_model.lm_head.weight": (7 + 256 + 64, 96),
    }.items():
        assert names[name].shape == shape, name


def test_queries_keys_and_values_are_thirds_of_one_matrix_of_theirs():
    names = OpenVLANames(tuple(TOWERS.values()))
    owners = names.owners("vision_backbone.fused_featurizer.blocks.3.attn.qkv.bias")
    ours = [f"vision_backbone.fused_featurizer.encoder.layers.3.self_attn.{x}_proj.bias" for x in "qkv"]
    assert [(owner.name, owner.part, owner.parts) for owner in owners] == [(x, i, 3) for i, x in enumerate(ours)]


@pytest.mark.parametrize("family", ["openvla", "openvla_oft"])
def test_every_parameter_finds_its_way_back_from_its_public_name(family):
    config = tiny(family, num_words=9, horizon=1, action_dim=2, state_dim=3)
    names, model = OpenVLANames(config.towers), random_openvla(config, seed=0)
    for name in model.state_dict():
        assert [owner.name for owner in names.owners(names.public_name(name))] == [name]


def test_missing_and_unknown_weights_are_named_as_the_file_names_them(saved):
    directory, _ = saved
    weights = load_file(directory / "model.safetensors")
    del weights["vision_backbone.featurizer.blocks.0.ls1.scale_factor"], weights["value_head.norm.weight"]
    weights["vision_backbone.featurizer.blocks.7.norm1.weight"] = torch.ones(48)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(
        UserError, match=r"lacks 1 weights \(\S+ls1.scale_factor\) and has unknown 1 weights \(\S+blocks.7"
    ):
        load(VLAModelConfig(path=str(directory)))


def test_a_critic_that_is_not_there_is_drawn(saved):
    directory, _ = saved
    weights = load_file(directory / "model.safetensors")
    save_file({n: t for n, t in weights.items() if "value_head" not in n}, directory / "model.safetensors")
    first, again, other = (act(load(VLAModelConfig(path=str(directory), seed=seed))).values for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_weights_of_another_shape_are_named(saved):
    directory, _ = saved
    weights = load_file(directory / "model.safetensors")
    weights["vision_backbone.featurizer.blocks.0.attn.qkv.weight"] = torch.ones(141, 48)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"attn\.qkv\.weight is \[47, 48\] .* and \[48, 48\]"):
        load(VLAModelConfig(path=str(directory)))


def test_a_recipe_chooses_over_what_was_saved(saved):
    directory, _ = saved
    chosen = VLAModelConfig(path=str(directory), horizon=5, temperature=0.5, critic={"per": "action", "hidden": (128,)})
    model = load(chosen).model
    assert (model.horizon, model.value_dim, model.config.temperature) == (5, 5, 0.5)
    model = load(chosen.model_copy(update={"critic": None})).model
    assert (model.horizon, model.value_dim, model.config.temperature) == (5, 1, 0.5)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_steps": 3}, "num_steps: OpenVLA samples tokens"),
        ({"critic": {"place": "expert"}}, "its critic reads the output from which the first"),
        ({"family": "openvla"}, "is of openvla_oft, not of openvla"),
        ({"train": "expert"}, "OpenVLA has no expert"),
        ({"action_dim": 3}, "statistics of 2-dimensional actions"),
    ],
)
def test_keys_that_do_not_fit_are_named(saved, keys, said):
    with pytest.raises(UserError, match=said):
        load(VLAModelConfig(path=str(saved[0]), **keys))


def public(directory, **keys):
    """A directory like openvla/openvla-7b, without its weights."""
    held = {
        "model_type": "openvla",
        "timm_model_ids": list(TIMM),
        "text_config": {"model_type": "llama", "pad_token_id": 32000, "torch_dtype": "bfloat16", "vocab_size": 32064},
        "pad_to_multiple_of": 64,
        "n_action_bins": 256,
        **keys,
    }
    (directory / "config.json").write_text(json.dumps(held))
    save_file({"projector.fc1.bias": torch.ones(1)}, directory / "model.safetensors")
    return directory


def test_the_public_config_is_that_of_the_7b_models(tmp_path):
    config = read_config(public(tmp_path), family="openvla", action_dim=7)
    assert [tower.timm_id for tower in config.towers] == list(TIMM)
    assert config.language == {"pad_token_id": 32000, "vocab_size": 32064}
    assert (config.first_token, config.horizon, config.state_dim, config.prompt) == (31_744, 1, 0, "openvla")
    config.check()


def test_proprioception_is_read_if_its_projector_is_there(tmp_path):
    public(tmp_path)
    save_file({"proprio_projector.fc1.weight": torch.ones(5, 8)}, tmp_path / "proprio_projector--9000.safetensors")
    config = read_config(tmp_path, family="openvla_oft", action_dim=7)
    assert (config.state_dim, config.horizon) == (8, 8)


def test_what_a_public_directory_does_not_say_is_asked_for(tmp_path):
    with pytest.raises(UserError, match='set \\[model\\] family to "openvla" or "openvla_oft"'):
        read_config(public(tmp_path), family=None, action_dim=7)
    with pytest.raises(UserError, match="vision towers resnet; supported are vit_large"):
        read_config(public(tmp_path, timm_model_ids=["resnet"]), family="openvla", action_dim=7)
    with pytest.raises(UserError, match="language model of type 'phi'"):
        read_config(public(tmp_path, text_config={"model_type": "phi"}), family="openvla", action_dim=7)


def statistics(low, high):
    numbers = {"mean": [0.1, 0.5], "std": [1.0, 0.5], "min": [-9.0, 0.0], "max": [9.0, 1.0]}
    return {"action": {**numbers, "q01": low, "q99": high, "mask": [True, False]}}


def test_statistics_of_libero_say_what_its_gripper_wants(tmp_path):
    state = {"mean": [0.0], "std": [1.0], "q01": [-2.0], "q99": [2.0]}
    held = {"libero_10_no_noops": {**statistics([-1, 0], [3, 1]), "proprio": state, "num_transitions": 9}}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(held))
    stats = published_stats(tmp_path, key="")
    assert stats.gripper == Gripper(dim=-1, unit=True, binary=True, invert=True)
    # the first number stretches to its percentiles; the gripper's 0 .. 1 becomes open -1, close 1
    actions = stats.unnormalise(np.array([[-1, 0.9], [1, 0.1]], np.float32))
    np.testing.assert_allclose(actions, [[-1, -1], [3, 1]], atol=1e-6)
    np.testing.assert_allclose(stats.normalise_state(np.array([1.0])), [0.5])


def test_statistics_of_a_dimension_that_hardly_moves_use_its_range(tmp_path):
    numbers = {**statistics([0, 3], [0, 3])["action"], "mean": [0, 3], "min": [0, 3], "max": [1, 3]}
    numbers["mask"] = [True, True]
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"bridge": {"action": numbers}}))
    stats = published_stats(tmp_path, key="bridge")
    assert stats.normalise(np.array([[0, 3], [1, 3]])).tolist() == [[-1, 0], [1, 0]]


def test_a_dataset_is_chosen_by_its_key(tmp_path):
    public(tmp_path, norm_stats={"bridge": statistics([-1, 0], [1, 1]), "fractal": statistics([-2, 0], [2, 1])})
    stats = published_stats(tmp_path, key="fractal")
    assert stats.action.q99.tolist() == [2, 1] and stats.gripper is None and stats.state is None
    with pytest.raises(UserError, match="set \\[model\\] unnorm_key to one of bridge, fractal"):
        published_stats(tmp_path, key="")
    with pytest.raises(UserError, match="no statistics of 'libero', but of bridge, fractal"):
        published_stats(tmp_path, key="libero")


def test_a_file_of_statistics_serves_for_any_model(tmp_path):
    path = tmp_path / "dataset_statistics.json"
    path.write_text(json.dumps({"mine": statistics([-1, 0], [3, 1])}))
    assert load(SCRATCH.model_copy(update={"stats": str(path)})).stats.action.q99.tolist() == [3, 1]


def test_without_statistics_nothing_is_loaded():
    with pytest.raises(UserError, match="no action statistics"):
        load(SCRATCH)


@pytest.mark.parametrize("kind", ["quantile", "mean_std"])
def test_statistics_are_published_as_they_are_read(kind):
    values = np.random.default_rng(0).normal(2, 3, (99, 3))
    stats = ActionStats(action=Spread.of(values, kind=kind, mask=np.array([True, True, False])))
    held = to_published(stats)["action"]
    again = Spread.from_json({**held, "kind": "quantile"}, origin="")
    np.testing.assert_allclose(again.normalise(values), stats.normalise(values), rtol=1e-4, atol=1e-5)


def llama_tokenizer(*words):
    names = ("<unk>", "<s>", "</s>", "▁", *words)
    tokenizer = Tokenizer(WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def test_the_prompt_is_openvlas(tmp_path):
    llama_tokenizer("In", "open", ":").save(str(tmp_path / "tokenizer.json"))
    instructions = Instructions.load(tmp_path, format="openvla", max_length=40)
    said = instructions.prompt("Open the  Drawer", np.zeros(2))
    assert said == "<s>In: What action should the robot take to open the drawer?\nOut:"
    tokens = instructions(["Open"], np.zeros((1, 2))).tokens[0].tolist()
    assert tokens[:3] == [1, 4, 6] and tokens[-2:] == [6, 3] and 5 in tokens  # ... "Out" ":" and the empty word


def test_a_tokenizer_of_another_family_is_named(tmp_path):
    Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"has no token <s>, .* use Llama 2's tokenizer"):
        Instructions.load(tmp_path, format="openvla", max_length=40)


def test_a_crop_is_kept_with_the_model(tmp_path):
    loaded = load(SCRATCH.model_copy(update={"image_crop": 0.9}), stats=ActionStats.unit(2))
    loaded.save_config(tmp_path)
    assert read_config(tmp_path, family=None, action_dim=2) == replace(loaded.model.config, image_crop=0.9)
