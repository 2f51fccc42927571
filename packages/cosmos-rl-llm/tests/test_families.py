"""Families that differ from a plain transformer: states, dropout, scaled logits, masks; and which are refused."""

import asyncio
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from llm_parity import differences, train, train_rank
from small_families import gradients, one_at_a_time, packed, sample, small
from tiny_engine import TokenChat
from transformers import AutoConfig, LlamaForCausalLM, LlamaModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.engines.torch.engine import TorchEngine
from cosmos_rl_llm.model.miniature import VOCABULARY, miniature, shrink
from cosmos_rl_llm.policy import packing
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.probe import runs_unpacked
from doubles.ranks import run_ranks

PACKED = {
    "cohere": {},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 6.0},
    "hyperclovax": {"logits_scaling": 0.125},
    "minimax_m2": {},
    "phimoe": {"sliding_window": 131_072},
    "seed_oss": {"residual_dropout": 0.1},
}
UNPACKED = {
    "falcon_h1": {"lm_head_multiplier": 2.0},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "qwen3_5_text": {},
}
FAMILIES = {**PACKED, **UNPACKED}
LATER = {"granitemoe", "hyperclovax", "qwen3_5_text"}
"""Of the slow suite: in the other one, others stand for them."""
REFUSED = {
    "deepseek_v32": "sparse attention",
    "doge": "its own mask",
    "inkling_text": "position_bias",
    "llama4_text": "no list of decoder layers",
    "nemotron": "does not pass keywords on",
}


def samples(*sizes):
    """Groups of two rollouts with one prompt, of `sizes` and half of them."""
    rng = np.random.default_rng(0)
    found = []
    for size in sizes:
        prompt = rng.integers(20, VOCABULARY, 6, dtype=np.int32)
        found += [sample(prompt, rng.integers(20, VOCABULARY, n, dtype=np.int32)) for n in (size, 1 + size // 2)]
    return found


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in LATER)) for k in FAMILIES])
def test_packed_rollouts_equal_transformers_one_at_a_time(kind):
    model, reference, given = small(kind, **FAMILIES[kind]), small(kind, **FAMILIES[kind]), samples(12, 25)
    policy = CausalLMPolicy(model)
    policy.module.train()  # whoever calls it
    found, wanted = policy.forward(packed(given)).logprobs, one_at_a_time(reference, given)
    assert policy.module.unpacked == (kind in UNPACKED)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    right, mine = gradients(reference, wanted), gradients(model, found)
    largest = max(gradient.abs().max().item() for gradient in right.values())
    assert mine.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-4 * largest, msg=name)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_cannot_be_right_is_refused_by_name(kind):
    with pytest.raises(UserError, match=REFUSED[kind]) as error:
        CausalLMPolicy(small(kind))
    assert kind.partition("_")[0] in str(error.value).lower()


class LeakyModel(LlamaModel):
    """A decoder whose tokens get a part of what lies at the same place in other rows of the batch."""

    def forward(self, *given, **keywords):
        output = super().forward(*given, **keywords)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.flip(0).roll(5, dims=1)
        return output


class LeakyForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = LeakyModel(config)


class CarryingModel(LlamaModel):
    """A decoder with a state: every token gets the sum of those before it."""

    def forward(self, *given, **keywords):
        output = super().forward(*given, **keywords)
        output.last_hidden_state = output.last_hidden_state.cumsum(dim=1)
        return output


class CarryingForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = CarryingModel(config)


def test_a_model_that_leaks_into_other_rows_is_refused():
    with pytest.raises(UserError, match=r"LeakyForCausalLM are [\d.]+ nats from transformers'"):
        CausalLMPolicy(miniature(LeakyForCausalLM, AutoConfig.for_model("llama")))


def test_a_state_that_no_configuration_tells_of_is_found():
    model, reference = (miniature(CarryingForCausalLM, AutoConfig.for_model("llama")) for _ in range(2))
    given = samples(9)
    found = CausalLMPolicy(model).forward(packed(given)).logprobs
    torch.testing.assert_close(found, one_at_a_time(reference, given), rtol=0, atol=2e-5)


def test_the_torch_engine_refuses_a_family_with_a_state():
    async def start():
        await TorchEngine(small("lfm2", **UNPACKED["lfm2"]), TokenChat(), LLMTorchOptions()).close()

    with pytest.raises(UserError, match=r'engine = "torch" .* Lfm2ForCausalLM .* set rollout.engine = "vllm"'):
        asyncio.run(start())


@dataclass
class MeshOf:
    """A mesh with some axes above 1."""

    axes: tuple[str, ...]
    device = torch.device("cpu")

    def axis(self, name):
        return self if name in self.axes else None


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_family_with_a_state_is_not_cut_along_it(axis):
    model = small("lfm2", **UNPACKED["lfm2"])
    with pytest.raises(UserError, match=rf"\[policy.parallel\] {axis}: layers of Lfm2ForCausalLM carry a state"):
        runs_unpacked(model, mesh=MeshOf((axis,)))
    assert runs_unpacked(model, mesh=MeshOf(()))


def test_a_family_that_does_not_run_in_bfloat16_is_refused():
    model = small("mamba2").to(torch.bfloat16)
    with pytest.raises(UserError, match=r'model.dtype: Mamba2ForCausalLM does not run in bfloat16 .*"float32"'):
        CausalLMPolicy(model)


def test_a_small_configuration_keeps_one_layer_of_each_kind_and_its_options():
    values = AutoConfig.for_model("lfm2", layer_types=["conv", "conv", "full_attention"] * 4, num_hidden_layers=12)
    small_values = shrink(values.to_dict())
    assert small_values["layer_types"] == ["conv", "full_attention", "conv", "full_attention"]
    assert small_values["num_hidden_layers"] == 4
    assert small_values["conv_L_cache"] == values.conv_L_cache
    assert shrink(small_values) == small_values


def test_a_list_as_long_as_the_model_is_deep_is_not_thereby_one_by_layer():
    values = AutoConfig.for_model("llama", num_hidden_layers=2, eos_token_id=[1, 2]).to_dict()
    assert shrink({**values, "time_step_limit": [0.0, 5.0]})["time_step_limit"] == [0.0, 5.0]
    assert shrink({**values, "layer_types": ["a", "b"]})["layer_types"] == ["a", "b", "a", "b"]


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "laguna"])
def test_a_parameter_that_a_family_never_trains_is_delivered(kind):
    policy = CausalLMPolicy(small(kind))
    frozen = [name for name, parameter in policy.module.named_parameters() if not parameter.requires_grad]
    assert frozen and all("e_score_correction_bias" in name for name in frozen)
    assert policy.rollout_weights().keys() == policy.weights().keys()


class CountingMesh(MeshOf):
    """Another rank has three blocks."""

    def most_over_shards(self, value):
        return max(value, 3)


def test_a_rank_with_fewer_blocks_makes_as_many_passes_as_the_others():
    model, reference, given = small("lfm2", **UNPACKED["lfm2"]), small("lfm2", **UNPACKED["lfm2"]), samples(9)
    policy, passes = CausalLMPolicy(model), []
    policy.module.mesh = CountingMesh(())
    model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    found = policy.forward(packed(given)).logprobs
    assert len(passes) == 3
    torch.testing.assert_close(found, one_at_a_time(reference, given), rtol=0, atol=2e-5)
    expected = gradients(reference, one_at_a_time(reference, given))
    for name, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-4, msg=name)


def train_ragged_rank(rank, world_size, **options):
    packing._MAX_PADDING_TERMS = 1  # short sequences of other lengths lie in other blocks, and ranks have other numbers
    return train_rank(rank, world_size, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"dp_replicate": 2}, {"dp_shard": 2, "pp": 2}], ids=str)
def test_ranks_with_other_numbers_of_blocks_train_a_family_with_a_state(dims):
    options = {"family": "qwen3.5", "algorithm": "grpo", "num_layers": 4}
    ranks = run_ranks(train_ragged_rank, math.prod(dims.values()), dims=dims, **options)
    found = differences(train(**options), ranks)
    of_gradients = [error for name, error in found.items() if name.startswith("grad")]  # the norm of each step too
    assert max(of_gradients) <= 1e-4  # as for every family (docs/families.md): a recurrence adds in another order
    assert max(error for name, error in found.items() if not name.startswith("grad")) <= 1e-5
