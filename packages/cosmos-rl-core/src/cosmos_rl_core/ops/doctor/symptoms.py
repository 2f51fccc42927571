"""Symptoms of a run beyond its waits: errors with a known cause, timeouts that are nearly reached, old weights, rewards
that are always the same, the first step without a finite gradient, engines that disagree with the policy, and a resume
that trained nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cosmos_rl_core.interfaces import Check
from cosmos_rl_core.ops.dashboard.curves import Curves
from cosmos_rl_core.ops.dashboard.health import EQUAL, LAST, diverged
from cosmos_rl_core.ops.dashboard.rollouts import Rollouts
from cosmos_rl_core.ops.doctor.activity import Spans
from cosmos_rl_core.ops.doctor.limits import GIB, LITTLE_DISK
from cosmos_rl_core.ops.doctor.network import holder_of

NEAR = 0.5
"""Share of a timeout from which on it is reported."""
MISMATCH = 0.05
FULL, FULL_GPU = 0.95, 0.97
"""Share of memory in use from which on it is reported; engines reserve most of a GPU."""
SHOWN, MOST_CHARACTERS = 3, 60
SLOW_ENVIRONMENT_S, SLOWER = 1.0, 3.0
"""Time of an environment in an episode from which on it is reported, and its least multiple of the model's."""
MOST_EPISODES = 256
"""Of the newest file, in which tools are compared."""
TIMEOUTS = {
    "score": ("reward", "timeout_s"),
    "switch weights": ("sync", "timeout_s"),
    "forward_backward": ("policy", "collective_timeout_s"),
}
"""Spans with the key that limits one."""
CAUSES: Sequence[tuple[str, str, str]] = (
    (
        r"out of (GPU )?memory|OutOfMemory",
        "a GPU had too little memory",
        "cosmos-rl plan RECIPE --memory SIZE shows each part; policy.microbatch_terms, policy.parallel",
    ),
    (
        r"signal SIGKILL",
        "the kernel killed it, mostly because the machine or container had no memory left",
        "the limit of the container (cosmos-rl doctor), fewer rollout.replicas, or a smaller model",
    ),
    (
        r"signal SIGBUS|[Bb]us error",
        "/dev/shm is full",
        "docker: --shm-size=16g; cosmos-rl doctor shows its size",
    ),
    (
        r"Watchdog caught collective|Timed out waiting|timeout pair closure|made no progress for",
        "a rank did not reach the collective in which the others waited",
        "the rank with the oldest span in the timeline; [policy] collective_timeout_s if a step may take longer",
    ),
    (
        r"EGL|libGL|GLFW|OSMesa|MUJOCO_GL",
        "the simulators cannot render on this machine",
        "python -m cosmos_rl_vla.sims.doctor; MUJOCO_GL=osmesa renders without a GPU",
    ),
    (
        r"driver version is insufficient|no kernel image|undefined symbol|cannot import name",
        "libraries of versions that do not fit together",
        "cosmos-rl doctor compares them",
    ),
    (
        r"samples in a row failed",
        "prompts or rewards raise errors, named above",
        "cosmos-rl check --deep RECIPE calls each reward once",
    ),
    (r"[Nn]o space left|disk quota", "the disk is full", "free space there, or another [run] output_dir"),
)
"""Patterns in an error, its cause, and the remedy."""
REWARD = re.compile(r"reward '(?P<name>[^']+)' (?P<what>is slow or hangs|on .+? (?:took longer|raised|returned).*)")
RECENT_S = 150.0
"""Age of a complaint about a reward up to which it is of the present: they come once a minute."""
PORT = re.compile(r"port (\d+) on \S+ is in use|tcp://\S+?:(\d+): Address already in use")


class Facts(NamedTuple):
    """A run as its files have it."""

    status: Mapping[str, Any]
    outcome: Mapping[str, Any]
    start: Mapping[str, Any]
    recipe: Mapping[str, Any]
    curves: Curves
    rollouts: Rollouts
    spans: Spans
    events: Sequence[Mapping[str, Any]]
    machines: Mapping[str, Any] = {}
    """As `dashboard.machines.Machines.read` returns them."""


def symptoms(facts: Facts) -> list[Check]:
    """Return the lines of all symptoms that the run has."""
    of_processes = (_causes, _rewards, _port, _resumed_to_nothing, _old_weights, _timeouts, _machines)
    of_metrics = (_equal_rewards, _not_finite, _mismatch, _slow_environment)
    return [line for symptom in (*of_processes, *of_metrics) for line in symptom(facts)]


def _causes(facts: Facts) -> Iterator[Check]:
    """Known causes of the error that ended the run, and of workers that died in it."""
    error = f"{facts.outcome.get('message', '')}\n{facts.outcome.get('traceback', '')}"
    deaths = [str(event.get("text", "")) for event in facts.events if " died (" in str(event.get("text", ""))]
    for text, where in ((error, "the error"), ("\n".join(deaths[-5:]), "a worker that died")):
        for pattern, cause, fix in CAUSES:
            if re.search(pattern, text):
                yield Check("bad" if where == "the error" else "note", "cause", f"{where}: {cause}", fix)


def _rewards(facts: Facts) -> Iterator[Check]:
    """The last complaint about each reward that raises, hangs or returns something else than numbers."""
    seen = float(facts.status.get("time", 0.0))
    texts = [(str(event.get("text", "")), float(event.get("time", 0.0))) for event in facts.events]
    texts.append((str(facts.outcome.get("message", "")), seen))
    newest = {match["name"]: (match, at) for text, at in texts if (match := REWARD.search(text))}
    for name, (match, at) in newest.items():
        hangs = "raised" not in match["what"] and "returned" not in match["what"]
        fix = f"the code of {name!r} on that row; cosmos-rl check --deep RECIPE calls each reward once"
        if hangs:
            fix = f"the code of {name!r}, or the server that it asks: it may never return; reward.timeout_s ends a call"
        present = seen - at < RECENT_S and facts.outcome.get("state") != "done"
        yield Check("bad" if present else "note", "reward", match[0].splitlines()[0], fix)


def _port(facts: Facts) -> Iterator[Check]:
    if match := PORT.search(str(facts.outcome.get("message", ""))):
        port = int(match[1] or match[2])
        holder = holder_of(port)
        text = (
            f"{holder} listens on port {port}" if holder else f"port {port} was in use, and nothing listens on it now"
        )
        yield Check("bad" if holder else "note", "port", text, "end it, or [run] port = 0" if holder else "start again")


def _resumed_to_nothing(facts: Facts) -> Iterator[Check]:
    parent = re.search(r"step_(\d+)", str(facts.start.get("parent", "")))
    if facts.outcome.get("state") != "done" or parent is None or facts.outcome.get("step", 0) > int(parent[1]):
        return
    text = f"it was resumed from step {parent[1]} and ended without a step: all steps, or all rows, were done"
    yield Check("bad", "resume", text, "a larger [run] max_steps, or more [prompts] epochs")


def _old_weights(facts: Facts) -> Iterator[Check]:
    """Engines that stay behind the policy by more than the run allows."""
    version, allowed = facts.status.get("version", 0), facts.recipe.get("sync", {}).get("max_staleness", 0)
    for member in () if facts.outcome else facts.status.get("members", ()):
        has = member.get("version", -1)
        if member.get("role") == "rollout" and 0 <= has < version - allowed - 1:
            text = f"{member['name']} has weights of version {has}, the policy those of {version}: none arrive"
            fix = "the link of the policy's address (status: waits), or restart the replica: cosmos-rl scale"
            yield Check("bad", "weights", text, fix)


def _timeouts(facts: Facts) -> Iterator[Check]:
    """Timeouts that are nearly reached."""
    for span, (section, key) in TIMEOUTS.items():
        limit, longest = facts.recipe.get(section, {}).get(key), facts.spans.longest(span)
        if limit and longest and longest[1] > NEAR * limit:
            process, seconds = longest
            text = f"the longest {span!r} of {process} took {seconds:.3g} s: {seconds / limit:.0%} of [{section}] {key}"
            larger = f"{section}.{key} = {limit:g}: a larger one"
            fix = f"the reward that is slow; {larger} if it needs as long" if span == "score" else larger
            yield Check("note", "timeout", text, fix)


def _machines(facts: Facts) -> Iterator[Check]:
    """Memory and disks that are nearly full, as of the last sample of each machine."""
    processes = sorted(facts.machines.get("processes", ()), key=lambda process: -process["largest"])
    for machine in facts.machines.get("machines", ()):
        host, memory, total = machine["host"], machine["memory"][-1], machine["memory_total"]
        if total and memory > FULL * total:
            most = [f"{p['process']} {p['largest'] / GIB:.1f} GiB" for p in processes if p["host"] == host][:SHOWN]
            text = f"{host} uses {memory / GIB:.1f} of {total / GIB:.1f} GiB; the largest: {', '.join(most)}"
            yield Check("bad", "memory", text, "fewer rollout.replicas on this machine, or a smaller model")
        free = machine["disk_free"][-1]
        if free is not None and free < LITTLE_DISK:
            text = f"{host} has {free / GIB:.1f} GiB free where the run's directory is"
            yield Check("bad", "disk", text, "a smaller checkpoint.keep, or free space there")
        for gpu in machine["gpus"]:
            used, size = gpu["memory"][-1] or 0, gpu["memory_total"]
            if size and used > FULL_GPU * size:
                text = f"GPU {gpu['index']} of {host} uses {used / GIB:.1f} of {size / GIB:.1f} GiB"
                yield Check("note", "memory", text, "policy.microbatch_terms; cosmos-rl plan RECIPE --memory SIZE")


def _equal_rewards(facts: Facts) -> Iterator[Check]:
    """Groups whose rewards are equal, so that nothing is learned: the reward that is constant, and answers."""
    curves = facts.curves
    equal, spread = curves.mean("zero_variance_fraction", last=LAST), curves.mean("reward_std", last=LAST)
    if equal is None or equal < EQUAL or (spread or 0.0) > 1e-6 or not curves.steps or diverged(curves, facts.recipe):
        return
    differed = bool((curves.column("zero_variance_fraction") < EQUAL).any())
    means = {name.removeprefix("reward/"): curves.mean(name, last=LAST) for name in curves.names if "reward/" in name}
    zero = [name for name, mean in means.items() if mean == 0.0]
    which = f"; {', '.join(map(repr, zero))} gave 0 to every rollout" if zero else ""
    text = f"{equal:.0%} of the groups have equal rewards{which}: the loss is 0 and nothing is learned"
    if answers := _answers(facts):
        text += f". Answers: {answers}"
    fix = "the format that the reward expects, the prompt or chat template, temperature"
    yield Check("bad", "reward", text, "harder prompts, as the rewards differed before" if differed else fix)


def _answers(facts: Facts) -> str:
    steps = facts.rollouts.files().get("step")
    if not steps:
        return ""
    groups = facts.rollouts.file("step", steps[-1])
    page = groups.page(keep=groups.matching(low=-np.inf, high=np.inf, text=""), sort="file", at=0, count=SHOWN)
    texts = [group["rollouts"][0]["response"] for group in page["groups"]]
    return ", ".join(repr(text[:MOST_CHARACTERS]) for text in texts)


def _slow_environment(facts: Facts) -> Iterator[Check]:
    """An environment that episodes wait for much longer than for the model, with its slowest tool."""
    names = ("episode_environment_s", "episode_model_s")
    environment_s, model_s = (facts.curves.mean(name, last=LAST) or 0.0 for name in names)
    if environment_s < SLOW_ENVIRONMENT_S or environment_s < SLOWER * model_s:
        return
    name = (facts.recipe.get("environment") or {}).get("name", "")
    text = f"an episode waits {environment_s:.2g} s for the environment {name!r} and {model_s:.2g} s for the model"
    if tools := _tools(facts):
        slowest = max(tools, key=lambda tool: float(np.mean(tools[tool])))
        text += f"; the slowest tool is {slowest!r}, {np.mean(tools[slowest]):.2g} s an answer"
    fix = "the code of that tool, or the server that it asks; environment.max_episodes lets more of them wait at a time"
    yield Check("note", "environment", text, fix)


def _tools(facts: Facts) -> dict[str, list[float]]:
    """Seconds of the answers to turns with a call, by the name of the tool, in the newest file of rollouts."""
    seconds: dict[str, list[float]] = {}
    if steps := facts.rollouts.files().get("step"):
        file = facts.rollouts.file("step", steps[-1])
        rows = file.lines(range(min(len(file.rewards), MOST_EPISODES)))
        exchanges = [exchange for row in rows for exchange in row.get("exchanges", ())]
        for exchange in exchanges:
            for call in exchange.get("calls", ()):
                seconds.setdefault(str(call.get("name")), []).append(float(exchange.get("environment_s", 0.0)))
    return seconds


def _not_finite(facts: Facts) -> Iterator[Check]:
    """The first step whose gradient was not finite."""
    gradients, steps = facts.curves.column("grad_norm"), facts.curves.column("step")
    bad = np.flatnonzero(~np.isfinite(gradients))
    if not gradients.size or not bad.size:
        return
    first = int(steps[bad[0]]) if bad[0] < len(steps) else int(bad[0])
    text = f"step {first} is the first of {bad.size} whose gradient was not finite; its rollouts: "
    text += f"rollouts/step_{first:06d}.jsonl"
    yield Check("bad", "gradient", text, "a smaller policy.optimizer.learning_rate, policy.max_grad_norm")


def _mismatch(facts: Facts) -> Iterator[Check]:
    """Whether a difference of engine and policy is one of weights or of numbers."""
    mismatch, oldest = facts.curves.mean("mismatch_kl", last=LAST), facts.curves.mean("staleness_max", last=LAST)
    if mismatch is None or mismatch <= MISMATCH:
        return
    if (oldest or 0.0) > 1:
        text = f"rollouts are up to {oldest:.0f} versions old, which explains a part of mismatch_kl"
        yield Check("note", "mismatch", text, "a smaller sync.max_staleness")
    else:
        text = "rollouts are at most one version old, and weights are verified by digest: the difference is numerical"
        yield Check("note", "mismatch", text, "algorithm.correction, the same model.dtype and attention on both sides")
