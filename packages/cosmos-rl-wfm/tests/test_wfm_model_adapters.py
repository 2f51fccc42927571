"""Low-rank adapters: what is trained, named, merged and written, and the base as the reference."""

import re

import pytest
import torch
from safetensors.torch import save_file
from wfm_fixtures import FAMILIES, noise, tiny_model

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.parallel.lora import adapter_weights, base_name, merge, without_adapters
from cosmos_rl_wfm.build import export_weights
from cosmos_rl_wfm.models.config import TextSection, WFMLoraSection, WFMModelConfig

pytest.importorskip("peft", reason="an extra of the package")

LORA = WFMLoraSection(rank=4, alpha=6.0)


def model(family="wan", *, lora=LORA, seed=0):
    return tiny_model(family, lora=lora, seed=seed)


def trained(family="wan"):
    """A model whose B have values, as a few steps would give them."""
    built = model(family)
    generator = torch.Generator().manual_seed(1)
    for name, weight in adapter_weights(built.network).items():
        if "lora_B" in name:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return built


def velocity(built):
    return built.velocity(noise(built), torch.tensor([0.6]), built.encode_text(["a red square"]))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_training_starts_at_the_base_network(family):
    assert torch.equal(velocity(model(family)), velocity(model(family, lora=None)))


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_alone_are_trained(family):
    built = trained(family)
    velocity(built).pow(2).sum().backward()
    parameters = dict(built.network.named_parameters())
    wanted = {name for name in parameters if base_name(name) is None}
    assert wanted == {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert wanted == {name for name, parameter in parameters.items() if parameter.grad is not None}


def test_the_family_says_which_layers_are_adapted():
    names = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in adapter_weights(model().network)}
    attention = ("to_q", "to_k", "to_v", "to_out.0")
    assert names == {f"blocks.{n}.attn{a}.{end}" for n in (0, 1) for a in (1, 2) for end in attention}


def test_layers_can_be_named_and_unknown_ones_are_refused():
    chosen = adapter_weights(model(lora=WFMLoraSection(target_modules=("ffn.net.2", "attn1.to_q"))).network)
    assert len(chosen) == 2 * 2 * 2
    with pytest.raises(UserError, match=r"no linear layer whose name ends in q_proj; it has .*attn1.to_q"):
        model(lora=WFMLoraSection(target_modules=("q_proj",)))
    assert len(adapter_weights(model(lora=WFMLoraSection(target_modules="all-linear")).network)) > 32


def test_weights_for_the_engines_are_the_adapters_alone():
    built = model()
    assert built.weights().keys() == adapter_weights(built.network).keys()
    assert all(tensor.dtype == torch.float32 for tensor in built.weights().values())


def test_first_values_depend_on_the_seed_alone():
    first, same, other = (adapter_weights(model(seed=seed).network) for seed in (3, 3, 4))
    name = "base_model.model.blocks.1.attn1.to_q.lora_A.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    bound = 24**-0.5
    assert 0.8 * bound < first[name].abs().max() <= bound


@torch.no_grad()
def test_inside_the_base_counts_and_outside_the_adapters():
    built = trained()
    with_adapters = velocity(built)
    with without_adapters(built.network):
        base = velocity(built)
    assert torch.equal(base, velocity(model(lora=None)))
    assert not torch.equal(base, with_adapters)
    assert torch.equal(velocity(built), with_adapters)


def test_switching_leaves_what_is_trained():
    built = trained()
    before = [name for name, parameter in built.network.named_parameters() if parameter.requires_grad]
    with without_adapters(built.network):
        assert before == [name for name, parameter in built.network.named_parameters() if parameter.requires_grad]
    assert before == [name for name, parameter in built.network.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_merged_weights_are_those_of_the_adapted_network(family):
    built, plain = trained(family), model(family, lora=None)
    config = WFMModelConfig(family=family, tiny=True, text=TextSection(encoder="words"), lora=LORA)
    merged = dict(export_weights(config, built.weights().items(), merge_adapters=True))
    assert not torch.allclose(velocity(plain), velocity(built), atol=1e-3)
    plain.network.load_state_dict(merged)
    torch.testing.assert_close(velocity(plain), velocity(built), atol=1e-5, rtol=1e-5)


def test_merging_by_hand():
    base = {"layer.weight": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "layer.bias": torch.tensor([5.0, 6.0])}
    adapters = {
        "base_model.model.layer.lora_A.weight": torch.tensor([[1.0, 2.0]]),
        "base_model.model.layer.lora_B.weight": torch.tensor([[3.0], [4.0]]),
    }
    merged = dict(merge(base.items(), adapters.items(), scaling=lambda layer: 0.5))
    assert merged["layer.weight"].tolist() == [[2.5, 3.0], [2.0, 5.0]]
    assert merged["layer.bias"].tolist() == [5.0, 6.0]
    with pytest.raises(UserError, match=r"no weight layer.weight for an adapter"):
        dict(merge({}, adapters.items(), scaling=lambda layer: 1.0))


@torch.no_grad()
def test_peft_reads_the_files(tmp_path):
    from peft import PeftModel

    built = trained()
    built.save(tmp_path)
    save_file(built.weights(), tmp_path / "adapter_model.safetensors")
    plain = model(lora=None)
    expected = velocity(built)
    PeftModel.from_pretrained(plain.network, str(tmp_path))  # puts its layers into the network
    torch.testing.assert_close(velocity(plain), expected)


def test_a_missing_peft_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=re.escape(pip_install("cosmos-rl-wfm[lora]"))):
        model()
