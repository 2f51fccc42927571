"""The two sides of llm_vs_trl.py: one workload, one command per side, one kind of outcome."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import _digits
from _overlap import read_spans, rollout_s, training_s
from _watch import Watched, watch

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / ".cache" / "llm_vs_trl"
TRL, ASYNC, SYNC = "TRL", "ours", "ours with max_staleness = 0"
STALENESS = {ASYNC: 1, SYNC: 0}
TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the length of its training."""

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
    overlap: float = math.nan
    """Of ours: the median step over the longer of generation and training."""


class Sides:
    """The two sides and their common files."""

    def __init__(self, *, ours: Path, trl: Path, overrides: Sequence[str]) -> None:
        """Take the interpreters of both, and keys of our recipe."""
        self._ours, self._trl = ours, trl
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
            (self._ours, "cosmos_rl_llm.engines.torch.engine"),
            (self._trl, "trl.trainer.grpo_trainer"),
        ):
            command = [str(python), "-c", f"import {module}; {imports}"]
            subprocess.run(command, check=True, env=self._environment, capture_output=True)

    def run(self, workload: Workload, side: str, *, memory: bool = False) -> Outcome:
        """Run one side. memory: read its memory, which slows it down: do not use its times."""
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
            memory=memory,
        )
        one = outcome(out / "metrics.jsonl", watched, warm=workload.warm)
        if side == TRL:
            return one
        steady, spans = range(workload.warm, workload.steps - 1), read_spans(out)
        phases = training_s(spans, steady), rollout_s(spans, steady, groups=workload.prompts_per_step)
        return replace(one, overlap=one.step_s / max(phases))

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
        program = self._ours.with_name("cosmos-rl")
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
