"""Steps of the first hour with vLLM: tokens a second, weights that it keeps in another form, its tests, turns."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_alone import QWEN2_5_1_5B, TINY, write_model
from gpu_hour import GIB, Hour
from gpu_runs import Running, pytest_passes, shared, sums, write_experts, write_large

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
    rate = asyncio.run(_torch_rate(hour, engine))
    hour.measured("torch engine", rate, "tokens/s")
    if hour.rehearsal:
        return  # vLLM is another build there
    del model, engine
    gc.collect()
    torch.cuda.empty_cache()
    ours = asyncio.run(_vllm_rate(hour, folder, chat))
    hour.measured("vLLM over the torch engine", ours / rate, "x", ">= 2")


async def _torch_rate(hour: Hour, engine: RolloutEngine) -> float:
    try:
        return await _rate(engine, prompts=hour.size(8, 2), length=hour.size(128, 8))
    finally:
        await engine.close()


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


VLLM_TESTS = [
    f"packages/cosmos-rl-llm/tests/{name}.py"
    for name in ("test_vllm_engine", "test_vllm_run", "test_landing", "test_landing_replay")
]


def vllm_tests(hour: Hour) -> None:
    """Expect the tests of the vLLM engine and of weights written into it to pass under CUDA graphs.

    Failing: the old text after a switch is a graph that captured a copy of a weight; "vLLM keeps it in another layout"
    is the slow path, which reloads layers through the host.
    """
    pytest_passes(hour, "-m", "not cuda_dry and not slow", *VLLM_TESTS)


def slow_vllm_tests(hour: Hour) -> None:
    """Expect ten switches beside running requests, all families, sleep and whole runs to pass with vLLM on one GPU.

    Failing: as in step 5; a run that ends with "the engine has stopped" has vLLM's reason in logs/rollout-0.log.
    """
    pytest_passes(hour, "-m", "slow and not cuda_dry", *VLLM_TESTS)


def in_turns(hour: Hour) -> None:
    """Expect a 1.3B policy with Adam and an engine that take turns on one GPU, without the memory of the other side.

    In the rollouts' turns at most 8 GiB beside the engine's: the policy's 16 GB are in host memory. In the policy's at
    most 34 GiB; vLLM has half of the card in its own. Failing: tensors that `Policy.tensors` does not list, or blocks
    that torch's allocator keeps (`empty_cache` after the move); for vLLM a sleep that keeps weights or cache.
    """
    engines = ["torch", *(["vllm"] if find_spec("vllm") and not hour.rehearsal else [])]
    for engine in engines:
        tables = sums(hour.directory / engine, algorithm="grpo", steps=hour.size(6, 2))
        if not hour.rehearsal:
            write_large(Path(tables["model"]["path"]))
        tables["run"] |= {"name": engine, "output_dir": str(hour.directory / f"{engine}-turns"), "colocate": True}
        tables["rollout"] |= {"engine": engine}
        tables["rollout"] |= {"options": {"gpu_memory_utilization": 0.5}} if engine == "vllm" else {}
        tables["sync"] = {"max_staleness": 0}
        run = Running(hour, tables, gpus=[0])
        run.finish(timeout_s=600)
        turns = sorted(run.spans("turn"))
        overlaps = sum(begun < ended for (_, ended, one), (begun, _, other) in pairwise(turns) if one != other)
        hour.measured(f"{engine}: turns that overlap one of the other side", overlaps, "", "<= 0", always=True)
        least = min(Counter(role for _, _, role in turns).get(role, 0) for role in ("policy", "rollout"))
        hour.measured(f"{engine}: turns of each side", least, "", ">= 2", always=True)
        for role, most in (("rollout", 8 + (40 if engine == "vllm" else 0)), ("policy", 34)):
            inside = [
                mib for at, mib in run.used_mib if any(a + 0.2 < at < b - 0.2 for a, b, of in turns if of == role)
            ]
            used = max(inside, default=0.0) * 2**20 / GIB
            hour.measured(f"{engine}: memory in the turns of the {role}", used, "GiB", f"<= {most}")
