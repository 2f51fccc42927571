"""GRPO of a language model on the CPU: this framework beside TRL's GRPOTrainer, the same work in alternating runs.

    .venv/bin/python benchmarks/llm_vs_trl.py [--quick] [--model DIR] [section.key=value ...]

Workload A is a Qwen3 of 0.8 million random parameters, workload B is SmolLM2-135M; both answer "a+b=" (_digits.py)
with 8 prompts x 8 samples x 16 tokens per step (SmolLM2 with --quick: 2 prompts), in float32. A round runs TRL, then us
asynchronously (max_staleness = 1, the default) and, in workload A, us synchronously (0). Metrics are medians over the
rounds; comparisons are between two medians. CPU time per step does not depend on other load of the machine. A side's
memory is that of all its processes, read in a further run of each side whose times do not count.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import sub, truediv
from pathlib import Path
from statistics import median

import _digits
from _metrics import Figure, report
from _peer_env import TRL as REQUIREMENT
from _peer_env import our_python, peer_python
from _sides import ASYNC, HERE, SYNC, TRL, WORK, Outcome, Sides, Workload
from _watch import CommandFailed

TRL_ROOT = HERE.parent / ".cache" / "trl"
OUR_ROOT = HERE.parent / ".cache" / "ours"
OURS = ("cosmos-rl-core", "cosmos-rl-transfer", "cosmos-rl-llm")
MODEL = HERE.parent / "models" / "SmolLM2-135M-Instruct"
QWEN3, SMOLLM2 = "Qwen3 0.8M", "SmolLM2"
MIB = 1 << 20
SIGNS = {truediv: "/", sub: "-"}

TIME_NOTE = (
    "both sides have the same cores and OMP_WAIT_POLICY=PASSIVE (unless it is set), without which TRL's threads spin: "
    "on a busy machine its step then takes several times as long. Where other work runs too, seconds are noise; ratios "
    "and CPU time count"
)
FIRST_NOTE = "from the command to the first finished step, imports included; bytecode is compiled on both sides"
MEMORY_NOTE = (
    "peak RSS: the peak of each process (VmHWM) added up. TRL is one process; ours are controller, policy and rollout, "
    "and what they share (libraries, the weights on their way) counts in each. PSS counts shared pages once"
)
SIZE_NOTE = "installed size without bytecode, each in an environment with nothing else"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity of a run, and the comparison of the two sides."""

    text: str
    unit: str
    of: Callable[[Outcome], float]
    compare: Callable[[float, float], float] | None = None
    """(ours, TRL's) -> what is reported beside the two."""
    target: str = ""
    """What the comparison of the asynchronous side is to reach."""
    note: str = ""
    is_memory: bool = False


STEP = Row(text="step", unit="s", of=lambda one: one.step_s, compare=truediv, target="<= 0.7", note=TIME_NOTE)
TRAINED = Row(
    text="trained",
    unit="tokens/s",
    of=lambda one: one.terms_per_s,
    compare=truediv,
    target=">= 1.8",
    note=TIME_NOTE,
)
CPU = Row(text="CPU time a step", unit="s", of=lambda one: one.cpu_s, compare=truediv)
REWARD = Row(
    text="reward at step 30",
    unit="",
    of=lambda one: one.reward,
    compare=sub,
    target=">= 0",
    note="reward: mean of steps 26 to 30",
)
FIRST_STEP = Row(
    text="first step after",
    unit="s",
    of=lambda one: one.watched.first_step_s,
    compare=truediv,
    note=FIRST_NOTE,
)
RSS = Row(
    text="peak RSS",
    unit="MiB",
    of=lambda one: one.watched.peak_rss / MIB,
    compare=truediv,
    note=MEMORY_NOTE,
    is_memory=True,
)
PSS = replace(RSS, text="peak PSS", of=lambda one: one.watched.peak_pss / MIB)
QWEN3_ROWS = (STEP, CPU, REWARD, FIRST_STEP, RSS, PSS)
SMOLLM2_ROWS = (TRAINED, CPU, FIRST_STEP, RSS, PSS)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of one side."""

    timed: Sequence[Outcome]
    memory: Outcome
    """The run whose memory was read."""

    def median_of(self, row: Row) -> float:
        return row.of(self.memory) if row.is_memory else median(row.of(one) for one in self.timed)


def alternate(sides: Sides, workload: Workload, rounds: int) -> dict[str, Runs]:
    timed: dict[str, list[Outcome]] = {side: [] for side in workload.sides}
    for number in range(rounds):
        for side in workload.sides:
            one = sides.run(workload, side)
            timed[side].append(one)
            print(
                f"{workload.title}, round {number + 1}, {side}: {one.step_s:.3f} s/step, reward {one.reward:.3f}, "
                f"first step after {one.watched.first_step_s:.1f} s, {one.terms_per_s:,.0f} tokens/s, "
                f"{one.cpu_s:.3f} CPU s/step",
                flush=True,
            )
    return {side: Runs(timed=timed[side], memory=sides.run(workload, side, memory=True)) for side in workload.sides}


def table(title: str, outcomes: Mapping[str, Runs], rows: Iterable[Row]) -> list[Figure]:
    """Return each row for each side, followed by its comparison with TRL."""
    metrics = []
    for row in rows:
        values = {side: runs.median_of(row) for side, runs in outcomes.items()}
        metrics += [
            Figure(metric=f"{title}: {row.text}, {side}", value=value, unit=row.unit, note=row.note)
            for side, value in values.items()
        ]
        metrics += [
            Figure(
                metric=f"{title}: {row.text}, {side} {SIGNS[row.compare]} {TRL}",
                value=row.compare(value, values[TRL]),
                unit="x" if row.compare is truediv else row.unit,
                target=row.target if side == ASYNC else "",
                note=row.note,
            )
            for side, value in values.items()
            if side != TRL and row.compare is not None
        ]
    overlap = median(one.overlap for one in outcomes[ASYNC].timed)
    text = f"{title}: step / max(generation, training), {ASYNC}"
    return [*metrics, Figure(metric=text, value=overlap, unit="x", target="<= 1.05")]


def unmeasured(title: str, why: str, rows: Iterable[Row]) -> list[Figure]:
    """Return the rows with a target as metrics that cannot be measured on this machine."""
    return [
        Figure(metric=f"{title}: {row.text}, {ASYNC} and {TRL}", value=math.nan, unit="", target=row.target, note=why)
        for row in rows
        if row.target
    ]


def sizes() -> list[Figure]:
    """Disk space of an installation."""
    roots = {"ours": OUR_ROOT, TRL: TRL_ROOT}
    return [
        Figure(metric=f"environment on disk, {side}", value=_size(root) / MIB, unit="MiB", note=SIZE_NOTE)
        for side, root in roots.items()
    ]


def _size(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")


def measure(sides: Sides, *, quick: bool, smollm2: Path) -> list[Figure]:
    sides.warm_up()
    tiny = WORK / "tiny"
    _digits.write_model(tiny)
    work = Workload(title=QWEN3, model=tiny, steps=30, warm=5, sides=(TRL, ASYNC, SYNC), learning_rate=3e-3)
    metrics = table(QWEN3, alternate(sides, work, rounds=2 if quick else 5), QWEN3_ROWS)
    if not (smollm2 / "config.json").is_file():
        why = f"no model in {smollm2.name}: scripts/fetch_smollm2 gets it, or name a folder by --model"
        return metrics + unmeasured(SMOLLM2, why, SMOLLM2_ROWS)
    work = Workload(
        title=SMOLLM2,
        model=smollm2,
        steps=5 if quick else 8,
        warm=1,
        sides=(TRL, ASYNC),
        learning_rate=1e-5,
        prompts_per_step=2 if quick else 8,
    )
    return metrics + table(SMOLLM2, alternate(sides, work, rounds=1 if quick else 3), SMOLLM2_ROWS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and a smaller workload B")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of SmolLM2-135M (scripts/fetch_smollm2)")
    parser.add_argument("overrides", nargs="*", help="section.key=value for our side")
    given = parser.parse_args()
    trl, ours = peer_python(REQUIREMENT, TRL_ROOT), our_python(OURS, OUR_ROOT)
    if isinstance(trl, str) or isinstance(ours, str):
        why = " / ".join(each for each in (trl, ours) if isinstance(each, str))
        report("llm_vs_trl", unmeasured(QWEN3, why, QWEN3_ROWS) + unmeasured(SMOLLM2, why, SMOLLM2_ROWS))
        return 0
    try:
        sides = Sides(ours=ours, trl=trl, overrides=given.overrides)
        metrics = measure(sides, quick=given.quick, smollm2=given.model.resolve())
    except CommandFailed as error:
        print(error, file=sys.stderr)
        return 1
    report("llm_vs_trl", [*metrics, *sizes()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
