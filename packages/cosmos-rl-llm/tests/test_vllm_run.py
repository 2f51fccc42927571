"""vLLM in whole runs, over several workers, and when its owner is killed: minutes, so all of it is slow."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from tiny_engine import TokenChat
from transformers import AutoConfig, AutoModelForCausalLM

from cosmos_rl_core import run
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_core.settings.problems import engine_options
from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.engines.vllm.engine import VllmEngine, refusal
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm.plugin import REFUSED
from cosmos_rl_llm.engines.vllm.start import engine_arguments, start
from cosmos_rl_llm.model.causal_lm import load_model, named_weights
from cosmos_rl_llm.tiny import write_sums, write_tiny_model
from cosmos_rl_transfer.publish.publisher import Publisher

psutil = pytest.importorskip("psutil", reason="comes with vLLM")

pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")
pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings(  # vLLM's own
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Unclosed context:ResourceWarning"
    ),
]
slow = pytest.mark.slow

TOKEN = b"the secret of the test"
CACHE_BYTES = 64 << 20
STEPS = 4


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"max_model_length": 5}, "max_model_len"),
        ({"extra": {"seed": 3}}, "seed: set by the engine"),
        ({"extra": {"tensor_parallel_size": 2}}, "another option"),
    ],
)
def test_options_it_does_not_take(options, found):
    with pytest.raises(ConfigError, match=found):
        LLM.build_engine(LLM.Model(path="x"), data=LLM.Data(path="x"), name="vllm", options=options)


def tiny_run(folder, *, model, **changes):
    """The recipe of a GRPO run that vLLM generates for. changes: keys of sections, `rollout__group_size=2`."""
    train, _ = write_sums(folder / "data")
    recipe = {
        "run": {"domain": "llm", "output_dir": str(folder / "run"), "max_steps": STEPS},
        "model": {"path": str(model)},
        "data": {"path": str(train), "chat_template": "none"},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 4, "threads": 1, "optimizer": {"learning_rate": 1e-3}},
        "rollout": {
            "engine": "vllm",
            "group_size": 4,
            "threads": 1,
            "sampling": {"max_tokens": 4},
            "options": {"cache_bytes": CACHE_BYTES},
        },
        "reward": {"functions": [{"name": "length", "options": {"max_tokens": 1, "slack_tokens": 3}}]},
        "sync": {"max_staleness": 1},
        "logging": {"sinks": ["jsonl"]},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        recipe[section][key] = value
    return recipe


@slow
@pytest.mark.parametrize("colocate", [False, True])
def test_a_run_with_vllm(tmp_path, colocate):
    model = write_tiny_model(tmp_path / "model", num_layers=2)
    metrics = run(tiny_run(tmp_path, model=model, run__colocate=colocate)).metrics
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert all(line["staleness_max"] <= 1 for line in metrics)
    assert metrics[0]["mismatch_kl"] < 1e-5  # drawn with the weights that are trained
    assert len({line["reward_mean"] for line in metrics}) > 1
    assert all(np.isfinite(line["loss"]) and line["terms"] > 0 for line in metrics)


@slow
@pytest.mark.parametrize(
    ("serve", "changes"),
    [("adapter", {"run__colocate": True}), ("adapter", {"rollout__parallel": {"tp": 2}}), ("merged", {})],
    ids=["slots, in turns", "slots over two processes", "merged"],
)
def test_a_run_trains_adapters_that_the_engine_applies(tmp_path, serve, changes):
    model = write_tiny_model(tmp_path / "model", num_layers=2)
    lora = {"rank": 4, "serve": serve}
    recipe = tiny_run(tmp_path, model=model, model__lora=lora, sync__max_staleness=0, **changes)
    recipe["policy"]["optimizer"]["learning_rate"] = 2e-2
    metrics = run(recipe).metrics
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert [line["mismatch_kl"] for line in metrics] == [pytest.approx(0.0, abs=1e-6)] * STEPS
    saved = tmp_path / "run" / "checkpoints" / f"step_{STEPS}" / "policy"
    assert (saved / "adapter_model.safetensors").is_file()


@slow
def test_a_run_whose_engine_is_sharded_over_two_processes_generates_with_the_weights_of_each_step(tmp_path):
    model = write_tiny_model(tmp_path / "model", num_layers=2)
    recipe = tiny_run(tmp_path, model=model, rollout__parallel={"tp": 2}, sync__max_staleness=0)
    metrics = run(recipe).metrics
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert [line["mismatch_kl"] for line in metrics] == [pytest.approx(0.0, abs=1e-6)] * STEPS
    assert len({line["reward_mean"] for line in metrics}) > 1
    log = (tmp_path / "run" / "logs" / "rollout-0.log").read_text()
    assert "VllmWorker-1" in log  # of the second process


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its kernel for experts runs")
def test_adapters_of_experts_without_a_gpu_are_refused(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    mixture = AutoConfig.for_model("qwen3_moe", hidden_size=64, num_attention_heads=2, vocab_size=32, **sizes)
    mixture.architectures = ["Qwen3MoeForCausalLM"]
    mixture.save_pretrained(tmp_path)
    with pytest.raises(UserError, match='no adapter slots for a mixture of experts; set it to "merged"'):
        start(str(tmp_path), options=VllmEngineOptions(), dtype="float32", max_length=64, adapters={"q_proj": 4})


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it has stages")
def test_stages_of_layers_without_a_gpu_are_refused(tmp_path):
    options = VllmEngineOptions(extra={"pipeline_parallel_size": 2})
    with pytest.raises(UserError, match=r"without a GPU runs no stages.*\[rollout\.parallel\] tp"):
        start(str(tmp_path), options=options, dtype="float32", max_length=None)


@slow
@pytest.mark.parametrize("staging", ["shadow", "in_place"])
def test_after_ten_syncs_two_workers_answer_as_a_fresh_engine(tmp_path, staging):
    model = load_model(write_tiny_model(tmp_path / "first", initializer_range=0.2), dtype=torch.float32)
    settings = SyncSection(staging=staging, timeout_s=60.0)
    prompts = [Prompt(sample_id=i, row={"tokens": [3 + i, 4, 13, 5, 14]}) for i in range(6)]
    greedy = Sampling(max_terms=40, temperature=0.0)

    async def answers(engine):
        calls = (engine.generate(prompt, num_samples=1, sampling=greedy, seed=0) for prompt in prompts)
        return [rollouts[0].arrays["tokens"].tolist() for _, rollouts in await asyncio.gather(*calls)]

    async def synced():
        publisher = Publisher(named_weights(model), token=TOKEN)
        async with started(tmp_path / "first", tensor_parallel_size=2) as engine:
            subscriber = await engine.subscriber(publisher.address, settings=settings, token=TOKEN)
            for version in range(10):
                perturb(model, seed=version)
                await publisher.publish(version, named_weights(model))
                assert await subscriber.stage(after=version - 1) == version
                await engine.switch(version, subscriber.apply)
                await publisher.fence()
            await subscriber.close()
            await publisher.close()
            return await answers(engine)

    async def fresh():
        async with started(tmp_path / "last") as engine:
            return await answers(engine)

    found = asyncio.run(synced())
    model.save_pretrained(tmp_path / "last")
    assert found == asyncio.run(fresh())
    assert len({tuple(tokens) for tokens in found}) > 1


_TOKENS = {"vocab_size": 66, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
REARRANGED = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.3},
    "falcon_h1": {
        "intermediate_size": 128, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_n_groups": 1, "initializer_range": 0.3, "tie_word_embeddings": False, **_HEADS, **_SIZES,
    },
    "llama4_text": {
        "intermediate_size": 64, "intermediate_size_mlp": 128, "num_local_experts": 4, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 256, "initializer_range": 0.1, **_HEADS, **_SIZES,
    },
}  # fmt: skip
"""Families whose vLLM loader transposes, computes or reorders."""


def random_model(family, *, seed):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **_TOKENS, **REARRANGED[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    perturb(model, seed=seed, scale=0.1)  # biases, norms and A_log, which start alike
    return model


@torch.no_grad()
def expected_logprobs(model, rollout):
    prompt, tokens = (torch.from_numpy(rollout.arrays[name]).long() for name in ("prompt_tokens", "tokens"))
    logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0].numpy()


@slow
@pytest.mark.parametrize("family", REARRANGED)
def test_families_whose_loader_rearranges_or_computes_answer_with_new_weights(tmp_path, family):
    settings = SyncSection(timeout_s=60.0)
    random_model(family, seed=0).save_pretrained(tmp_path / "model")
    model = random_model(family, seed=1)

    async def work():
        publisher = Publisher(named_weights(model), token=TOKEN)
        async with started(tmp_path / "model") as engine:
            subscriber = await engine.subscriber(publisher.address, settings=settings, token=TOKEN)
            await publisher.publish(0, named_weights(model))
            assert await subscriber.stage(after=-1) == 0
            await engine.switch(0, subscriber.apply)
            prompt = Prompt(sample_id=0, row={"tokens": [3, 4, 13, 5, 14]})
            _, found = await engine.generate(prompt, num_samples=3, sampling=Sampling(max_terms=24), seed=0)
            await subscriber.close()
            await publisher.close()
            return found

    for rollout in asyncio.run(work()):
        np.testing.assert_allclose(rollout.rollout_logprobs, expected_logprobs(model, rollout), atol=1e-4)


def test_what_a_worker_refuses_is_read_out_of_the_report():
    report = (
        f"Call to x method failed: Worker failed with error '{REFUSED}a.b: why', please check the stack trace above"
    )
    assert refusal(report) == f"{REFUSED}a.b: why"
    assert refusal(f"Call to x method failed: {REFUSED}it's so") == f"{REFUSED}it's so"
    assert refusal("Call to x method failed: out of memory") is None


@slow
def test_it_answers_after_sleep_as_before(tmp_path):
    greedy, prompt = Sampling(max_terms=24, temperature=0.0), Prompt(sample_id=0, row={"tokens": [3, 4, 13, 5, 14]})
    model = write_tiny_model(tmp_path / "model", initializer_range=0.2)

    async def work():
        async with started(model) as engine:
            found = []
            for _ in range(2):
                _, rollouts = await engine.generate(prompt, num_samples=1, sampling=greedy, seed=0)
                found.append(rollouts[0].arrays["tokens"].tolist())
                await engine.sleep()
                await engine.wake()
            await engine.switch(1, lambda: None)
            _, rollouts = await engine.generate(prompt, num_samples=1, sampling=greedy, seed=0)
            assert set(rollouts[0].versions) == {1}
            return [*found, rollouts[0].arrays["tokens"].tolist()]

    first, *others = asyncio.run(work())
    assert others == [first, first]


def test_memory_that_can_be_freed_is_asked_for_on_a_gpu_alone():
    options = engine_options(VllmEngineOptions, LLM.sleeping_engine("vllm", {"max_sequences": 4}))
    on_gpu, on_cpu = (
        engine_arguments("model", options=options, dtype="float32", max_length=None, on_gpu=gpu)
        for gpu in (True, False)
    )
    assert on_gpu["enable_sleep_mode"] is True
    assert "enable_sleep_mode" not in on_cpu
    assert LLM.sleeping_engine("torch", {"max_sequences": 4}) == {"max_sequences": 4}


@slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_new_weights_cannot_reach_is_one_sentence_to_the_user(tmp_path, ranks):
    settings = SyncSection(timeout_s=60.0)
    model = load_model(write_tiny_model(tmp_path / "model"), dtype=torch.float32)
    weights = {name: w.int() if name == "model.norm.weight" else w for name, w in named_weights(model).items()}

    async def work():
        publisher = Publisher(weights, token=TOKEN)
        async with started(tmp_path / "model", tensor_parallel_size=ranks) as engine:
            try:
                await engine.subscriber(publisher.address, settings=settings, token=TOKEN)
            finally:
                await publisher.close()

    with pytest.raises(
        UserError,
        match=rf'engine = "vllm": {REFUSED}model.norm.weight is int32 in the trainer.*unquantised',
    ):
        asyncio.run(work())


@asynccontextmanager
async def started(path, **options):
    llm = start(
        str(path), options=VllmEngineOptions(cache_bytes=CACHE_BYTES, **options), dtype="float32", max_length=None
    )
    engine = VllmEngine(llm, TokenChat())
    try:
        yield engine
    finally:
        await engine.close()
        llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves that to the garbage collector, which warns


@torch.no_grad()
def perturb(model, *, seed, scale=0.02):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=scale)


OWNER = """
import sys, time
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm.plugin import REFUSED
from cosmos_rl_llm.engines.vllm.start import start

if __name__ == "__main__":
    llm = start(sys.argv[1], options=VllmEngineOptions(cache_bytes=1 << 26), dtype="float32", max_length=None)
    print("started", flush=True)
    time.sleep(600)
"""


@slow
def test_its_processes_end_with_an_owner_that_is_killed(tmp_path):
    model = write_tiny_model(tmp_path / "model", num_layers=2)
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen([sys.executable, script, model], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    while "started" not in owner.stdout.readline():
        assert owner.poll() is None
    children = [p for p in psutil.Process(owner.pid).children(recursive=True) if "VLLM" in p.name()]
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert len(children) == 2
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
