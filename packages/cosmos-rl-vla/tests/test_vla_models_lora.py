"""Low-rank adapters of pi and OpenVLA models: what is trained, sent, saved, merged; the base as the reference."""

import json

import pytest
import torch
from safetensors.torch import save_file

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.lora import without_adapters
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.build import build_policy
from cosmos_rl_vla.config import VLADataConfig, VLAModelConfig, VLASampling
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.families import export_weights, load
from cosmos_rl_vla.preflight import model_problems

pytest.importorskip("peft", reason="an extra of the package")

FAMILIES = pytest.mark.parametrize("family", ["pi05", "openvla", "openvla_oft"])
DATA = VLADataConfig(simulator="reach", tasks=("red",))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A saved tiny model of each family."""
    found = {}
    for family in ("pi05", "openvla", "openvla_oft"):
        config = VLAModelConfig(family=family, action_dim=2, state_dim=2, words=("reach the red square",))
        loaded, directory = load(config, stats=ActionStats.unit(2)), tmp_path_factory.mktemp(family)
        save(loaded.save_config, export_weights(config, loaded.weights().items(), merge_adapters=True), directory)
        found[family] = VLAModelConfig(path=str(directory), lora={"rank": 2, "alpha": 6.0})
    return found


def save(config, weights, directory):
    config(directory)
    save_file({name: tensor.detach().contiguous() for name, tensor in weights}, directory / "model.safetensors")


def stirred(config):
    """A model whose B, and whose critic, have values as a few steps would give them."""
    loaded, generator = load(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.trained_weights().values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return loaded


def inputs():
    generator = torch.Generator().manual_seed(0)
    return Inputs(
        images=torch.randint(0, 256, (2, 1, 32, 32, 3), generator=generator).to(torch.uint8),
        state=torch.rand(2, 2, generator=generator),
        tokens=torch.tensor([[2, 3, 4], [2, 5, 6]]),
        token_mask=torch.ones(2, 3, dtype=torch.bool),
    )


def act(loaded, *, greedy=False):
    return loaded.model.act(inputs(), randomness=Randomness(seeds=[1, 2], places=[0, 0]), greedy=greedy)


@FAMILIES
def test_training_starts_at_the_base(bases, family):
    base = load(bases[family].model_copy(update={"lora": None}))
    found, expected = act(load(bases[family])), act(base)
    assert torch.equal(found.actions, expected.actions) and torch.equal(found.logprobs, expected.logprobs)


@FAMILIES
def test_adapters_and_the_critic_are_trained_and_travel_and_nothing_else(bases, family):
    loaded = stirred(bases[family])
    evaluated = loaded.model.evaluate(inputs(), act(loaded).replay)
    (evaluated.logprobs.sum() + evaluated.values.sum()).backward()
    moved = {name for name, parameter in loaded.model.named_parameters() if parameter.grad is not None}
    assert moved and all(".lora_" in name or name.startswith("value_head.") for name in moved)
    sent = loaded.weights()
    assert sent.keys() == loaded.trained_weights().keys()
    assert all(name.startswith(("base_model.model.", "value_head.")) for name in sent)
    assert sum(tensor.numel() for tensor in sent.values()) < sum(p.numel() for p in loaded.model.parameters()) / 4


@FAMILIES
def test_a_merged_export_acts_as_the_model_with_its_adapters(bases, family, tmp_path):
    config, loaded = bases[family], stirred(bases[family])
    save(loaded.save_config, export_weights(config, loaded.weights().items(), merge_adapters=True), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == config.path
    merged = load(VLAModelConfig(path=str(tmp_path)))
    replay = act(loaded).replay
    found, expected = (x.model.evaluate(inputs(), replay) for x in (merged, loaded))
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.values, expected.values, atol=1e-5, rtol=1e-5)
    base = load(config.model_copy(update={"lora": None})).model.evaluate(inputs(), replay)
    assert (base.logprobs - expected.logprobs).abs().max() > 0.01


def test_adapters_are_exported_as_they_are_if_they_are_to_be_kept(bases):
    config = bases["openvla_oft"]
    weights = load(config).weights()
    kept = dict(export_weights(config, weights.items(), merge_adapters=False))
    assert kept.keys() == weights.keys()


@FAMILIES
def test_the_reference_is_the_model_under_the_adapters(bases, family):
    policy = build_policy(bases[family], data=DATA, sampling=VLASampling(), seed=0, setup=ModelSetup())
    assert policy.reference() is not None
    loaded = stirred(bases[family])
    with without_adapters(loaded.model):
        off = act(loaded, greedy=True).actions
    assert torch.equal(off, act(load(bases[family]), greedy=True).actions)
    assert not torch.equal(off, act(loaded, greedy=True).actions)


def test_without_adapters_a_reference_has_to_be_built(bases):
    config = bases["openvla"].model_copy(update={"lora": None})
    assert build_policy(config, data=DATA, sampling=None, seed=0, setup=ModelSetup()).reference() is None


def test_layers_are_chosen_by_the_ends_of_their_names(bases):
    config = VLAModelConfig(path=bases["openvla"].path, lora={"target_modules": ("self_attn.q_proj", "fc2")})
    weights = load(config).weights()
    layers = {name.partition(".lora_")[0] for name in weights if ".lora_" in name}
    assert all(name.endswith((".self_attn.q_proj", ".fc2")) for name in layers)
    assert "base_model.model.language_model.model.layers.1.self_attn.q_proj" in layers
    assert "base_model.model.projector.fc2" in layers


def test_layers_that_are_not_there_are_named(bases):
    config = VLAModelConfig(path=bases["pi05"].path, lora={"target_modules": ("q_prj",)})
    with pytest.raises(UserError, match=r"ends in q_prj; it has .*q_proj"):
        load(config)
    (problem,) = model_problems(config)
    assert (problem.key, "ends in q_prj; it has" in problem.wrong) == ("model.lora.target_modules", True)
    assert not [*model_problems(bases["pi05"])]


@pytest.mark.parametrize(
    ("keys", "said"),
    [({"action_dim": 2, "state_dim": 2}, "set path"), ({"path": "x", "train": "expert"}, "remove one of them")],
)
def test_adapters_want_a_model_to_adapt(keys, said):
    with pytest.raises(ValueError, match=said):
        VLAModelConfig(lora={}, **keys)
