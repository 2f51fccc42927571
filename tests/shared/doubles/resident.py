"""The resident memory that a recipe's policy or engine takes in this process, to be compared with `cosmos-rl plan`.

    with ResidentPeak() as peak: ...                    # peak.bytes: the growth inside the block
    policy_peak(build, make_batch)                      # of a policy rank: built, with two training steps
    engine_peak(build, prompts, config=config)          # of a rollout replica: built, with a group for each prompt

The kernel keeps the largest resident size since `/proc/self/clear_refs` was last written (proc(5), `VmHWM`), so that a
peak between two samples is not missed. Code and data of libraries count from the first time they are touched: run a
small form of the same recipe first, so that only the memory of the measured one is left.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.types import Prompt, RolloutGroup, TrainBatch, TrainStep

if TYPE_CHECKING:
    from cosmos_rl_core.interfaces import Policy, Reference, RolloutEngine
    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_core.train.trainer import Trainer

NUM_STEPS = 2
"""The first step creates the optimizer's state; the second one has it during its passes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAPPED_BYTES = 128 * 2**10
"""glibc's first threshold, which it raises up to 32 MiB as larger blocks are freed."""
_PEAK_RESIDENT = "5"


class ResidentPeak:
    """Measures the growth of resident memory inside a `with` block. Linux with glibc."""

    def __init__(self) -> None:
        self.bytes = 0
        """Peak of the block above the resident memory before it."""
        self._before = 0

    def __enter__(self) -> Self:
        _return_free_memory()
        self._before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text(_PEAK_RESIDENT)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.bytes = _status("VmHWM") - self._before


def policy_peak(
    build: Callable[[], tuple[Trainer, Reference | None]], make_batch: Callable[[Policy], TrainBatch]
) -> int:
    """Return the peak growth while a policy rank, and the reference if there is one, is built and trained.

    Ranks of a replica call this together. make_batch: returns the batch of each step, this rank's share of it.
    """
    from cosmos_rl_core.train.learner import FrozenModels, PolicyLearner

    with ResidentPeak() as peak, ThreadPoolExecutor(max_workers=1) as compute:
        trainer, reference = build()
        learner = PolicyLearner(
            trainer,
            publisher=None,
            frozen=FrozenModels(reference=reference),
            compute=compute,
            timeline=Timeline("test"),
            max_skipped_steps=0,
        )
        batch = make_batch(trainer.policy)
        for _ in range(NUM_STEPS):
            asyncio.run(learner.forward_backward(TrainStep(batches=(batch,))))
            result = asyncio.run(learner.optim_step())
            assert not result.skipped, "a gradient was not finite"
    return peak.bytes


def engine_peak(
    build: Callable[[], RolloutEngine], prompts: Sequence[Prompt], *, config: RunConfig
) -> tuple[int, list[RolloutGroup]]:
    """Return the peak growth while an engine is built and generates all groups at once, and the groups.

    The weights stay those that the engine was built with. Every rollout gets the advantage 1.
    """
    with ResidentPeak() as peak:
        engine = build()
        groups = asyncio.run(_generated(config, engine, prompts))
        del engine
    return peak.bytes, groups


async def _generated(config: RunConfig, engine: RolloutEngine, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
    async def group_of(prompt: Prompt) -> RolloutGroup:
        _, rollouts = await engine.generate(
            prompt, num_samples=config.rollout.group_size, sampling=config.rollout.sampling.build(), seed=0
        )
        return RolloutGroup(prompt=prompt, rollouts=tuple(replace(rollout, advantage=1.0) for rollout in rollouts))

    await engine.switch(0, lambda: None)
    groups = await asyncio.gather(*map(group_of, prompts))
    await engine.close()
    return groups


def _return_free_memory() -> None:
    """Free unreachable objects, and return free memory to the kernel, now and whenever a large block is freed."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _MAPPED_BYTES)
    libc.malloc_trim(0)


def _status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 2**10
    raise KeyError(key)
