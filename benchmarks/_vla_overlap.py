"""The time of a rollout phase compared with its two halves: episodes of MetaWorld decided by a tiny pi0.5.

    both         the engine plays the episodes; the inputs of each slot and each pass are recorded
    simulation   the slots repeat theirs without waiting for a policy
    inference    the passes are repeated without waiting for simulators

With perfect overlap a phase is as long as the longer half. Simulators and policy have separate cores, so that waiting
is measured and not a lack of cores.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from cosmos_rl_core.types import Prompt
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig, VLASampling
from cosmos_rl_vla.engines.torch import SimulationEngine, VLATorchOptions
from cosmos_rl_vla.models.base import Acted, Inputs, Randomness
from cosmos_rl_vla.models.families import load
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.sims.metaworld import instruction
from cosmos_rl_vla.sims.pool.pool import SimulatorPool

STEPS = 40
"""Of an episode, all of which are played: the policy has learnt nothing."""


class NotingPool(SimulatorPool):
    """Records the commands of each slot."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.script: dict[int, list[tuple[str, int] | np.ndarray]] = {}

    def start(self, slot: int, *, task: str, init: int) -> None:
        self.script.setdefault(slot, []).append((task, init))
        super().start(slot, task=task, init=init)

    def submit(self, slots: Sequence[int], actions: np.ndarray) -> None:
        for slot, chunk in zip(slots, actions):
            self.script[slot].append(chunk)
        super().submit(slots, actions)


def measure_overlap(tasks: Sequence[str], *, slots: int, episodes: int, rounds: int) -> dict[str, float]:
    """Return medians over rounds: seconds of "both", "simulation" and "inference", and their "overlap"."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return dict.fromkeys(("both", "simulation", "inference", "overlap"), float("nan"))
    with threads(1), tempfile.TemporaryDirectory() as folder, on_cores(cores[:-1]):
        loaded = tiny_policy(tasks, Path(folder))
        pool = NotingPool(
            "cosmos_rl_vla.sims.metaworld:MetaWorld",
            options={"image_size": 64, "max_steps": 500},
            groups=2,
            slots_per_group=slots // 2,
        )
        with on_cores(cores[-1:]):
            return asyncio.run(_rounds(loaded, pool, tasks, episodes=episodes, rounds=rounds))


async def _rounds(
    loaded: LoadedPolicy, pool: NotingPool, tasks: Sequence[str], *, episodes: int, rounds: int
) -> dict[str, float]:
    passes: list[Callable[[], Acted]] = []
    note_passes(loaded, passes)
    engine = SimulationEngine(loaded, pool=pool, options=VLATorchOptions())
    seconds: dict[str, list[float]] = {name: [] for name in ("both", "simulation", "inference")}
    try:
        for number in range(rounds + 1):
            pool.script.clear()
            passes.clear()
            taken = {"both": await timed_episodes(engine, tasks, episodes=episodes)}
            script = {slot: list(done) for slot, done in pool.script.items()}
            taken["simulation"] = timed(lambda: play(pool, script))  # noqa: B023
            taken["inference"] = timed(lambda: [each() for each in list(passes)])
            for name, value in taken.items():
                if number:  # the first builds scenes
                    seconds[name].append(value)
    finally:
        await engine.close()
    overlaps = [max(a, b) / both for both, a, b in zip(*seconds.values())]
    return {name: median(values) for name, values in seconds.items()} | {"overlap": median(overlaps)}


async def timed_episodes(engine: SimulationEngine, tasks: Sequence[str], *, episodes: int) -> float:
    start = time.perf_counter()
    rows = [{"task": task, "init": number, "instruction": instruction(task)} for number, task in enumerate(tasks)]
    asked = [
        engine.generate(
            Prompt(sample_id=number, row=rows[number % len(rows)]),
            num_samples=1,
            sampling=VLASampling(max_steps=STEPS),
            seed=number,
        )
        for number in range(episodes)
    ]
    await asyncio.gather(*asked)
    return time.perf_counter() - start


def play(pool: NotingPool, script: dict[int, list[tuple[str, int] | np.ndarray]]) -> None:
    """Make each slot run its part of the script as soon as it is idle."""
    left = {slot: iter(done) for slot, done in script.items()}
    standing = list(left)
    while standing or left:
        chunks: dict[int, np.ndarray] = {}
        for slot in standing:
            match next(left[slot], None):
                case None:
                    del left[slot]
                case (task, init):
                    pool.start(slot, task=task, init=init)
                case chunk:
                    chunks[slot] = chunk
        if chunks:
            pool.submit(list(chunks), np.stack(list(chunks.values())))
        standing = [event.slot for event in pool.wait()] if left else []


def note_passes(loaded: LoadedPolicy, passes: list[Callable[[], Acted]]) -> None:
    """Record each pass of the model, to repeat it."""
    act = loaded.model.act

    def noted(inputs: Inputs, *, randomness: Randomness, greedy: bool = False) -> Acted:
        passes.append(lambda: act(inputs, randomness=randomness, greedy=greedy))
        return act(inputs, randomness=randomness, greedy=greedy)

    vars(loaded.model)["act"] = noted  # in place of the method


def tiny_policy(tasks: Sequence[str], folder: Path) -> LoadedPolicy:
    ActionStats.unit(4).save(folder)
    words = tuple(instruction(task) for task in tasks)
    config = VLAModelConfig(action_dim=4, state_dim=4, words=words, stats=str(folder / "action_stats.json"))
    return load(config)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Run this thread, and the threads and processes started within the context, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
