"""GRPO of a language model on the CPU: this framework beside TRL's GRPOTrainer, the same work in alternating runs.

    .venv/bin/python benchmarks/llm_vs_trl.py [--quick] [--model DIR] [section.key=value ...]

Workload A is a Qwen3 of 0.8 million random parameters, workload B is SmolLM2-135M; both answer "a+b=" (_digits.py)
with 8 prompts x 8 samples x 16 tokens a step (SmolLM2 with --quick: 2 prompts), in float32. A round runs TRL, then us asynchronously (max_staleness = 1,
the default) and, in workload A, us synchronously (0). Figures are medians over the rounds. A side's memory is
that of all its processes. CPU time a step says what a busy machine hides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import _digits
from _figures import Figure, report
from _trl_env import trl_python
from _watch import CommandFailed, Watched, watch

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache"
WORK = CACHE / "llm_vs_trl"
SMOLLM2 = HERE.parent / "models" / "SmolLM2-135M-Instruct"
TRL, ASYNC, SYNC = "TRL", "ours", "ours, max_staleness = 0"
STALENESS = {ASYNC: 1, SYNC: 0}
TIMEOUT_S = 900.0

NOTES = {
    "time": (
        "both sides have the same cores and OMP_WAIT_POLICY=PASSIVE (unless it is set), without which TRL's threads "
        "spin: on a busy machine its step then takes several times as long. Where other work runs too, seconds are "
        "noise; ratios and CPU time count"
    ),
    "first": "from the command to the first finished step, imports included; bytecode compiled on both sides",
    "rss": (
        "peak RSS: the peak of each process (VmHWM) added up. TRL is one process; ours are controller, policy and "
        "rollout, which share torch's and Python's files, counted in each. PSS counts shared pages once"
    ),
    "size": "installed size: ours with every development tool (tests, linters), TRL's with TRL alone",
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model and how long to train it."""

    title: str
    model: Path
    steps: int
    warm: int
    """First steps left out of steady state. So is the last: ours has no generation left to do beside it."""
    sides: tuple[str, ...]
    learning_rate: float
    prompts_per_step: int = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One side's run."""

    step_s: float
    """Median in steady state."""
    cpu_s: float
    """CPU time of all processes a step in steady state."""
    terms_per_s: float
    """Completion tokens trained, over the time they took, in steady state."""
    reward: float
    """Mean of the last five steps."""
    watched: Watched


class Bench:
    """The two sides and what both need."""

    def __init__(self, trl: Path, overrides: Sequence[str]) -> None:
        self._trl = trl
        self._overrides = overrides
        self._prompts = WORK / "prompts.jsonl"
        WORK.mkdir(parents=True, exist_ok=True)
        _digits.write_prompts(self._prompts)
        unwanted = {"PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}
        inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
        self._environment = {**inherited, "HF_HUB_OFFLINE": "1"}
        self._environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def warm_up(self) -> None:
        """Import both sides once, so that no run has to compile Python's bytecode."""
        imports = "from transformers import LlamaForCausalLM, Qwen3ForCausalLM"
        for python, module in (
            (sys.executable, "cosmos_rl_llm.engines.torch"),
            (self._trl, "trl.trainer.grpo_trainer"),
        ):
            command = [str(python), "-c", f"import {module}; {imports}"]
            subprocess.run(command, check=True, env=self._environment, capture_output=True)

    def run(self, workload: Workload, side: str) -> Outcome:
        out = WORK / "run"
        shutil.rmtree(out, ignore_errors=True)
        if side == TRL:
            out.mkdir()
            command = self._trl_command(workload, out)
        else:
            command = self._our_command(workload, out, max_staleness=STALENESS[side])
        watched = watch(
            command,
            steps=out / "metrics.jsonl",
            log=WORK / "output.log",
            environment=self._environment,
            timeout_s=TIMEOUT_S,
        )
        return outcome(out / "metrics.jsonl", watched, warm=workload.warm)

    def _trl_command(self, workload: Workload, out: Path) -> list[str]:
        cores = len(os.sched_getaffinity(0))
        values = {
            "model": workload.model,
            "prompts": self._prompts,
            "steps": workload.steps,
            "prompts-per-step": workload.prompts_per_step,
            "learning-rate": workload.learning_rate,
            "threads": cores,
            "out": out,
        }
        options = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        return [str(self._trl), str(HERE / "_trl_side.py"), *options]

    def _our_command(self, workload: Workload, out: Path, *, max_staleness: int) -> list[str]:
        values = {
            "run.output_dir": out,
            "run.max_steps": workload.steps,
            "model.path": workload.model,
            "data.path": self._prompts,
            "policy.prompts_per_step": workload.prompts_per_step,
            "policy.optimizer.learning_rate": workload.learning_rate,
            "sync.max_staleness": max_staleness,
        }
        program = Path(sys.executable).with_name("cosmos-rl")
        overrides = [f"{key}={value}" for key, value in values.items()]
        return [str(program), "run", str(HERE / "llm_vs_trl.toml"), *overrides, *self._overrides]


def outcome(file: Path, watched: Watched, *, warm: int) -> Outcome:
    """Read a side's lines: step, time_s, reward_mean, terms."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    last = len(lines) - 1
    times = [line["time_s"] for line in lines[warm - 1 : last]]
    terms = sum(line["terms"] for line in lines[warm:last])
    first_seen, last_seen = (min(watched.cpu_s, key=lambda seen: abs(seen - steps)) for steps in (warm, last))
    return Outcome(
        step_s=median(after - before for before, after in pairwise(times)),
        cpu_s=(watched.cpu_s[last_seen] - watched.cpu_s[first_seen]) / (last_seen - first_seen),
        terms_per_s=terms / (times[-1] - times[0]),
        reward=mean(line["reward_mean"] for line in lines[-5:]),
        watched=watched,
    )


def alternate(bench: Bench, workload: Workload, rounds: int) -> dict[str, list[Outcome]]:
    outcomes: dict[str, list[Outcome]] = {side: [] for side in workload.sides}
    for number in range(rounds):
        for side in workload.sides:
            one = bench.run(workload, side)
            outcomes[side].append(one)
            print(
                f"{workload.title}, round {number + 1}, {side}: {one.step_s:.3f} s/step, reward {one.reward:.3f}, "
                f"first step after {one.watched.first_step_s:.1f} s, {one.terms_per_s:,.0f} tokens/s, "
                f"{one.cpu_s:.3f} CPU s/step",
                flush=True,
            )
    return outcomes


def middle(values: Iterable[float]) -> float:
    return median(list(values))


def qwen3_figures(outcomes: dict[str, list[Outcome]], workload: Workload) -> list[Figure]:
    """Speed, learning and start of workload A."""
    figures = []
    last = f"reward at step {workload.steps}"
    for side, runs in outcomes.items():
        figures += [
            figure(f"{side}: step", middle(one.step_s for one in runs), "s", note=NOTES["time"]),
            figure(f"{side}: CPU time a step", middle(one.cpu_s for one in runs), "s"),
            figure(f"{side}: {last}", middle(one.reward for one in runs), "", note="mean of the last five steps"),
            figure(
                f"{side}: first step after", middle(one.watched.first_step_s for one in runs), "s", note=NOTES["first"]
            ),
            *memory(side, runs),
        ]
    trl = outcomes[TRL]
    for side in workload.sides[1:]:
        ours = outcomes[side]
        goals = side == ASYNC
        figures += [
            figure(
                f"step, {side} / TRL",
                middle(one.step_s for one in ours) / middle(one.step_s for one in trl),
                "x",
                target="<= 0.5" if goals else "",
            ),
            figure(
                f"CPU time a step, {side} / TRL",
                middle(o.cpu_s for o in ours) / middle(o.cpu_s for o in trl),
                "x",
            ),
            figure(
                f"{last}, {side} - TRL",
                middle(one.reward for one in ours) - middle(one.reward for one in trl),
                "",
                target=">= 0" if goals else "",
            ),
            figure(
                f"first step, {side} / TRL",
                middle(o.watched.first_step_s for o in ours) / middle(o.watched.first_step_s for o in trl),
                "x",
                target="<= 1" if goals else "",
            ),
        ]
    return figures


def smollm2_figures(outcomes: dict[str, list[Outcome]]) -> list[Figure]:
    """Throughput of workload B."""
    figures = []
    for side, runs in outcomes.items():
        figures += [
            figure(f"SmolLM2 {side}: trained", middle(one.terms_per_s for one in runs), "tokens/s", note=NOTES["time"]),
            figure(f"SmolLM2 {side}: CPU time a step", middle(one.cpu_s for one in runs), "s"),
            *memory(f"SmolLM2 {side}", runs),
        ]
    ratio = middle(one.terms_per_s for one in outcomes[ASYNC]) / middle(one.terms_per_s for one in outcomes[TRL])
    return [*figures, figure("SmolLM2 trained, ours / TRL", ratio, "x", target=">= 1.3")]


def memory(side: str, runs: Sequence[Outcome]) -> list[Figure]:
    mib = 1 << 20
    return [
        figure(f"{side}: peak RSS", middle(one.watched.peak_rss / mib for one in runs), "MiB", note=NOTES["rss"]),
        figure(f"{side}: peak PSS", middle(one.watched.peak_pss / mib for one in runs), "MiB", note=NOTES["rss"]),
    ]


def sizes() -> list[Figure]:
    """What an installation takes on disk."""
    roots = {"ours": Path(sys.prefix), TRL: CACHE / "trl"}
    return [
        figure(f"{side}: environment on disk", _size(root) / (1 << 20), "MiB", note=NOTES["size"])
        for side, root in roots.items()
    ]


def _size(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")


def figure(name: str, value: float, unit: str, *, target: str = "", note: str = "") -> Figure:
    return Figure(figure=name, value=value, unit=unit, target=target, note=note)


def unmeasured(why: str, *names: tuple[str, str]) -> list[Figure]:
    """Figures with a target that this machine cannot give."""
    return [figure(name, math.nan, "x", target=target, note=why) for name, target in names]


def measure(bench: Bench, *, quick: bool, smollm2: Path) -> list[Figure]:
    bench.warm_up()
    tiny = WORK / "tiny"
    _digits.write_model(tiny)
    rounds = 2 if quick else 5
    work = Workload(title="Qwen3 0.8M", model=tiny, steps=30, warm=5, sides=(TRL, ASYNC, SYNC), learning_rate=3e-3)
    figures = qwen3_figures(alternate(bench, work, rounds), work)
    if not (smollm2 / "config.json").is_file():
        why = f"no model in {smollm2.name}: scripts/fetch_smollm2 gets it, or name a directory by --model"
        return [*figures, *unmeasured(why, ("SmolLM2 trained, ours / TRL", ">= 1.3"))]
    work = Workload(
        title="SmolLM2",
        model=smollm2,
        steps=5 if quick else 8,
        warm=1,
        sides=(TRL, ASYNC),
        learning_rate=1e-5,
        prompts_per_step=2 if quick else 8,
    )
    return [*figures, *smollm2_figures(alternate(bench, work, 1 if quick else 3))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and fewer steps of SmolLM2")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="folder of SmolLM2-135M (scripts/fetch_smollm2)")
    parser.add_argument("overrides", nargs="*", help="section.key=value for our side")
    given = parser.parse_args()
    trl = trl_python(CACHE / "trl")
    if isinstance(trl, str):
        goals = (
            ("step, ours / TRL", "<= 0.5"),
            ("first step, ours / TRL", "<= 1"),
            ("SmolLM2 trained, ours / TRL", ">= 1.3"),
        )
        report("llm_vs_trl", unmeasured(trl, *goals))
        return 0
    try:
        figures = measure(Bench(trl, given.overrides), quick=given.quick, smollm2=given.model.resolve())
    except CommandFailed as error:
        print(error, file=sys.stderr)
        return 1
    report("llm_vs_trl", [*figures, *sizes()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
