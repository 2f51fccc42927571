"""The reason that a live run waits: the chain of waits, and a sentence about its last process with the key to change.

A function of values: chain, members, open spans, processes of this machine, recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cosmos_rl_core.interfaces import Check, Level
from cosmos_rl_core.observe.console import duration
from cosmos_rl_core.observe.startup import describe
from cosmos_rl_core.ops.doctor.activity import BESIDE, FIRST_S, Activity, of_worker
from cosmos_rl_core.ops.doctor.waits import ROLES, WEIGHTS, Wait

SILENT_S = 30.0
"""Seconds without a heartbeat after which a worker is in trouble."""
START_S = 300.0
"""Seconds in which a worker is expected to connect."""
PARTS = {
    "build": "builds its part of the run",
    "collate": "collates a batch",
    "forward_backward": "is in the forward and backward pass",
    "sum_gradients": "sums gradients with the other policy replicas",
    "optim_step": "is in the optimizer step",
    "fence": "copies weights that engines still read",
    "publish": "publishes weights",
    "save": "copies a checkpoint, after the one before is written",
    "generate": "generates",
    "score": "scores rollouts with the rewards",
    "switch weights": "switches to new weights",
    "wait for weights": "waits for weights",
    "wait for turn": "waits for its turn on the GPU",
}
"""Descriptions of spans."""
FIXES = {
    "build": "large models take minutes to read; logs/{worker}.log has the part that it builds",
    "score": "the code of {rewards}, or the server that it asks; [reward] timeout_s = {reward.timeout_s} ends one "
    "call; a slow reward can have more workers (cosmos-rl reward-server)",
    "generate": "rollout.engine, rollout.replicas, rollout.sampling.max_tokens",
    "forward_backward": "[policy] collective_timeout_s = {policy.collective_timeout_s} and [elastic] stall_s = "
    "{elastic.stall_s} end a rank that hangs",
    "save": "the storage of the checkpoints hangs or is slow: [checkpoint] path; every_steps saves less often",
    "wait for turn": "the other side of [run] colocate holds the GPU",
    "wait for weights": "[sync] timeout_s = {sync.timeout_s}; with a firewall between the machines, open the port",
}
"""Remedies by span; names of keys in braces become their values."""
ENVIRONMENT = (
    "the code of {environment}, or the server that it asks: [environment] timeout_s = {environment.timeout_s} ends one "
    "answer; rollout.replicas, environment.max_episodes"
)
SIMULATORS = (
    "[rollout.options] reset_timeout_s and step_timeout_s; python -m cosmos_rl_vla.sims.doctor plays each simulator"
)


class Situation(NamedTuple):
    """The inputs of a verdict."""

    status: Mapping[str, Any]
    activities: Sequence[Activity]
    """Longest first."""
    recipe: Mapping[str, Any]
    started_s: float = 0.0
    """Seconds since the start of the run."""
    troubles: Mapping[str, tuple[str, str]] = {}
    """Sentence and remedy about a process of this machine that does not run, by worker."""
    silent_s: Mapping[str, float] = {}
    """Seconds since the newest span of each process."""

    def member(self, name: str) -> Mapping[str, Any]:
        return next((each for each in self.status.get("members", ()) if each["name"] == name), {})


def verdict(waits: Sequence[Wait], at: Situation) -> Check:
    """Return the line about the last process of a chain of waits."""
    if not waits:
        return _without_wait(at)
    leaf = waits[-1].awaited
    if leaf in ROLES:
        return _missing(leaf, at)
    if leaf == WEIGHTS:
        return _weights(waits[-1], at)
    return _worker(leaf, at)


def fix_of(span: str, worker: str, at: Situation) -> str:
    """Return the remedy for a span with the recipe's values."""
    if span == "generate" and at.recipe.get("run", {}).get("domain") == "vla":
        return SIMULATORS
    environment = at.recipe.get("environment") or {}
    text = ENVIRONMENT if span == "generate" and environment else FIXES.get(span, "")
    for key in (
        "reward.timeout_s",
        "policy.collective_timeout_s",
        "elastic.stall_s",
        "sync.timeout_s",
        "environment.timeout_s",
    ):
        section, _, name = key.partition(".")
        text = text.replace(f"{{{key}}}", str(at.recipe.get(section, {}).get(name, "?")))
    functions = at.recipe.get("reward", {}).get("functions", ())
    rewards = [repr(each.get("label") or str(each.get("name")).rpartition(":")[2]) for each in functions]
    text = text.replace("{environment}", repr(environment.get("name", "")))
    return text.replace("{worker}", worker).replace("{rewards}", ", ".join(rewards) or "the reward")


def _without_wait(at: Situation) -> Check:
    if at.troubles:
        worker, (text, fix) = next(iter(at.troubles.items()))
        return Check("bad", "waits", f"{worker} does not run: {text}", fix)
    if (stalled := next((each for each in at.activities if each.is_stalled), None)) is not None:
        return _busy(stalled, at)
    return Check("ok", "waits", "no process waits for another one")


def _missing(role: str, at: Situation) -> Check:
    number = at.status.get("wanted", {}).get(role)
    text = f"no {role} worker has connected" + (f", {number} wanted" if number else "")
    text += f", {duration(at.started_s)} after the start"
    fix = f"logs/{role}-0.log; on a cluster the states of its jobs (cosmos-rl status RUN) and its free GPUs"
    return Check("bad" if at.started_s > START_S else "note", "waits", text, fix)


def _weights(wait: Wait, at: Situation) -> Check:
    member, version = at.member(wait.waiter), at.status.get("version", 0)
    has = member.get("version", -1)
    behind = f"{wait.waiter} has {'no weights' if has < 0 else f'weights of version {has}'}, the run is at {version}"
    waiting = next((a for a in at.activities if a.worker == wait.waiter and a.span == BESIDE), None)
    source, since = "", float(member.get("since_s", 0.0)) if has < 0 else 0.0
    if waiting is not None:
        source, since = str(waiting.args.get("source", "")), waiting.seconds
    text = f"{behind}; it waits for those of {source or 'the policy'}" + (f" since {duration(since)}" if since else "")
    limit = float(at.recipe.get("sync", {}).get("timeout_s", 120.0))
    level: Level = "bad" if since > limit else "note"
    return Check(level, "waits", text, fix_of("wait for weights", wait.waiter, at))


def _worker(name: str, at: Situation) -> Check:
    member = at.member(name)
    age, state = float(member.get("age_s", 0.0)), member.get("state", "gone")
    if name in at.troubles:
        text, fix = at.troubles[name]
        return Check("bad", "waits", f"{name} does not run: {text}", fix)
    if state == "suspect" or age > SILENT_S:
        text = f"{name} ({state}) sent its last heartbeat {duration(age)} ago"
        return Check("bad", "waits", text, "its process has died, or its machine or network is gone: see its log")
    activity = of_worker(at.activities, name)
    if state == "joining" and (phase := member.get("phase")):
        since = float(member.get("phase_s", 0.0))
        before = describe(member.get("started", {}))
        text = f"{name} starts: {phase} since {duration(since)}" + (f"; before that {before}" if before else "")
        return Check("bad" if since > FIRST_S else "note", "waits", text, fix_of("build", name, at))
    if activity is not None:
        return _busy(activity, at)
    if state == "joining":
        text = f"{name} starts since {duration(float(member.get('since_s', 0.0)))}"
        return Check("note", "waits", text, f"logs/{name}.log has its last part")
    return Check("ok", "waits", f"{name} works; nothing in it takes longer than a second")


def _busy(activity: Activity, at: Situation) -> Check:
    part = PARTS.get(activity.span, f"is in {activity.span!r}")
    if activity.span == "generate" and at.recipe.get("run", {}).get("domain") == "vla":
        part = "plays episodes in simulators"
    if activity.span == "generate" and at.recipe.get("environment"):
        part = f"generates episodes with the environment {at.recipe['environment'].get('name', '')!r}"
    of = "".join(f", {name} {value}" for name, value in activity.args.items() if name in ("step", "sample"))
    usual = "" if activity.usual_s is None else f"; usual: {_short(activity.usual_s)}"
    text = f"{activity.process} {part} since {_short(activity.seconds)}{of}{usual}"
    if (activity.is_slow or activity.is_stalled) and (absent := _absent(activity, at)):
        return Check(
            "bad" if activity.is_stalled else "note",
            "waits",
            f"{text}; {absent}",
            fix_of(activity.span, activity.worker, at),
        )
    if activity.is_stalled:
        return Check("bad", "waits", f"{text}: it hangs", fix_of(activity.span, activity.worker, at))
    if activity.is_slow:
        return Check("note", "waits", text, fix_of(activity.span, activity.worker, at))
    return Check("ok", "waits", text, "")


def _absent(activity: Activity, at: Situation) -> str:
    """Return a sentence about ranks of the replica that are not in the span in which others of it are; else ""."""
    ranks = [name for name in at.silent_s if name.partition(" rank ")[0] == activity.worker]
    inside = {each.process for each in at.activities if each.span == activity.span}
    outside = [name for name in ranks if name not in inside]
    if not outside or len(ranks) == 1:
        return ""
    described = []
    for name in outside:
        other = next((each for each in at.activities if each.process == name), None)
        since = other.seconds if other else at.silent_s[name]
        described.append(f"{name} ({f'in {other.span!r}' if other else 'in no span'} since {_short(since)})")
    return f"not in it: {', '.join(described)}"


def _short(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g} s"
