"""New weights from a trainer into vLLM while it generates: time of the sync, and pause of the generation.

    python benchmarks/transfer_vllm.py [--quick] [--model DIR]

Three ways take turns in the same engine, while sequences run:

    ours           published, pulled and verified beside generation, written in the pause
    safetensors    saved to a file, and loaded again by vLLM's `reload_weights` in the pause
    load_weights   gathered whole in shared memory, and loaded by the model's `load_weights` in the pause

A sync is the time from the trainer's weights being ready until tokens are sampled with them; the pause, from the stop
of vLLM until it resumes: the token in progress before counts for the sync only. The trainer has float32, vLLM bfloat16
parameters. After each sync vLLM computes checksums of its parameters; they must be the same for all ways.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from _metrics import Figure, report
from safetensors.torch import save_file
from torch import Tensor

from cosmos_rl_core.types import Prompt, Sampling
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_llm.data.chat import Chat, Encoded
from cosmos_rl_llm.engines.vllm.engine import VllmEngine
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm.start import start
from cosmos_rl_llm.model.causal_lm import load_model, named_weights
from cosmos_rl_llm.tiny import write_tiny_model

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
TOKEN = b"benchmark"
SETTINGS = SyncSection(dtype="bfloat16", timeout_s=120.0)
MAX_LENGTH = 64
RUNNING = 4
"""Sequences that are generated all the time."""
OURS, SAFETENSORS, LOAD_WEIGHTS = "ours", "safetensors", "load_weights"

Taken = tuple[float, float]
"""Seconds of a sync, and of the pause in it."""


class Engine:
    """vLLM with the extension for the other ways, and running sequences."""

    def __init__(self, model: Path, adapters: Mapping[str, int] | None = None) -> None:
        """adapters: the ranks of the layers that need adapter slots."""
        options = VllmEngineOptions(
            cache_bytes=256 << 20, extra={"worker_extension_cls": "_vllm_worker.TakesWholeTensors"}
        )
        self._llm = start(str(model), options=options, dtype="bfloat16", max_length=MAX_LENGTH, adapters=adapters)
        self.engine = VllmEngine(self._llm, TokenChat(), adapters=tuple(adapters or ()))

    async def rpc(self, method: str, **arguments: Any) -> None:
        """Call a method of the worker."""
        await self._llm.collective_rpc(method, kwargs=arguments)

    async def keep_busy(self) -> None:
        """Generate until cancelled."""
        prompt, sampling = Prompt(sample_id=1, row={"tokens": [5, 6]}), Sampling(max_terms=MAX_LENGTH - 2)
        while True:
            await self.engine.generate(prompt, num_samples=RUNNING, sampling=sampling, seed=0)

    async def checksums(self) -> dict[str, str]:
        """vLLM's own checksum of every live parameter."""
        (of_worker,) = await self._llm.compute_weight_checksums()
        return of_worker


class Ways:
    """The three ways to bring the trainer's weights of a version into the engine."""

    def __init__(self, weights: Mapping[str, Tensor], engine: Engine, directory: Path) -> None:
        # vLLM's processes import this file, and without a GPU they do not start if numba is imported before
        from cosmos_rl_transfer import Publisher

        self._weights, self._engine, self._directory = weights, engine, directory
        self.publisher = Publisher(weights, token=TOKEN, settings=SETTINGS)

    async def open(self) -> None:
        """Connect the engine to the publisher."""
        self._subscriber = await self._engine.engine.subscriber(self.publisher.address, settings=SETTINGS, token=TOKEN)

    async def close(self) -> None:
        """Disconnect."""
        await self._subscriber.close()
        await self.publisher.close()

    async def ours(self, version: int) -> Taken:
        """Publish, pull beside generation, write while paused."""
        started = time.perf_counter()
        await self.publisher.publish(version, self._weights)
        await self._subscriber.stage(after=version - 1)
        pause = await self._switch(version, self._subscriber.apply)
        taken = time.perf_counter() - started, pause
        await self.publisher.fence()
        return taken

    async def safetensors(self, version: int) -> Taken:
        """Save a checkpoint, and reload it while paused."""
        return await self._through(self._directory, version, "reload_weights", "weights_path", self._directory)

    async def load_weights(self, version: int) -> Taken:
        """Gather into shared memory, and load from there while paused."""
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            file = Path(memory) / "model.safetensors"
            return await self._through(Path(memory), version, "take_whole_tensors", "path", file)

    async def _through(self, directory: Path, version: int, method: str, argument: str, path: Path) -> Taken:
        started = time.perf_counter()
        whole = {name: tensor.to(torch.bfloat16) for name, tensor in self._weights.items()}
        await asyncio.to_thread(save_file, whole, directory / "model.safetensors")
        loop = asyncio.get_running_loop()
        load = lambda: self._engine.rpc(method, **{argument: str(path)})  # noqa: E731
        pause = await self._switch(version, lambda: asyncio.run_coroutine_threadsafe(load(), loop).result())
        return time.perf_counter() - started, pause

    async def _switch(self, version: int, apply: Callable[[], None]) -> float:
        """Return the pause: from the token boundary, once vLLM has come to it, until generation goes on."""
        paused = 0.0

        def timed() -> None:
            nonlocal paused
            paused = time.perf_counter()
            apply()

        await self._engine.engine.switch(version, timed)
        return time.perf_counter() - paused


async def measure(model: Path, rounds: int) -> tuple[dict[str, list[Taken]], int, int]:
    """Return what each way took in every round, how many parameters differed, and the model's bytes in bfloat16."""
    engine = await asyncio.to_thread(Engine, model)
    trainer = load_model(model, dtype=torch.float32)
    weights = named_weights(trainer)
    with tempfile.TemporaryDirectory() as directory:
        ways = Ways(weights, engine, Path(directory))
        trainer.config.save_pretrained(directory)
        busy = asyncio.create_task(engine.keep_busy())
        await ways.open()
        order: dict[str, Callable[[int], Awaitable[Taken]]] = {
            OURS: ways.ours,
            SAFETENSORS: ways.safetensors,
            LOAD_WEIGHTS: ways.load_weights,
        }
        times: dict[str, list[Taken]] = {way: [] for way in order}
        differ = version = 0
        for _ in range(rounds + 1):  # the first takes page faults
            train(weights, seed=version)
            found: list[dict[str, str]] = []
            for way, sync in order.items():
                times[way].append(await sync(version))
                found.append(await engine.checksums())
                version += 1
            differ += sum(other[name] != found[0][name] for other in found for name in found[0])
        busy.cancel()
        with suppress(asyncio.CancelledError):
            await busy
        await ways.close()
        await engine.engine.close()
    size = sum(2 * tensor.numel() for tensor in weights.values())
    return {way: taken[1:] for way, taken in times.items()}, differ, size


@torch.no_grad()
def train(weights: Mapping[str, Tensor], *, seed: int) -> None:
    """Change every weight a little, as a step does."""
    torch.manual_seed(seed)
    for tensor in weights.values():
        tensor.mul_(1 + 1e-3 * torch.randn_like(tensor))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChat(Chat):
    """Rows with tokens; responses have no text."""

    tokenizer: Any = None
    end_ids: frozenset[int] = frozenset()

    def encode_prompt(self, row: Mapping[str, Any], *, where: str = "") -> Encoded:
        return Encoded(text="", tokens=np.array(row["tokens"], np.int32))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return str(tokens)

    def decode_prompt(self, tokens: Sequence[int] | np.ndarray) -> str:
        return str(tokens)


def metrics(times: Mapping[str, Sequence[Taken]], *, differ: int, size: int) -> list[Figure]:
    """Medians of every way, and their ratios to ours in the same round."""
    found = [Figure(metric="model in bfloat16", value=size / 2**20, unit="MiB")]
    for way, taken in times.items():
        for name, part in zip(("sync", "pause"), zip(*taken)):
            found.append(Figure(metric=f"{way}: {name}", value=median(part), unit="s", note=NOTES.get((way, name), "")))
    for way in (SAFETENSORS, LOAD_WEIGHTS):
        for i, name in enumerate(("sync", "pause")):
            ratio = median(mine[i] / other[i] for mine, other in zip(times[OURS], times[way]))
            found.append(Figure(metric=f"ours / {way}: {name}", value=ratio, unit="x", target="<= 1"))
    found.append(Figure(metric="parameters that differ between the ways", value=differ, unit="", target="<= 0"))
    return found


NOTES = {
    (OURS, "pause"): "vLLM's pause_generation adds a sleep of 20 ms, in all three ways",
    (SAFETENSORS, "sync"): "the file stays in the page cache: a disk is slower",
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 0.8 million parameters")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="a directory; made if it is SmolLM2 and missing")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch), initializer_range=0.2) if given.quick else given.model
        if not model.exists():
            subprocess.run([ROOT / "scripts" / "fetch_smollm2", SMOLLM2], check=True)
        times, differ, size = asyncio.run(measure(model, rounds=5 if given.quick else 7))
    gc.collect()  # vLLM's client complains when the end of the interpreter collects it
    report("transfer_vllm", metrics(times, differ=differ, size=size))


if __name__ == "__main__":
    main()
