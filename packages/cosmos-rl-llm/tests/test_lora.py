"""Low-rank adapters: what is trained, named, merged, written, sent and switched off."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from llm_parity import FAMILIES, assert_equal, make_batch, train, train_rank
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cosmos_rl_core import run
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.dtensor import whole
from cosmos_rl_core.parallel.lora import adapter_weights, base_name, merge
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Share
from cosmos_rl_llm.config import LLMLoraSection, LLMModelConfig
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.model.causal_lm import load_model, make_model, named_weights
from cosmos_rl_llm.model.miniature import miniature
from cosmos_rl_llm.policy.lora import add_adapters, read_tensors
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.preflight import adapter_problems
from cosmos_rl_llm.tiny import write_sums, write_tiny_model
from doubles.pretend_cuda import pretend_cuda
from doubles.ranks import run_ranks

pytest.importorskip("peft")

SECTION = LLMLoraSection(rank=4, alpha=6.0)


def model(family="qwen3"):
    return make_model({**FAMILIES[family], "num_hidden_layers": 2}, dtype=torch.float32, seed=0)


def adapted(family="qwen3", *, trained=False, seed=0):
    """A model with adapters; `trained` gives B values, as a few steps would."""
    network = model(family)
    add_adapters(network, SECTION, base="some/base", seed=seed)
    if trained:
        generator = torch.Generator().manual_seed(1)
        for name, weight in adapter_weights(network).items():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return network


def microbatch():
    return make_batch(0, share=Share(), supervised=False, microbatch_terms=1000).microbatches[0]


@torch.no_grad()
def logprobs(network):
    return CausalLMPolicy(network).forward(microbatch()).logprobs


def test_training_starts_at_the_base_model():
    assert torch.equal(logprobs(adapted()), logprobs(model()))


def test_adapters_alone_are_trained():
    network = adapted()
    CausalLMPolicy(network).forward(microbatch()).logprobs.sum().backward()
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in network.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in network.named_parameters() if base_name(name) is None}
    assert len(trained) == 2 * 7 * 2  # A and B of q, k, v, o, gate, up, down in two layers


def test_base_weights_keep_their_names_in_the_checkpoint():
    names = {base_name(name) for name, _ in adapted().named_parameters()} - {None}
    assert names == {name for name, _ in model().named_parameters()}


def test_first_values_depend_on_the_seed_alone_and_leave_the_random_state():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, same, other = (adapter_weights(adapted(seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    assert 0.9 / 8 < first[name].abs().max() <= 1 / 8  # uniform within 1 / sqrt(64)


def test_weights_are_the_live_adapters():
    network = adapted()
    weights = CausalLMPolicy(network).weights()
    assert weights.keys() == adapter_weights(network).keys() == named_weights(network).keys()
    weights["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"].fill_(2.0)
    assert network.get_parameter("model.layers.0.mlp.up_proj.lora_B.default.weight")[0, 0] == 2.0


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_give_the_same_logprobs(family):
    network, base = adapted(family, trained=True), model(family)
    merged = dict(merge(base.state_dict().items(), adapter_weights(network).items(), scaling=lambda layer: 6.0 / 4))
    expected = logprobs(network)
    assert not torch.allclose(expected, logprobs(model(family)), atol=1e-3)
    base.load_state_dict(merged)
    torch.testing.assert_close(logprobs(base), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_routers_and_experts_have_no_adapters(family):
    parts = {name.split(".layers.")[1].split(".")[1] for name in adapter_weights(adapted(family))}
    assert parts == {"self_attn"}


def test_target_modules_choose_layers():
    network = model()
    add_adapters(network, LLMLoraSection(target_modules=("q_proj", "v_proj")), base="some/base")
    assert len(adapter_weights(network)) == 2 * 2 * 2


def test_an_unknown_layer_is_told_with_the_known_ones():
    with pytest.raises(UserError, match=r"no linear layer whose name ends in qproj; it has mlp.down_proj, .*q_proj"):
        add_adapters(model(), LLMLoraSection(target_modules=("qproj",)), base="some/base")


def test_the_checks_before_a_run_name_unknown_layers(tmp_path):
    base = write_tiny_model(tmp_path / "base")
    for names, expected in (("q_proj", []), ("qproj", ["no layer's name ends in qproj"])):
        lora = LLMLoraSection(target_modules=(names,))
        found = [problem.wrong for problem in adapter_problems(LLMModelConfig(path=str(base), lora=lora), base)]
        assert found == expected


def test_without_peft_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=re.escape(pip_install("cosmos-rl-llm[lora]"))):
        add_adapters(model(), SECTION, base="some/base")


def test_adapters_of_another_model_are_told():
    name = "base_model.model.model.layers.9.mlp.up_proj.lora_{}.weight"
    adapters = {name.format("A"): torch.zeros(4, 64), name.format("B"): torch.zeros(96, 4)}
    with pytest.raises(UserError, match=r"no weight model\.layers\.9\.mlp\.up_proj\.weight"):
        dict(merge(model().state_dict().items(), adapters.items(), scaling=lambda layer: 1.0))


def test_a_policy_without_adapters_is_no_reference():
    assert CausalLMPolicy(model()).reference() is None


def test_the_base_is_the_reference_and_costs_no_copy():
    policy = CausalLMPolicy(adapted(trained=True))
    with torch.no_grad():
        before = policy.forward(microbatch()).logprobs
        reference = policy.reference().forward(microbatch()).logprobs
        assert torch.equal(policy.forward(microbatch()).logprobs, before)
    assert torch.equal(reference, logprobs(model()))
    assert not torch.equal(before, reference)


def test_a_reference_pass_before_training_leaves_the_gradients():
    gradients = []
    for with_reference in (False, True):
        policy = CausalLMPolicy(adapted(trained=True))
        if with_reference:
            with torch.no_grad():
                policy.reference().forward(microbatch())
        policy.forward(microbatch()).logprobs.sum().backward()
        gradients.append({name: p.grad for name, p in policy.module.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())


def test_transformers_loads_what_is_written(tmp_path):
    base = tmp_path / "base"
    model().save_pretrained(base)
    network = load_model(base, dtype=torch.float32)
    add_adapters(network, SECTION, base=str(base))
    for name, weight in adapter_weights(network).items():
        weight.copy_(torch.full_like(weight, 0.01) if "lora_B" in name else weight)
    policy = CausalLMPolicy(network)
    policy.save_config(tmp_path / "adapters")
    assert (tmp_path / "adapters" / "merged" / "config.json").is_file()
    save_file(dict(policy.weights()), tmp_path / "adapters" / "adapter_model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters")
    found = adapter_weights(loaded)
    assert found.keys() == policy.weights().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in policy.weights().items())
    tokens = torch.arange(12)[None]
    merged = dict(merge(read_tensors(base), found.items(), scaling=lambda layer: 6.0 / 4))
    whole = load_model(base, dtype=torch.float32)
    whole.load_state_dict(merged, strict=False)  # without the tied head
    torch.testing.assert_close(loaded.double()(tokens).logits, whole.double()(tokens).logits, rtol=1e-6, atol=1e-6)


def policy_for_whole_weights(mesh=None):
    """A policy with adapters whose engines take whole weights."""
    parallel = ParallelSection() if mesh is None else ParallelSection(dp_shard=mesh.dims.dp_shard, tp=mesh.dims.tp)
    return CausalLMPolicy(adapted(trained=True), setup=ModelSetup(mesh=mesh, parallel=parallel, sent_adapters="merged"))


def merged_by_export():
    """The adapted layers of the model that an export would write."""
    adapters = adapter_weights(adapted(trained=True))
    merged = dict(merge(named_weights(model()).items(), adapters.items(), scaling=lambda layer: 6.0 / 4))
    layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapters}
    return {f"{layer}.weight": merged[f"{layer}.weight"] for layer in layers}


def test_an_engine_of_whole_weights_gets_them_merged_as_of_the_last_publication():
    policy, expected = policy_for_whole_weights(), merged_by_export()
    sent = policy.rollout_weights()
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())
    frozen = {name: tensor.clone() for name, tensor in policy.module.named_parameters() if "base_layer" in name}
    with torch.no_grad():
        for tensor in policy.weights().values():
            tensor.zero_()
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(policy.rollout_weights()[name], expected[name])  # engines may still read the version before
    policy.before_publish()
    assert policy.rollout_weights()[name] is sent[name]
    assert torch.equal(sent[name], model().get_parameter(name))
    assert all(torch.equal(policy.module.get_parameter(name), tensor) for name, tensor in frozen.items())
    assert policy.weights().keys() == CausalLMPolicy(adapted()).weights().keys()  # a checkpoint has the adapters


def test_merged_weights_are_in_host_memory():
    with pretend_cuda():
        network = adapted(trained=True).to("cuda")
        policy = CausalLMPolicy(network, setup=ModelSetup(sent_adapters="merged"))
        sent = policy.rollout_weights()
    assert {tensor.device.type for tensor in sent.values()} == {"cpu"}
    assert all(torch.equal(sent[name], tensor) for name, tensor in merged_by_export().items())


def merged_over_ranks(rank, world_size, *, dims):
    policy = policy_for_whole_weights(ReplicaMesh.build(ParallelDims(**dims), device=torch.device("cpu")))
    policy.before_publish()
    return {name: whole(tensor) for name, tensor in policy.rollout_weights().items()}


@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=["dp2", "dp2-tp2"])
def test_ranks_merge_their_parts(dims):
    num_ranks = torch.tensor(list(dims.values())).prod().item()
    for sent in run_ranks(merged_over_ranks, num_ranks, dims=dims):
        assert sent.keys() == merged_by_export().keys()
        for name, tensor in merged_by_export().items():
            torch.testing.assert_close(torch.from_numpy(sent[name]), tensor, rtol=0, atol=1e-7)


def test_a_directory_of_adapters_is_no_model_to_train(tmp_path):
    CausalLMPolicy(adapted()).save_config(tmp_path)
    with pytest.raises(UserError, match="contains adapters of another model"):
        load_model(tmp_path, dtype=torch.float32)


def test_export_merges_or_keeps_adapters(tmp_path):
    model("llama").save_pretrained(tmp_path)
    adapters = adapter_weights(adapted("llama", trained=True))
    section = LLMModelConfig(path=str(tmp_path), lora=SECTION)
    kept = dict(LLM.export_weights(section, adapters.items(), merge_adapters=False))
    merged = dict(LLM.export_weights(section, adapters.items(), merge_adapters=True))
    assert kept.keys() == adapters.keys()
    assert merged.keys() == named_weights(model("llama")).keys()
    name = "model.layers.0.mlp.up_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{m}.weight"] for m in "AB")
    torch.testing.assert_close(merged[f"{name}.weight"] - model("llama").get_parameter(f"{name}.weight"), 1.5 * b @ a)


def test_a_grpo_run_trains_and_sends_adapters_alone(tmp_path):
    base = write_tiny_model(tmp_path / "base", num_layers=2, initializer_range=0.1)
    rows, _ = write_sums(tmp_path / "data", below=7, held_out=5)
    result = run(
        {
            "run": {"domain": "llm", "output_dir": str(tmp_path / "run"), "max_steps": 12, "placement": "inline"},
            "model": {"path": str(base), "lora": {"rank": 4, "target_modules": ["q_proj", "up_proj", "down_proj"]}},
            "data": {"path": str(rows), "chat_template": "none", "answer_column": "answer"},
            "algorithm": {"name": "grpo", "kl_coef": 1e-4},
            "policy": {"prompts_per_step": 4, "threads": 1, "optimizer": {"learning_rate": 2e-2}},
            "rollout": {"group_size": 4, "threads": 1, "sampling": {"max_tokens": 4}},
            "reward": {"functions": [{"name": "length", "options": {"max_tokens": 1, "slack_tokens": 3}}]},
            "logging": {"sinks": ["jsonl"]},
        }
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward_mean"] for line in lines]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5  # it learns to stop
    assert lines[0]["kl"] < 1e-5 < lines[-1]["kl"]  # the reference is the base model
    trained = load_file(tmp_path / "run" / "checkpoints" / "step_12" / "policy" / "adapter_model.safetensors")
    assert all("lora_" in name for name in trained)
    assert all(tensor.abs().sum() > 0 for tensor in trained.values())
    adapter_bytes = sum(tensor.nbytes for tensor in trained.values())
    model_bytes = sum(tensor.nbytes for _, tensor in read_tensors(base))
    assert adapter_bytes <= lines[-1]["sync_bytes"] < 1.1 * adapter_bytes < 0.2 * model_bytes
    assert result is not None


@pytest.mark.parametrize(
    "dims", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=lambda dims: "-".join(f"{k}{v}" for k, v in dims.items())
)
def test_ranks_train_the_same_adapters(dims):
    lora = {"rank": 4, "alpha": 6.0}
    one = train("qwen3", lora=LLMLoraSection.model_validate(lora), num_steps=3)
    num_ranks = torch.tensor(list(dims.values())).prod().item()
    ranks = run_ranks(train_rank, num_ranks, family="qwen3", dims=dims, lora=lora, num_steps=3)
    assert_equal(one, ranks)


@pytest.mark.parametrize("dims", [{}, {"dp_shard": 2}, {"tp": 2}], ids=str)
def test_preferences_are_compared_with_the_model_under_the_adapters(dims):
    """As with a second model for the reference, which adapters do without."""
    lora = {"rank": 4, "alpha": 6.0}
    options = {"family": "qwen3", "algorithm": "dpo", "num_steps": 3}
    expected = train(**options, lora=LLMLoraSection.model_validate(lora), copies_reference=True)
    assert expected["loss"][0] == pytest.approx(np.log(2), abs=1e-5)
    assert abs(expected["loss"][2] - np.log(2)) > 1e-3  # the policy has moved away from it
    if dims:
        assert_equal(expected, run_ranks(train_rank, 2, **options, dims=dims, lora=lora))
    else:
        assert_equal(expected, [train(**options, lora=LLMLoraSection.model_validate(lora))], tolerance=1e-7)


@pytest.mark.parametrize("kind", ["falcon_h1", "mamba2", "nemotron_h"])
def test_mixers_that_multiply_inside_a_kernel_have_no_adapter_there(kind):
    """peft refuses out_proj of Mamba, whose kernel reads the weight itself; the other layers have adapters."""
    config = AutoConfig.for_model(kind)
    network = miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    add_adapters(network, SECTION, base="some/base")
    adapted_layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapter_weights(network)}
    assert "in_proj" in adapted_layers and "out_proj" not in adapted_layers
