"""Bytes, time and pause of a sync of adapters into vLLM's slots, beside the merged weights of the same adapters.

    python benchmarks/lora_sync.py [--quick] [--model DIR]

Two engines of one base model take turns, each while it generates: one gets A and B (`[model.lora] serve = "adapter"`),
the other W + alpha / rank B A of adapted layers ("merged"). Both policies have the same adapters, of rank 16 on all
linear layers. A sync is the time from trained adapters until tokens are sampled with them, merging included; the pause
is that of `transfer_vllm.py`. The bytes of the adapters are those of A and B in bfloat16, the engine's dtype.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from _metrics import Figure, report
from transfer_vllm import SMOLLM2, Engine, Taken, Ways

from cosmos_rl_core.parallel.lora import ranks_of
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.config import LLMLoraSection
from cosmos_rl_llm.model.causal_lm import load_model
from cosmos_rl_llm.policy.lora import add_adapters
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.tiny import write_tiny_model

ROOT = Path(__file__).resolve().parent.parent
LORA = LLMLoraSection(rank=16, alpha=32.0)


class Side:
    """A policy with adapters, and the engine that follows it in one form."""

    def __init__(self, model: Path, form: Literal["scaled", "merged"]) -> None:
        trained = load_model(model, dtype=torch.float32)
        add_adapters(trained, LORA, base=str(model), seed=0)
        self.policy = CausalLMPolicy(trained, setup=ModelSetup(sent_adapters=form))
        self.engine = Engine(model, ranks_of(trained) if form == "scaled" else None)
        self._ways = Ways(self.policy.rollout_weights(), self.engine, model)
        self.open, self.publisher = self._ways.open, self._ways.publisher

    async def sync(self, version: int) -> Taken:
        """Train, publish and switch to `version` while the engine generates."""
        train(self.policy, seed=version)
        busy = asyncio.create_task(self.engine.keep_busy())
        started = time.perf_counter()
        self.policy.before_publish()
        merging = time.perf_counter() - started
        sync, pause = await self._ways.ours(version)
        busy.cancel()
        with suppress(asyncio.CancelledError):
            await busy
        return merging + sync, pause

    async def close(self) -> None:
        """End the engine."""
        await self._ways.close()
        await self.engine.engine.close()


@torch.no_grad()
def train(policy: CausalLMPolicy, *, seed: int) -> None:
    """Change every adapter, as a step does."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in policy.weights().values():
        tensor.add_(0.01 * torch.randn(tensor.shape, generator=generator))


async def measure(model: Path, rounds: int) -> tuple[dict[str, list[Taken]], dict[str, float], int]:
    """Return the times of each form in every round, the bytes of a sync, and those of the adapters."""
    sides = {
        "adapter": await asyncio.to_thread(Side, model, "scaled"),
        "merged": await asyncio.to_thread(Side, model, "merged"),
    }
    for side in sides.values():
        await side.open()
    times: dict[str, list[Taken]] = {form: [] for form in sides}
    sent: dict[str, float] = {}
    for version in range(rounds + 1):  # the first takes page faults
        for form, side in sides.items():
            before = side.publisher.sent_bytes
            times[form].append(await side.sync(version))
            sent[form] = side.publisher.sent_bytes - before
    size = sum(2 * tensor.numel() for tensor in sides["adapter"].policy.weights().values())
    for side in sides.values():
        await side.close()
    return {form: taken[1:] for form, taken in times.items()}, sent, size


def metrics(times: Mapping[str, Sequence[Taken]], sent: Mapping[str, float], size: int) -> list[Figure]:
    """Medians of both forms, and their ratios in the same round."""
    figures = [Figure(metric=f"{form}: bytes of a sync", value=sent[form], unit="B") for form in times]
    ratio = sent["adapter"] / size
    figures.append(Figure(metric="bytes of a sync / adapters", value=ratio, unit="x", target="<= 1.05"))
    figures.append(Figure(metric="adapter / merged: bytes", value=sent["adapter"] / sent["merged"], unit="x"))
    for i, name in enumerate(("sync", "pause")):
        for form, taken in times.items():
            figures.append(Figure(metric=f"{form}: {name}", value=median(each[i] for each in taken), unit="s"))
        ratio = median(mine[i] / other[i] for mine, other in zip(times["adapter"], times["merged"]))
        figures.append(Figure(metric=f"adapter / merged: {name}", value=ratio, unit="x"))
    return figures


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
        times, sent, size = asyncio.run(measure(model, rounds=10))
    gc.collect()  # vLLM's client complains when the end of the interpreter collects it
    report("lora_sync", metrics(times, sent, size))


if __name__ == "__main__":
    main()
