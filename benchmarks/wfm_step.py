"""FlowGRPO: a training step beside a plain loop, and rollouts, rewards and training at the same time.

    .venv/bin/python benchmarks/wfm_step.py [--quick]

The plain loop (_wfm_peer.py) is one process in the order of flow_grpo's scripts. Both sides sample the same number of
rollouts, of the same prompts, with the same network, text encoder, codec and reward; train the same steps against the
same reference; and take turns, on one thread. Ours copies the weights to its engine too. A metric is a median over
rounds, a ratio the median of the rounds' ratios.

The last metrics are of runs in processes (_wfm_overlap.py), one core each for rollouts and training: first beside the
plain loop, with the faster of one and two threads; then with a reward that takes as long as the rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import _wfm_overlap
import torch
from _metrics import Figure, report
from _wfm_ours import OurLoop, recipe
from _wfm_overlap import Phases
from _wfm_parity import gradient_difference, plain_loop
from _wfm_peer import PlainLoop
from _wfm_work import SMALL, TINY, Model, TextName, Work, write_model

from cosmos_rl_core.types import Prompt

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "wfm_step"
NOTE = (
    "the plain loop takes 8 samples at one step to a forward pass, as flow_grpo's recipe for Wan2.1 does, ours 32 "
    "steps of any samples (16 with --quick); neither recomputes activations, log-probabilities of rollouts, or "
    "guidance that is off"
)
LEAST = ">= 1"
"""Samples a second over those of the plain loop."""
RUN = f"rollouts may be {_wfm_overlap.MAX_STALENESS} versions old; the plain loop's never are, as nothing overlaps"
CHECKPOINTED = "flow_grpo's script for Wan2.1 always recomputes activations in the backward pass"
WAITS = "the reward of each group takes as long as the rollouts of a step, and none of the cores"

Step = Callable[[Sequence[Prompt]], Awaitable[Mapping[str, float]]]
Rounds = Mapping[str, list[Mapping[str, float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less work and fewer rounds, within a minute")
    quick = parser.parse_args().quick
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    tiny = Work(num_prompts=2, terms=16) if quick else Work()
    small = Work(num_prompts=2, terms=16, num_steps=5, trained=(0, 2)) if quick else Work()
    rounds = 2 if quick else 9
    metrics = [
        *asyncio.run(step_figures(TINY, "words", work=tiny, rounds=rounds)),
        *asyncio.run(step_figures(TINY, "umt5", work=tiny, rounds=rounds, variants=not quick)),
        *asyncio.run(step_figures(SMALL, "umt5", work=small, rounds=rounds, variants=not quick)),
        *run_figures(TINY, quick=quick, waits=True),
        *([] if quick else run_figures(SMALL, quick=quick)),
    ]
    report("wfm_step", metrics)
    return 0


async def step_figures(
    model: Model, text: TextName, *, work: Work, rounds: int, variants: bool = False
) -> list[Figure]:
    """Samples a second of both sides, in turns; with `variants`, of either side changed in one way too."""
    folder = write_model(model, CACHE)
    loops = [await OurLoop.make(recipe(model, folder, text=text, work=work))]
    sides = {"plain loop": _awaited(plain_loop(model, folder, text=text, work=work)), "ours": loops[0].step}
    if variants:
        whole = plain_loop(model, folder, text=text, work=replace(work, batch=work.num_samples))
        checkpointed = plain_loop(model, folder, text=text, work=work, checkpointing=True)
        loops.append(await OurLoop.make(recipe(model, folder, text=text, work=replace(work, terms=work.batch))))
        sides |= {
            "plain loop, all samples at once": _awaited(whole),
            "plain loop, activations recomputed": _awaited(checkpointed),
            "ours, 8 steps at once": loops[1].step,
        }
    taken = await in_turns(sides, model.prompts, work=work, rounds=rounds)
    for loop in loops:
        await loop.close()
    title = f"{model.name}, {text}"
    return [
        Figure(metric=f"{title}: ours", value=work.num_samples / _middle(taken["ours"]), unit="samples/s"),
        *(_ratio(title, "ours", side, taken) for side in sides if side.startswith("plain")),
        *(_ratio(title, "ours", side, taken, by="cpu_s") for side in sides if side.startswith("plain")),
        *(_ratio(title, side, "plain loop", taken) for side in sides if side.startswith("ours,")),
        Figure(metric=f"{title}: of that, rollouts", value=_faster(taken, "rollout_s"), unit="x"),
        Figure(metric=f"{title}: of that, training", value=_faster(taken, "train_s"), unit="x"),
        Figure(
            metric=f"{title}: gradients, |ours - plain| / |ours|",
            value=await gradient_difference(model, folder, text=text, work=work),
            unit="",
            target="<= 1e-5",
        ),
    ]


async def in_turns(sides: Mapping[str, Step], prompts: Sequence[Prompt], *, work: Work, rounds: int) -> Rounds:
    """Seconds of every side's steps; the first round warms up and is not counted."""
    taken: Rounds = {side: [] for side in sides}
    for number in range(rounds + 1):
        first = number * work.num_prompts % (len(prompts) - work.num_prompts + 1)
        names = list(sides)[:: 1 if number % 2 else -1]
        done = {side: await _with_cpu(sides[side], prompts[first : first + work.num_prompts]) for side in names}
        if number:
            for side, seconds in done.items():
                taken[side].append(seconds)
    return taken


def run_figures(model: Model, *, quick: bool, waits: bool = False) -> list[Figure]:
    """Runs in processes beside the plain loop; with `waits` also with a slow reward."""
    work = Work(group_size=8 if quick else 16, trained=(0, 2, 4))
    folder, steps, rounds = write_model(model, CACHE), 12 if quick else 60, 1 if quick else 4
    plain = plain_loop(model, folder, text="words", work=work)
    alone = {threads: _seconds(plain, model, threads, rounds) for threads in (1, 2)}
    free = _wfm_overlap.measure(model, folder, work=work, steps=steps, reward_s=0.0, out=CACHE / "run_free")
    fastest = min(median(taken + _seconds(plain, model, threads, rounds)) for threads, taken in alone.items())
    title = f"{model.name}, run"
    metrics = [
        Figure(metric=f"{title}: plain loop, 1 or 2 threads", value=work.num_samples / fastest, unit="samples/s"),
        Figure(metric=f"{title}: ours, 2 processes", value=work.num_samples / free.step, unit="samples/s"),
        Figure(metric=f"{title}: ours / plain loop", value=fastest / free.step, unit="x", target=LEAST, note=RUN),
    ]
    if waits:
        out = CACHE / "run_waits"
        metrics += _overlap(_wfm_overlap.measure(model, folder, work=work, steps=steps, reward_s=free.rollout, out=out))
    return metrics


def _overlap(phases: Phases) -> list[Figure]:
    without_reward = max(phases.rollout, phases.train)
    return [
        Figure(metric="overlap: rollouts of a step", value=phases.rollout, unit="s"),
        Figure(metric="overlap: reward of each group", value=phases.reward, unit="s", note=WAITS),
        Figure(metric="overlap: training of a step", value=phases.train, unit="s"),
        Figure(metric="overlap: step", value=phases.step, unit="s"),
        Figure(
            metric="overlap: step / max(rollout, reward, train)",
            value=phases.step / phases.longest,
            unit="x",
            target="<= 1.05",
        ),
        Figure(
            metric="overlap: step / max(rollout, train)",
            value=phases.step / without_reward,
            unit="x",
            note="rewards of several groups are waited for side by side: a step may be shorter than one of them",
        ),
    ]


def _seconds(plain: PlainLoop, model: Model, threads: int, rounds: int) -> list[float]:
    """Seconds of steps of the plain loop, after one that warms up."""
    torch.set_num_threads(threads)
    prompts = model.prompts[: plain.work.num_prompts]
    taken = [plain.step(prompts)["step_s"] for _ in range(rounds + 1)][1:]
    torch.set_num_threads(1)
    return taken


async def _with_cpu(step: Step, prompts: Sequence[Prompt]) -> Mapping[str, float]:
    """Take a step, and time this process's CPU too: on a machine with other work it says more than the clock."""
    started = time.process_time()
    taken = await step(prompts)
    return {**taken, "cpu_s": time.process_time() - started}


def _awaited(plain: PlainLoop) -> Step:
    async def step(prompts: Sequence[Prompt]) -> Mapping[str, float]:
        return plain.step(prompts)

    return step


def _ratio(title: str, faster: str, slower: str, taken: Rounds, *, by: str = "step_s") -> Figure:
    """Ratios of samples per second, or per second of the CPU, round by round."""
    ratios = [slow[by] / fast[by] for slow, fast in zip(taken[slower], taken[faster], strict=True)]
    plainest = (faster, slower) == ("ours", "plain loop")
    note = NOTE if plainest else CHECKPOINTED if "recomputed" in slower else ""
    name = f"{title}: {faster} / {slower}" + (", time of the CPU" if by == "cpu_s" else "")
    return Figure(metric=name, value=median(ratios), unit="x", target=LEAST if plainest else "", note=note)


def _faster(taken: Rounds, phase: str) -> float:
    return median(slow[phase] / fast[phase] for slow, fast in zip(taken["plain loop"], taken["ours"], strict=True))


def _middle(steps: Sequence[Mapping[str, float]]) -> float:
    return median(step["step_s"] for step in steps)


if __name__ == "__main__":
    sys.exit(main())
