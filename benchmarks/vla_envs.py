"""Simulators: our pool beside gymnasium's AsyncVectorEnv, on the same MetaWorld tasks, in turn, in one run.

.venv/bin/python benchmarks/vla_envs.py [--quick]

A chunk-step is five environment steps that follow one decision, and the observation after them: one camera of 64x64
pixels and the hand's state. Both sides have the same tasks, actions and number of environments, and pass observations
in shared memory. The peer renders its camera in each step, as vector environments do: once with shadows and
multisampling off as ours are (the ratio with a target), once with MetaWorld's own settings.

Overlap is the time of the longer of simulation and inference alone, over the time of both in the engine.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from _metrics import Figure, report
from _vla_overlap import measure_overlap
from _vla_peer import CAMERA, SIZE, vectorise
from gymnasium.vector import AsyncVectorEnv

from cosmos_rl_vla.sims.pool.pool import SimulatorPool

TASKS = ["faucet-open", "faucet-close", "button-press-topdown", "door-unlock"]
HORIZON = 5
ACTIONS = 4
PHASE_SLOTS = 16
"""Episodes side by side in a rollout phase; it has three times as many, so that its end does not decide."""
COSMOS_BYTES = 3 * 224 * 224 * 3 * 4
"""What cosmos-rl keeps of a decision: three images of 224x224 in float32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer environments and rounds")
    quick = parser.parse_args().quick
    slots, rounds, chunks, slow = (4, 3, 10, 1) if quick else (8, 12, 16, 2)
    overlap = measure_overlap(TASKS, slots=PHASE_SLOTS, episodes=3 * PHASE_SLOTS, rounds=rounds)
    tasks = [TASKS[slot % len(TASKS)] for slot in range(slots)]
    ours = SimulatorPool(
        "cosmos_rl_vla.sims.metaworld:MetaWorld",
        options={"image_size": SIZE, "max_steps": 500},
        groups=2,
        slots_per_group=slots // 2,
    )
    light, stock = vectorise(tasks, light=True), vectorise(tasks, light=False)
    try:
        rates = measure(
            {
                "ours": (chunks, lambda number: drive_pool(ours, tasks, number)),
                "light": (chunks, lambda number: drive_vector(light, number)),
                "stock": (slow, lambda number: drive_vector(stock, number)),
            },
            rounds=rounds,
            slots=slots,
        )
    finally:
        ours.close()
        light.close()
        stock.close()
    decision = sum(array[0].nbytes for array in (*ours.images.values(), ours.states))
    note = (
        f"{slots} environments, {rounds} rounds, medians; ours in 2 processes, AsyncVectorEnv in {slots}; "
        f"{HORIZON} steps a chunk, {CAMERA} {SIZE}x{SIZE}"
    )
    report(
        "vla_envs",
        [
            Figure(metric="our pool", value=median(rates["ours"]), unit="chunk-steps/s", note=note),
            Figure(metric="AsyncVectorEnv, drawn as ours", value=median(rates["light"]), unit="chunk-steps/s"),
            Figure(metric="AsyncVectorEnv, drawn as it comes", value=median(rates["stock"]), unit="chunk-steps/s"),
            ratio(rates, "light", "our pool / drawn as ours", target=">= 3"),
            ratio(rates, "stock", "our pool / drawn as it comes"),
            *overlap_figures(overlap, slots=PHASE_SLOTS),
            Figure(metric="observation of a decision", value=decision, unit="bytes"),
            Figure(metric="cosmos-rl's", value=COSMOS_BYTES, unit="bytes", note="as its source has it, not run here"),
        ],
    )


def ratio(rates: dict[str, list[float]], peer: str, metric: str, *, target: str = "") -> Figure:
    value = median(a / b for a, b in zip(rates["ours"], rates[peer]))
    return Figure(metric=metric, value=value, unit="times", target=target, note="ratios are within a round")


def overlap_figures(overlap: dict[str, float], *, slots: int) -> list[Figure]:
    note = (
        f"a rollout phase: episodes of a tiny pi0.5 in {slots} slots of 2 processes; the policy has one core, the "
        "simulators have the others; on a machine that others use as well it comes out lower"
    )
    halves = [
        Figure(metric=f"rollout phase, {name}", value=overlap[name], unit="s", note=note)
        for name in ("simulation", "inference", "both")
    ]
    return [*halves, Figure(metric="overlap", value=overlap["overlap"], unit="times", target=">= 0.9", note=note)]


def measure(sides: dict[str, tuple[int, Callable[[int], float]]], *, rounds: int, slots: int) -> dict[str, list[float]]:
    """Return chunk-steps per second of each round by side; the first round warms up and is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, (chunks, drive) in sides.items():
            seconds = drive(chunks)
            if number:
                rates[name].append(slots * chunks / seconds)
    return rates


def drive_pool(pool: SimulatorPool, tasks: list[str], chunks: int) -> float:
    """Begin an episode in each slot, then run chunks in all of them. Returns the time of the chunks in seconds."""
    everywhere = range(len(tasks))
    for slot, task in enumerate(tasks):
        pool.start(slot, task=task, init=slot)
    wait_for_all(pool, len(tasks))
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    for _ in range(chunks):
        pool.submit(everywhere, random_actions(rng, len(tasks)))
        wait_for_all(pool, len(tasks))
        looked_at(pool.images[CAMERA], pool.states)
    return time.perf_counter() - start


def wait_for_all(pool: SimulatorPool, number: int) -> None:
    while number:
        number -= len(pool.wait())


def drive_vector(environments: AsyncVectorEnv, chunks: int) -> float:
    """Do the same with gymnasium's."""
    environments.reset(seed=list(range(environments.num_envs)))
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    for _ in range(chunks):
        actions = random_actions(rng, environments.num_envs)
        for step in range(HORIZON):
            seen, *_ = environments.step(actions[:, step])
        looked_at(seen["image"], seen["state"])
    return time.perf_counter() - start


def random_actions(rng: np.random.Generator, slots: int) -> np.ndarray:
    return rng.uniform(-0.5, 0.5, (slots, HORIZON, ACTIONS)).astype(np.float32)


def looked_at(images: np.ndarray, states: np.ndarray) -> None:
    """Copy the batch out of shared memory, as a policy would."""
    assert images.copy().any() and math.isfinite(states.copy().sum())


if __name__ == "__main__":
    main()
