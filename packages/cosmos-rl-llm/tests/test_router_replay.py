import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import TokenChat
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.remat import checkpoint_activations
from cosmos_rl_core.types import Microbatch, Prompt, Rollout, RolloutGroup, Sampling, Share
from cosmos_rl_llm.config import LLMTorchOptions
from cosmos_rl_llm.data.chat import Encoded
from cosmos_rl_llm.data.collate import collate
from cosmos_rl_llm.engines.torch.engine import TorchEngine
from cosmos_rl_llm.model.causal_lm import decoder_layers, make_model
from cosmos_rl_llm.model.miniature import miniature
from cosmos_rl_llm.policy.packing import PackedLayout, install_attention
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.routing import ExpertLoad, RouteRecorder, install_replay, routers

COMMON = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "eos_token_id": None,
}
FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
    "deepseek_v3": {
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
LENGTH = 12
TOKENS = torch.arange(LENGTH) * 5 % 32


def tiny(family: str = "qwen3_moe") -> PreTrainedModel:
    model = make_model({"model_type": family, **COMMON, **FAMILIES[family]}, dtype=torch.float32, seed=3)
    install_attention(model)
    return model


def hidden_states(
    model: PreTrainedModel, routes: torch.Tensor | None = None, *, tokens: torch.Tensor = TOKENS
) -> torch.Tensor:
    more = {} if routes is None else {"routes": routes}
    return model.base_model(
        input_ids=tokens[None],
        position_ids=torch.arange(len(tokens))[None],
        use_cache=False,
        layout=PackedLayout.of([len(tokens)]),
        **more,
    ).last_hidden_state


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_what_was_chosen_changes_nothing(family):
    model = tiny(family)
    install_replay(model)
    recorder = RouteRecorder(model)
    free = hidden_states(model)
    routes = recorder.take().long()
    torch.testing.assert_close(hidden_states(model, routes), free, rtol=0, atol=0)
    torch.testing.assert_close(recorder.take().long(), routes)


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_of_replayed_experts_come_from_the_routers_own_scores(family):
    model = tiny(family)
    install_replay(model)
    recorder = RouteRecorder(model)
    hidden_states(model)
    routes = recorder.take().long()
    other = (routes + 1) % 4
    free = hidden_states(model, other)
    recorded = recorder.take().long()
    for layer, router in routers(model).items():
        torch.testing.assert_close(recorded[:, layer], other[:, layer])
        gradient = torch.autograd.grad(free.square().sum(), router.get_parameter("weight"), retain_graph=True)[0]
        assert gradient.isfinite().all() and gradient.any()


def test_choices_flip_near_ties_and_replay_holds_them():
    model = tiny()
    install_replay(model)
    recorder = RouteRecorder(model)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in routers(model).values():
            router.get_parameter("weight").mul_(1e-7)  # all scores nearly tied
    before = hidden_states(model)
    routes = recorder.take().long()
    with torch.no_grad():
        for router in routers(model).values():
            weight = router.get_parameter("weight")
            weight += 1e-7 * torch.randn(weight.shape, generator=random)
    free = hidden_states(model)
    assert not torch.equal(recorder.take().long(), routes)
    assert (free - before).abs().max() > 1e-2
    torch.testing.assert_close(hidden_states(model, routes), before, rtol=0, atol=1e-5)


def generate(model: PreTrainedModel, lengths: list[int], **options: Any) -> RolloutGroup:
    """Two rollouts for each of some prompts, all at the same time, in one group."""
    chat = TokenChat(encoded=lambda row: Encoded(text="", tokens=np.arange(row["length"], dtype=np.int32) % 32))
    engine = TorchEngine(model, chat, LLMTorchOptions(max_sequences=8, **options))
    prompts = [Prompt(sample_id=i, row={"length": length}) for i, length in enumerate(lengths)]

    async def work() -> list[Rollout]:
        asked = [engine.generate(p, num_samples=2, sampling=Sampling(max_terms=6), seed=p.sample_id) for p in prompts]
        answers = await asyncio.wait_for(asyncio.gather(*asked), timeout=60)
        await engine.close()
        return [rollout for _, rollouts in answers for rollout in rollouts]

    return RolloutGroup(prompt=prompts[0], rollouts=tuple(asyncio.run(work())))


def test_an_engine_records_the_experts_of_every_token_it_was_fed():
    lengths = [5, 3]
    for length, rollout in zip(np.repeat(lengths, 2), generate(tiny(), lengths, record_routes=True).rollouts):
        routes = rollout.arrays["routes"]
        assert routes.dtype == np.uint8 and routes.shape == (length + 5, 2, 2)
        model = tiny()
        recorder = RouteRecorder(model)
        fed = np.concatenate([rollout.arrays["prompt_tokens"], rollout.arrays["tokens"][:-1]])
        hidden_states(model, tokens=torch.from_numpy(fed).long())
        assert np.array_equal(recorder.take().numpy(), routes)
    assert "routes" not in generate(tiny(), lengths).rollouts[0].arrays


def test_training_replays_what_an_engine_recorded_although_its_routers_differ_near_ties():
    nearly_tied, perturbed = tiny(), tiny()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one, other in zip(routers(nearly_tied).values(), routers(perturbed).values(), strict=True):
            weight = one.get_parameter("weight").mul_(1e-7)
            other.get_parameter("weight").copy_(weight + 1e-7 * torch.randn(weight.shape, generator=random))
    group = generate(nearly_tied, [5, 3], record_routes=True)
    batch = collate([group], microbatch_terms=64, share=Share())
    policy = CausalLMPolicy(perturbed)
    [microbatch] = batch.microbatches
    recorded = microbatch.terms.rollout_logprobs
    torch.testing.assert_close(policy.forward(microbatch).logprobs.detach(), recorded, rtol=0, atol=1e-5)
    free = Microbatch(
        inputs={name: value for name, value in microbatch.inputs.items() if name != "routes"}, terms=microbatch.terms
    )
    assert (policy.forward(free).logprobs.detach() - recorded).abs().max() > 0.1
    assert policy.metrics()["expert_load_max"] > 1.0


def test_equal_rollouts_with_other_routes_are_computed_apart():
    group = generate(tiny(), [5], record_routes=True)
    first = group.rollouts[0]
    other = replace(first, arrays={**first.arrays, "routes": (first.arrays["routes"] + 1) % 8})
    policy = CausalLMPolicy(tiny())

    def logprobs(*rollouts: Rollout) -> torch.Tensor:
        batch = collate([replace(group, rollouts=rollouts)], microbatch_terms=64, share=Share())
        [microbatch] = batch.microbatches
        return policy.forward(microbatch).logprobs.detach()

    apart = [logprobs(first), logprobs(other)]
    assert (apart[0] - apart[1]).abs().max() > 1e-3
    torch.testing.assert_close(logprobs(first, other), torch.cat(apart), rtol=0, atol=1e-5)


def test_a_pass_without_routes_is_free_again():
    model = tiny()
    install_replay(model)
    free = hidden_states(model)
    hidden_states(model, torch.zeros(LENGTH, 2, 2, dtype=torch.int64))
    torch.testing.assert_close(hidden_states(model), free, rtol=0, atol=0)


def test_recomputed_layers_see_the_routes_of_their_own_pass():
    gradients = []
    for checkpointed in (False, True):
        model = tiny()
        install_replay(model)
        if checkpointed:
            checkpoint_activations(decoder_layers(model), "full")
        first = torch.tensor([0, 1]).expand(LENGTH, 2, 2)
        one, two = hidden_states(model, first), hidden_states(model, first + 2)
        one.square().sum().backward()  # while the routes that were heard last are those of `two`
        two.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.base_model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)


def test_load_figures_tell_an_even_load_from_one_expert_for_all():
    model = tiny()
    install_replay(model)
    load = ExpertLoad(model)
    hidden_states(model, torch.arange(2 * LENGTH).view(LENGTH, 1, 2).expand(-1, 2, -1) % 8)
    even = load.take(None)
    assert even == {
        "expert_load_max": pytest.approx(1.0),
        "expert_load_entropy": pytest.approx(1.0),
        "replayed_routes": 1.0,
    }
    with torch.no_grad():
        hidden_states(model)  # not training
    hidden_states(model, torch.tensor([3, 5]).expand(LENGTH, 2, 2))
    skewed = load.take(None)
    assert skewed == {
        "expert_load_max": pytest.approx(4.0),
        "expert_load_entropy": pytest.approx(math.log(2, 8)),
        "replayed_routes": 1.0,
    }


def test_the_share_of_replayed_routes_counts_tokens():
    model = tiny()
    install_replay(model)
    load = ExpertLoad(model)
    hidden_states(model)
    assert load.take(None)["replayed_routes"] == 0.0
    routes = torch.arange(2 * LENGTH).view(LENGTH, 1, 2).expand(-1, 2, -1) % 8
    hidden_states(model, routes)
    hidden_states(model, tokens=TOKENS[:4])
    assert load.take(None)["replayed_routes"] == LENGTH / (LENGTH + 4)


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [((3, 2), "experts of 3 layers, and the policy has 2"), ((2, 3), "3 experts of a token, and the policy chooses 2")],
)
def test_routes_of_another_model_are_refused(shape, wrong):
    model = tiny()
    install_replay(model)
    with pytest.raises(UserError, match=f"record_routes: rollouts have {wrong}"):
        hidden_states(model, torch.zeros(LENGTH, *shape, dtype=torch.int64))


@pytest.mark.parametrize("family", ["aria_text", "deepseek_v3", "granitemoe", "mixtral"])
def test_families_with_other_keys_for_the_number_of_experts_are_counted(family):
    config = AutoConfig.for_model(family)
    model = miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    load = ExpertLoad(model)
    model(input_ids=torch.arange(12)[None])
    metrics = load.take(None)
    assert 1.0 <= metrics["expert_load_max"] <= 4.0
    assert 0.0 < metrics["expert_load_entropy"] <= 1.0


def test_a_dense_model_has_no_load_and_nothing_to_record():
    dense = make_model({"model_type": "qwen3", **COMMON}, dtype=torch.float32, seed=0)
    install_replay(dense)
    assert ExpertLoad(dense).take(None) == {}
    with pytest.raises(UserError, match="record_routes: Qwen3ForCausalLM has no routers"):
        RouteRecorder(dense)
