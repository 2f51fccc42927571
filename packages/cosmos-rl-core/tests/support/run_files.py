"""A run directory without a run: written by the product's own writers, as a run of some steps leaves it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from cosmos_rl_core.observe.record import RecordedOutcome, record_outcome, record_start
from cosmos_rl_core.observe.rollouts import write_rollouts
from cosmos_rl_core.observe.sinks import JsonLines
from cosmos_rl_core.observe.trace import WAITS, Timeline
from cosmos_rl_core.types import Exchange, Prompt, Rollout, RolloutGroup, ToolCall

RECIPE = """[run]
domain = "llm"
name = "{name}"
max_steps = {steps}

[algorithm]
name = "grpo"

[policy.optimizer]
learning_rate = {rate}

[tracker]
api_key = "abc123"
"""


STEP_S = 1.81
"""Seconds of a step in the spans."""


class Clock:
    """A settable time."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def write_run(path: Path, *, steps: int = 20, rate: float = 0.001, groups: int = 3, state: str = "done") -> Path:
    """Write a run that answers 1 + 1 better with every step. state: "done", "failed", or "live" without an outcome."""
    (path / "logs").mkdir(parents=True)
    recipe = RECIPE.format(name=path.name, steps=steps, rate=rate)
    (path / "resolved.toml").write_text(recipe)
    record_start(path, recipe=recipe, parent="", takes_over=False)
    (path / "logs" / "policy-0.log").write_text("ready at version 0\n")
    metrics, evaluations = JsonLines(path / "metrics.jsonl"), JsonLines(path / "eval.jsonl")
    for step in range(steps):
        reward = (step + 1) / steps
        idle = {"policy_idle_fraction": 0.6, "rollout_idle_fraction": 0.0}
        values = {"reward_mean": reward, "loss": 1.0 - reward, "entropy": 1.0, "terms": 100.0, **idle}
        metrics.log(step, {"policy_version": step + 1, "time_s": 2.0 * step, "terms_per_s": 50.0, **values})
        made = [group(n, right=reward) for n in range(groups)]
        write_rollouts(path / "rollouts", step=step, groups=made, term_texts=lambda r: [r.text, "."], term_groups=1)
    evaluations.log(0, {"policy_version": 0, "eval/reward_mean": 0.1})
    evaluations.log(steps, {"policy_version": steps, "eval/reward_mean": 0.9})
    for sink in (metrics, evaluations):
        sink.close()
    write_spans(path / "spans", steps=steps)
    write_machines(path / "system")
    write_statuses(path, steps=steps, phase="training" if state == "live" else "finished")
    if state == "done":
        record_outcome(path, RecordedOutcome(state="done", step=steps, ended=time.time(), wall_s=40.0))
    elif state == "failed":
        outcome = RecordedOutcome(
            state="failed",
            message="policy-0: RuntimeError: no",
            worker="policy-0",
            traceback="Traceback (most recent call last)\nRuntimeError: no",
            step=steps,
            resume="cosmos-rl run a.toml --resume auto",
        )
        record_outcome(path, outcome)
    return path


def group(sample: int, *, right: float, rollouts: int = 4) -> RolloutGroup:
    made = []
    for number in range(rollouts):
        good = number < round(right * rollouts)
        made.append(
            Rollout(
                arrays={},
                rollout_logprobs=np.array([-1.0, 0.0], np.float32),
                versions=np.array([1, 1], np.int32),
                loss_mask=np.ones(2, bool),
                text="2" if good else f"<b>{number}</b>",
                reward=float(good),
                reward_breakdown={"exact": float(good)},
                advantage=0.5 if good else -0.5,
                finish_reason="stop",
            )
        )
    return RolloutGroup(prompt=Prompt(sample_id=sample, row={}), prompt_text=f"{sample} + 1 =", rollouts=tuple(made))


def tool_group(sample: int) -> RolloutGroup:
    """Episodes of three turns with a calculator: one that calls it, one whose call is none, after a new history."""
    call = ToolCall(name="calculator", arguments={"expression": "17 * 23"})
    long = "\n".join(f"line {number} of a long page" for number in range(200))
    turns = (
        Exchange(
            text="",
            reasoning="I should not guess.",
            calls=(call,),
            messages=({"role": "tool", "name": "calculator", "content": "391"},),
            reward=0.0,
            metrics={"calls": 1.0},
            model_s=0.12,
            environment_s=1.5,
        ),
        Exchange(
            text="Let me <i>look</i> it up.",
            problem="the arguments are not JSON",
            messages=({"role": "user", "content": long},),
            model_s=0.2,
            environment_s=0.004,
        ),
        Exchange(text="391", reward=1.0, branch=1, model_s=0.05),
    )
    first, second, *_ = group(sample, right=0.5).rollouts
    answered = replace(first, exchanges=turns, text="391")
    guessed = replace(second, exchanges=(replace(turns[2], text="400", reward=-1.0, branch=0),), reward=0.0, text="400")
    prompt = Prompt(sample_id=sample, row={})
    return RolloutGroup(prompt=prompt, prompt_text="What is 17 * 23?", rollouts=(answered, guessed, guessed))


def write_spans(directory: Path, *, steps: int) -> None:
    clock = Clock(time.time() - STEP_S * steps)
    policy, rollout = (Timeline(name, clock=clock, wall=clock) for name in ("policy-0", "rollout-0"))
    for step in range(steps):
        with policy.span("wait for batch", track=WAITS, step=step), rollout.span("rollout", track="group 000"):
            clock.now += 1.0
        with policy.span("forward_backward", step=step), rollout.span("wait for leases", track=WAITS):
            clock.now += 0.5
        with policy.span("publish", step=step + 1):
            clock.now += 0.1
        with rollout.span("wait for weights", track=WAITS, source="tcp://127.0.0.1:1") as wait:
            clock.now += 0.2
            wait.add(version=step + 1, bytes=4_000_000, deltas=0, repaired=0, pull_s=0.1)
        with rollout.span("switch weights", track="weights", version=step + 1):
            clock.now += 0.01
    for timeline in (policy, rollout):
        timeline.stream(directory / f"{timeline.process}.jsonl")
        timeline.close()


def write_machines(folder: Path) -> None:
    folder.mkdir()
    state = {
        "cpus": 8,
        "memory_total": 64 * 10**9,
        "disk_free": 10**11,
        "disk_total": 10**12,
        "received": 0.0,
        "sent": 5e6,
    }
    for name in ("policy-0", "rollout-0"):
        lines = []
        for number in range(10):
            row = {"time": 1000.0 + 5 * number, "process": name, "host": "node-a", "pid": 7, "cpu": 1.5, "processes": 3}
            row["memory"] = (number + 1) * (2 if name == "policy-0" else 1) * 10**9
            if name == "policy-0":
                gpus = [{"index": i, "name": "H100", "memory": 7e10, "memory_total": 8e10, "busy": 0.9} for i in (0, 1)]
                row["machine"] = {**state, "cpu": 6.0, "memory": 32 * 10**9, "gpus": gpus}
            lines.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))


def write_statuses(path: Path, *, steps: int, phase: str) -> None:
    member = {"name": "policy-0", "role": "policy", "state": "ready", "age_s": 0.1, "since_s": 12.0, "version": steps}
    starting = {"phase": "reading weights", "phase_s": 4.0, "started": {"importing": 3.0}}
    late = {"name": "rollout-1", "role": "rollout", "state": "joining", "age_s": 0.2, "version": -1, **starting}
    rows = [
        {
            "time": 1000.0 + 5 * step,
            "phase": "training",
            "step": step,
            "version": step,
            "members": [member, late],
            "samples": {"leased": 2, "ready": step % 3, "committed": 3 * step},
            "waits": ["policy-0 waits for 3 groups of batch 4"],
        }
        for step in range(steps)
    ]
    (path / "status.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "status.json").write_text(json.dumps({**rows[-1], "phase": phase, "time": time.time()}))
