"""Steps of the first hour with vLLM: tokens a second, and weights that it keeps in another form than they arrive in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_alone import QWEN2_5_1_5B, TINY, write_model
from gpu_hour import Hour
from gpu_runs import Running, shared, sums, write_experts

if TYPE_CHECKING:
    from cosmos_rl_core.interfaces import RolloutEngine


def tokens(hour: Hour) -> None:
    """Expect vLLM to sample 10,000 tokens/s of a 1.5B model for 256 sequences, twice what the torch engine does
    for 64.

    Failing: fewer without CUDA graphs (look for "enforce_eager" or "cudagraph" in its lines), or where another process
    has the card's memory, so that few sequences run at a time.
    """
    from cosmos_rl_core.parallel.device import own_device
    from cosmos_rl_llm.build import load_chat
    from cosmos_rl_llm.config import LLMDataConfig, LLMTorchOptions
    from cosmos_rl_llm.engines.torch.engine import TorchEngine
    from cosmos_rl_llm.model.causal_lm import load_model

    folder = write_model(hour.directory / "base", hour.size(QWEN2_5_1_5B, TINY))
    data = LLMDataConfig.model_validate({"path": str(folder), "chat_template": "none"})
    chat = load_chat(str(folder), data, max_length=hour.size(1024, 64))
    model = load_model(str(folder), dtype=torch.bfloat16).to(own_device())  # pyright: ignore[reportArgumentType]
    engine = TorchEngine(model, chat, LLMTorchOptions())
    rate = asyncio.run(_rate(engine, prompts=hour.size(8, 2), length=hour.size(128, 8)))
    hour.measured("torch engine", rate, "tokens/s")
    if hour.rehearsal:
        return  # vLLM is another build there
    del model, engine
    torch.cuda.empty_cache()
    ours = asyncio.run(_vllm_rate(hour, folder, chat))
    hour.measured("vLLM over the torch engine", ours / rate, "x", ">= 2")


async def _vllm_rate(hour: Hour, folder: Path, chat: Any) -> float:
    from cosmos_rl_llm.engines.vllm.engine import VllmEngine
    from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
    from cosmos_rl_llm.engines.vllm.start import start

    begun = time.perf_counter()
    options = VllmEngineOptions(max_model_len=1024, gpu_memory_utilization=0.6)
    engine = VllmEngine(start(str(folder), options=options, dtype="bfloat16", max_length=1024), chat, version=0)
    try:
        await _rate(engine, prompts=1, length=16)
        hour.measured("vLLM: from its start to the first answers", time.perf_counter() - begun, "s", "<= 120")
        rates = [await _rate(engine, prompts=hour.size(32, 2), length=hour.size(512, 8)) for _ in range(3)]
    finally:
        await engine.close()
    return hour.measured("vLLM", max(rates), "tokens/s", ">= 10000")


async def _rate(engine: RolloutEngine, *, prompts: int, length: int) -> float:
    """Sampled tokens a second of `prompts` groups of 8 at the same time."""
    from cosmos_rl_core.types import Prompt, Sampling

    begun = time.perf_counter()
    groups = await asyncio.gather(
        *(
            engine.generate(
                Prompt(sample_id=number, row={"prompt": f"{number % 100}+1="}),
                num_samples=8,
                sampling=Sampling(max_terms=length),
                seed=number,
            )
            for number in range(prompts)
        )
    )
    return sum(each.num_terms for _, rollouts in groups for each in rollouts) / (time.perf_counter() - begun)


def landing(hour: Hour) -> None:
    """Expect weights to arrive in vLLM where it keeps them in another form: float8 rows, and experts of its kernels.

    The learning rate changes the distribution each step, so that weights that do not arrive make the difference of
    engine and policy grow. Failing: a difference that grows is an engine that keeps its first weights; one above 0.1
    from the start is a wrong scale. The note has the layers that are reloaded through the host, with the reason.
    """
    dense, experts = (
        sums(hour.directory / kind, algorithm="grpo", steps=hour.size(6, 2)) for kind in ("fp8", "experts")
    )
    write_experts(Path(experts["model"]["path"]))
    cases: Mapping[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "fp8": (dense, {"quantization": "fp8"}, "<= 0.1"),
        "experts": (experts, {}, "<= 0.02"),
    }
    for name, (tables, options, target) in cases.items():
        tables["run"] |= {"name": name, "output_dir": str(hour.directory / f"{name}-run")}
        tables["model"]["dtype"] = "bfloat16"
        tables["sync"] = {"max_staleness": 0}
        if not hour.rehearsal:
            tables["rollout"] |= {"engine": "vllm", "options": {"gpu_memory_utilization": 0.4, **options}}
        steps = Running(hour, shared(tables), gpus=[0]).finish(timeout_s=400)
        log = (Path(tables["run"]["output_dir"]) / "logs/rollout-0.log").read_text()
        reloaded = sorted({line.strip() for line in log.splitlines() if "go through load_weights" in line})
        hour.note(f"{name}: " + ("; ".join(reloaded) or "all weights are written in place"))
        last = abs(steps[-1]["mismatch_kl"])
        hour.measured(f"{name}: engine and policy after {len(steps)} steps", last, "nats", target)
        hour.measured(f"{name}: stall of a step", max(step["sync_stall_s"] for step in steps[1:]), "s", "<= 2")
