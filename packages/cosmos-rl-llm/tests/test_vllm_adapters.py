"""Adapters in vLLM's slots, on CPU: what it answers equals transformers with peft, sync after sync."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from tiny_engine import TokenChat
from transformers import AutoModelForCausalLM

from cosmos_rl_core import run
from cosmos_rl_core.parallel.lora import ranks_of
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_llm.config import LLMLoraSection
from cosmos_rl_llm.engines.vllm.engine import VllmEngine
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm.start import start
from cosmos_rl_llm.model.causal_lm import make_model
from cosmos_rl_llm.policy.lora import add_adapters
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.tiny import write_sums, write_tiny_model
from cosmos_rl_transfer.publish.publisher import Publisher

pytest.importorskip("psutil", reason="comes with vLLM")
pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")
pytestmark = [
    pytest.mark.ci,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(  # vLLM's own
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Unclosed context:ResourceWarning"
    ),
]

TOKEN = b"the secret of the test"
SIZES = {
    "vocab_size": 66, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
DENSE = {"model_type": "qwen3", "tie_word_embeddings": True, **SIZES}
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "tie_word_embeddings": False, **SIZES,
}  # fmt: skip
PATTERNS = {"rank_pattern": {"v_proj": 8, "0.self_attn.o_proj": 2}, "alpha_pattern": {"k_proj": 3.0, "o_proj": 5.0}}
SYNCS = 10
PROMPTS = [Prompt(sample_id=i, row={"tokens": [3 + i, 4, 13, 5, 14]}) for i in range(4)]


def policy_of(config, folder, sent="scaled", **lora):
    """A policy with adapters, and their ranks in the engine: none where it gets merged weights."""
    model = make_model(config, dtype=torch.float32, seed=0).eval()
    model.save_pretrained(folder)
    section = LLMLoraSection(rank=4, alpha=6.0, **lora)
    add_adapters(model, section, base=str(folder), seed=0)
    return CausalLMPolicy(model, setup=ModelSetup(sent_adapters=sent)), ranks_of(model) if sent == "scaled" else {}


@torch.no_grad()
def perturb(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    for tensor in policy.weights().values():
        tensor.copy_(torch.empty(tensor.shape).normal_(0.0, 0.15, generator=generator))


@asynccontextmanager
async def synced(policy, ranks, folder, *, settings, **options):
    """Yield an engine with the adapters' slots, and a coroutine function that publishes and switches to a version."""
    options = VllmEngineOptions(cache_bytes=64 << 20, **options)
    llm = await asyncio.to_thread(start, str(folder), options=options, dtype="float32", max_length=None, adapters=ranks)
    engine = VllmEngine(llm, TokenChat(end_ids=frozenset()), adapters=tuple(ranks))
    publisher = Publisher(policy.rollout_weights(), token=TOKEN)
    subscriber = await engine.subscriber(publisher.address, settings=settings, token=TOKEN)

    async def send(version):
        policy.before_publish()
        await publisher.publish(version, policy.rollout_weights())
        assert await subscriber.stage(after=version - 1) == version
        await engine.switch(version, subscriber.apply)
        await publisher.fence()
        return subscriber.counts()

    try:
        yield engine, send
    finally:
        await subscriber.close()
        await publisher.close()
        await engine.close()
        llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves that to the garbage collector, which warns


async def answers(engine, **sampling):
    sampling = Sampling(max_terms=24, temperature=0.0, **sampling)
    calls = (engine.generate(prompt, num_samples=1, sampling=sampling, seed=0) for prompt in PROMPTS)
    return [rollouts[0] for _, rollouts in await asyncio.gather(*calls)]


@torch.no_grad()
def greedy(model, prompt):
    tokens = torch.tensor([prompt.row["tokens"]])
    return model.generate(inputs=tokens, max_new_tokens=24, do_sample=False, eos_token_id=None)[
        0, tokens.shape[1] :
    ].tolist()


@pytest.mark.parametrize(
    ("config", "sent", "staging", "tp"),
    [(DENSE, "scaled", "shadow", 1), (EXPERTS, "merged", "in_place", 1), (DENSE, "scaled", "in_place", 2)],
    ids=["dense", "experts", "two workers"],
)
def test_after_ten_syncs_its_greedy_answers_are_those_of_transformers_with_peft(tmp_path, config, sent, staging, tp):
    policy, ranks = policy_of(config, tmp_path, sent, **PATTERNS)
    assert {2, 4, 8} <= set(ranks_of(policy.module).values())
    settings = SyncSection(staging=staging, timeout_s=60.0)

    async def work():
        async with synced(policy, ranks, tmp_path, settings=settings, tensor_parallel_size=tp) as (engine, send):
            for version in range(SYNCS):
                perturb(policy, seed=version)
                await send(version)
            return await answers(engine)

    found = asyncio.run(work())
    adapters = tmp_path / "adapters"
    policy.save_config(adapters)
    save_file(
        {name: tensor.contiguous() for name, tensor in policy.weights().items()},
        adapters / "adapter_model.safetensors",
    )
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path), adapters).eval()
    assert [one.arrays["tokens"].tolist() for one in found] == [greedy(model, prompt) for prompt in PROMPTS]
    assert all(set(one.versions) == {SYNCS - 1} for one in found)
    assert len({tuple(one.arrays["tokens"]) for one in found}) > 1
    assert np.all([np.isfinite(one.rollout_logprobs).all() for one in found])


def recipe(folder, *, name):
    model = write_tiny_model(folder / "model", num_layers=2)
    train, _ = write_sums(folder / "data")
    return {
        "run": {"domain": "llm", "output_dir": str(folder / name), "max_steps": 3},
        "model": {"path": str(model), "lora": {"rank": 4}},
        "data": {"path": str(train), "chat_template": "none"},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 4, "threads": 1, "optimizer": {"learning_rate": 2e-2}},
        "rollout": {
            "engine": "vllm",
            "group_size": 4,
            "threads": 1,
            "sampling": {"max_tokens": 4},
            "options": {"cache_bytes": 64 << 20},
        },
        "reward": {"functions": [{"name": "length", "options": {"max_tokens": 1, "slack_tokens": 3}}]},
        "sync": {"max_staleness": 0},
        "logging": {"sinks": ["jsonl"]},
    }


def test_a_run_sends_its_adapters_alone(tmp_path):
    settings = recipe(tmp_path, name="run")
    metrics = run(settings).metrics
    assert [line["mismatch_kl"] for line in metrics] == [pytest.approx(0.0, abs=1e-6)] * 3
    adapter = (tmp_path / "run" / "checkpoints" / "step_3" / "policy" / "adapter_model.safetensors").stat().st_size
    assert 0 < metrics[-1]["sync_bytes"] <= 1.05 * adapter
