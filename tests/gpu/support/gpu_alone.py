"""Steps of the first hour in this process, on one GPU: the machine, attention kernels, training speed, transfer."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_hour import GIB, Hour
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from cosmos_rl_core.parallel.mesh import ReplicaMesh
    from cosmos_rl_core.train.trainer import Trainer
    from cosmos_rl_core.types import TrainBatch

BF16 = torch.bfloat16


def here(hour: Hour) -> None:
    """Expect capability 8.0 or more (9.0 on H100) and a host name that is not a loopback address.

    Failing: wrong versions end the hour before this step, with a line to type. A host name that
    resolves to 127.0.0.1 or 127.0.1.1 makes gloo of a second machine connect to itself: connectFullMesh fails or hangs.
    Copies far below 20 GB/s are pageable or cross a socket; see the topology. The matrix product's speed is the 100 %
    of step 4.
    """
    hour.show("nvidia-smi", "topo", "-m")
    hour.show("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv")
    adapters = Path("/sys/class/infiniband")
    hour.note(f"InfiniBand: {', '.join(sorted(os.listdir(adapters))) if adapters.exists() else 'none'}")
    hour.note(f"cores: {len(os.sched_getaffinity(0))}")
    hour.measured("GPUs", torch.cuda.device_count(), "", ">= 1")
    major, minor = torch.cuda.get_device_capability(hour.device)
    hour.measured("compute capability", major + minor / 10, "", ">= 8")
    addresses = {found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None)}
    hour.measured("loopback addresses of the host name", sum(str(a).startswith("127.") for a in addresses), "", "<= 0")
    hour.measured("bfloat16 matrix products", matmul_tflops(hour), "TFLOP/s", ">= 100")
    size = hour.size(1 << 30, 1 << 10)
    on_gpu = torch.empty(size, dtype=torch.uint8, device=hour.device)
    pinned = torch.empty(size, dtype=torch.uint8).pin_memory()
    for name, work in {
        "to the GPU": lambda: on_gpu.copy_(pinned, non_blocking=True),
        "to the host": lambda: pinned.copy_(on_gpu, non_blocking=True),
    }.items():
        hour.measured(f"pinned copies {name}", size / hour.seconds(work) / 1e9, "GB/s", ">= 10")


def matmul_tflops(hour: Hour) -> float:
    """TFLOP/s of a square product in bfloat16."""
    size = hour.size(8192, 16)
    left = torch.randn(size, size, device=hour.device, dtype=BF16)
    return 2 * size**3 / hour.seconds(lambda: left @ left) / 1e12


def attention(hour: Hour) -> None:
    """Expect <= 5 ms and <= 0.3 GiB for 32 heads of 128, 8192 tokens, bfloat16; <= 1 GiB for windows and soft caps.

    Failing: gigabytes for a window or a soft cap are scores [32, 8192, 8192], torch's math kernel or the plain one:
    the line "attention: ..." of a run names the kernel; install flash-attn, or Triton with a C compiler. A large error
    is a wrong window (off by one) or a wrong scale.
    """
    from cosmos_rl_llm.policy import kernels
    from cosmos_rl_llm.policy.attention import Scoring, causal_attention

    heads, kv_heads, dim, length = hour.size((32, 8, 128, 8192), (4, 2, 16, 64))
    cases = {
        "plain": (Scoring(scale=dim**-0.5), "<= 5", "<= 0.3"),
        "window": (Scoring(scale=dim**-0.5, window=length // 2), "<= 10", "<= 1"),
        "soft cap": (Scoring(scale=dim**-0.5, softcap=50.0), "<= 20", "<= 1"),
        "sinks": (Scoring(scale=dim**-0.5, sinks=torch.zeros(heads, device=hour.device)), "<= 10", "<= 0.6"),
    }
    if not hour.rehearsal:
        hour.note(f"kernels of this GPU: {', '.join(sorted(kernels.available(hour.device)))}")
    attend = causal_attention if hour.rehearsal else kernels.attend
    for name, (scoring, ms, gib) in cases.items():

        def qkv(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
            torch.manual_seed(0)
            shapes = [(1, h, tokens, dim) for h in (heads, kv_heads, kv_heads)]
            return [torch.randn(shape, device=hour.device).to(dtype).requires_grad_() for shape in shapes]

        whole = qkv(length, BF16)
        query = whole[0]

        def forward(inputs: list[torch.Tensor] = whole, scoring: Scoring = scoring) -> torch.Tensor:
            return attend(*inputs, scoring)

        def both(query: torch.Tensor = query) -> None:
            forward().backward(torch.ones_like(query))

        hour.measured(f"{name}: forward", 1e3 * hour.seconds(forward), "ms", ms)
        hour.measured(f"{name}: forward and backward", 1e3 * hour.seconds(both), "ms")
        hour.measured(f"{name}: memory, forward and backward", hour.peak_bytes(both) / GIB, "GiB", gib)
        short = hour.size(512, 32)
        exact = causal_attention(*qkv(short, torch.float32), scoring).detach().cpu()
        found = attend(*qkv(short, BF16), scoring).detach().float().cpu()
        error = (found - exact).abs().max() / exact.abs().max()
        hour.measured(f"{name}: error beside float32", error.item(), "", "<= 0.03", always=True)
    _packed_attention(hour, heads, kv_heads, dim)


def _packed_attention(hour: Hour, heads: int, kv_heads: int, dim: int) -> None:
    """Sequences of different lengths that share a prompt, in one call (`kernels.Ragged`)."""
    from cosmos_rl_llm.policy.attention import Scoring
    from cosmos_rl_llm.policy.packing import PackedLayout

    prompt, answers = hour.size((512, [1500, 700, 1, 64]), (8, [20, 7, 1, 3]))
    ends = np.cumsum([prompt, *answers])
    rows = np.concatenate([[*range(prompt), *range(start, end)] for start, end in pairwise(ends)])
    lengths = [prompt + answer for answer in answers]

    def run(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        given = [torch.randn(1, h, ends[-1], dim) for h in (heads, kv_heads, kv_heads)]
        given = [x.to(device, dtype).requires_grad_() for x in given]
        output = PackedLayout.of(lengths, rows=rows, device=device).attend(*given, Scoring(scale=dim**-0.5))
        output.backward(torch.ones_like(output))
        gradients = [x.grad for x in given if x.grad is not None]
        return [x.detach().float().cpu() for x in (output, *gradients)]

    exact, found = run(torch.device("cpu"), torch.float32), run(hour.device, BF16)
    errors = [((mine - right).abs().max() / right.abs().max()).item() for mine, right in zip(found, exact, strict=True)]
    hour.measured("packed row with a shared prompt: error beside float32", max(errors), "", "<= 0.03", always=True)


QWEN2_5_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
TINY = QWEN2_5_1_5B | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def training(hour: Hour) -> None:
    """Expect 35 % of the card's matrix products of a 1.5B model, compiled 45 %; 8192 tokens and <= 1 wait a microbatch.

    The trainer is that of a recipe over a mesh of one rank: FSDP, float32 masters, products in bfloat16. Failing: fp8
    not above bfloat16 is emulated float8 (look for "float8: emulated" in the log). Compiled not above eager:
    recompilations (TORCH_LOGS=recompiles). More than one wait a microbatch: the warnings noted below name the lines; on
    a pretend GPU tests/e2e/test_cuda_dry.py finds them too.
    """
    logging.basicConfig(level=logging.INFO)
    peak = matmul_tflops(hour)
    variants = [("eager", False, "none", ">= 0.35"), ("compiled", True, "none", ">= 0.45")]
    variants += [("compiled, fp8 rowwise", True, "rowwise", "")]
    folder = write_model(hour.directory / "base", hour.size(QWEN2_5_1_5B, TINY))
    speeds = {}
    with mesh_of_one(hour) as mesh:
        for name, compiled, fp8, target in variants[: hour.size(3, 1)]:
            trainer = _trainer(folder, mesh, compiled=compiled, fp8=fp8)
            sharded = sum(isinstance(each, DTensor) for each in trainer.policy.module.parameters())
            hour.measured(f"{name}: parameters that FSDP has", sharded, "", ">= 1", always=True)
            batch, num_tokens = _batch(length=hour.size(2048, 16))

            def step(trainer=trainer, batch=batch) -> None:
                trainer.begin(batch)
                trainer.forward_backward(batch.microbatches)
                trainer.optim_step()

            hour.measured(f"{name}: peak memory", hour.peak_bytes(step) / GIB, "GiB")
            speeds[name] = num_tokens / hour.seconds(step)
            hour.measured(f"{name}: trained", speeds[name], "tokens/s")
            num_parameters = sum(each.numel() for each in trainer.policy.module.parameters())
            hour.measured(f"{name}: MFU", 6 * num_parameters * speeds[name] / 1e12 / peak, "of matrix products", target)
            if name == "eager" and hour.device.type == "cuda":
                waits = _waits(hour, trainer, batch)
                hour.measured("waits a microbatch", waits / len(batch.microbatches), "", "<= 1")
            del trainer, step
            gc.collect()  # modules of FSDP are in cycles
            torch.cuda.empty_cache()
    if len(speeds) == 3:
        hour.measured("fp8 over bfloat16", speeds["compiled, fp8 rowwise"] / speeds["compiled"], "x", ">= 1.05")


@contextmanager
def mesh_of_one(hour: Hour) -> Iterator[ReplicaMesh]:
    """The mesh of a replica of one rank, over the process group that a rank of a worker makes."""
    from cosmos_rl_core.parallel.dims import ParallelDims
    from cosmos_rl_core.parallel.mesh import ReplicaMesh
    from cosmos_rl_core.workers.ranks import Ranks

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ranks = Ranks.join(timeout_s=600, store=hour.directory / "ranks")
    try:
        yield ReplicaMesh.build(ParallelDims(), device=hour.device)
    finally:
        asyncio.run(ranks.leave())


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model of random bfloat16 weights, and a tokenizer whose vocabulary has 13 characters."""
    from cosmos_rl_llm.model.causal_lm import make_model
    from cosmos_rl_llm.tiny import write_tokenizer

    write_tokenizer(folder)
    config = config | {"eos_token_id": 1, "pad_token_id": 0}
    make_model(config, dtype=BF16, seed=0).save_pretrained(folder)
    return folder


def _trainer(folder: Path, mesh: ReplicaMesh, *, compiled: bool, fp8: str) -> Trainer:
    """The trainer of a recipe, as a rank builds it."""
    from cosmos_rl_core.assemble import build_trainer
    from cosmos_rl_core.recipe.load import load_config, load_domain

    remat = "none" if compiled else "full"  # torch.compile chooses for itself
    tables = {
        "run": {"domain": "llm", "name": "speed", "output_dir": str(folder / "run"), "max_steps": 1},
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "data": {"path": str(folder), "chat_template": "none"},
        "algorithm": {"name": "grpo"},
        "policy": {
            "memory": {"compile": compiled, "activation_checkpointing": remat},
            "precision": {"fp8": fp8},
        },
        "reward": {"functions": [{"name": "exact"}]},
    }
    return build_trainer(load_config(tables), load_domain("llm"), mesh)


def _batch(*, length: int) -> tuple[TrainBatch, int]:
    """4 microbatches of 4 rollouts each, and their tokens."""
    from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Share
    from cosmos_rl_llm.data.collate import collate

    rng = np.random.default_rng(0)

    def rollout() -> Rollout:
        return Rollout(
            arrays={
                "prompt_tokens": rng.integers(0, 64, 4, np.int32),
                "tokens": rng.integers(0, 64, length - 3, np.int32),
            },
            rollout_logprobs=np.full(length - 3, -4.0, np.float32),
            versions=np.zeros(length - 3, np.int32),
            loss_mask=np.ones(length - 3, bool),
            advantage=1.0,
        )

    groups = [RolloutGroup(prompt=Prompt(sample_id=i, row={}), rollouts=(rollout(),)) for i in range(16)]
    batch = collate(groups, microbatch_terms=4 * length, share=Share())
    return batch, sum(len(microbatch.inputs["tokens"]) for microbatch in batch.microbatches)


def _waits(hour: Hour, trainer, batch) -> int:
    """Synchronisations of the forward and backward passes, as torch reports them."""
    trainer.begin(batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.forward_backward(batch.microbatches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    trainer.optim_step()
    found = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    places = sorted({f"{warning.filename}:{warning.lineno}" for warning in found})
    hour.note("waits at: " + (", ".join(places) or "none"))
    return len(found)


def transfer(hour: Hour) -> None:
    """Expect 4 GiB of bfloat16 from GPU to GPU memory of one card at >= 20 GB/s, and training slowed by less than 3 %.

    Failing: below 1 GB/s beside matrix products, while it is fast without them: copies to the host queue on the stream
    that trains. A training loop that slows down: the copies share its stream, or its thread holds the interpreter.
    """
    from cosmos_rl_transfer import Publisher, Subscriber

    num, size = hour.size((64, 1 << 25), (4, 1 << 10))
    trained = {f"w{i}": torch.randn(size, device=hour.device).to(BF16) for i in range(num)}
    num_bytes = sum(tensor.nbytes for tensor in trained.values())
    live = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}

    async def move() -> list[float]:
        publisher = Publisher(trained, token=b"secret")
        subscriber = Subscriber(publisher.address, live, token=b"secret")
        hour.note(f"weights: {publisher.path}")
        taken = []
        for version in range(1, 1 + hour.size(4, 2)):
            begun = asyncio.get_running_loop().time()
            await publisher.publish(version, trained)
            await subscriber.stage(after=version - 1)
            subscriber.apply()
            torch.cuda.synchronize(hour.device)
            taken.append(asyncio.get_running_loop().time() - begun)
            await publisher.fence()
        await subscriber.close()
        await publisher.close()
        return taken[1:]

    hour.measured("transfer, idle GPU", num_bytes / min(asyncio.run(move())) / 1e9, "GB/s", ">= 20")
    same = all(torch.equal(live[name], trained[name]) for name in trained)
    hour.measured("tensors equal", float(same), "", ">= 1", always=True)
    alone = _with_products(hour, nullcontext)[0]
    beside, taken = _with_products(hour, lambda: asyncio.run(move()))
    hour.measured("transfer beside matrix products", num_bytes / min(taken) / 1e9, "GB/s", ">= 20")
    hour.measured("products beside transfer, over alone", beside / alone, "x", ">= 0.97")


def _with_products(hour: Hour, work):
    """Products a second in another thread while `work` runs, for at least a second; and its result."""
    size, seconds = hour.size(8192, 16), hour.size(1.0, 0.01)
    matrix = torch.randn(size, size, device=hour.device, dtype=BF16)
    ended, rates = threading.Event(), []

    def multiply() -> None:
        torch.cuda.set_device(hour.device)
        count, begun = 0, torch.cuda.Event(enable_timing=True)
        begun.record()
        while not ended.is_set():
            for _ in range(8):  # as far ahead as a training loop queues
                torch.mm(matrix, matrix)
            count += 8
            torch.cuda.current_stream().synchronize()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        rates.append(count / max(begun.elapsed_time(end) / 1e3, 1e-9))

    thread = threading.Thread(target=multiply, name="products")
    thread.start()
    try:
        result = work()
        ended.wait(seconds)
    finally:
        ended.set()
        thread.join()
    return rates[0], result
