"""Sentences about a run for a person who opens its page: trouble first, each with the key that changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from cosmos_rl_core.observe.trace import POLICY_WAITS, ROLLOUT_WAITS
from cosmos_rl_core.ops.dashboard.curves import Curves

LAST = 10
"""Steps over which the present is measured, and the beginning."""
SILENT_S = 30.0
"""Seconds without a heartbeat that are named."""
MOST = 8
EQUAL = 0.9
"""Share of groups with equal rewards from which on nothing is learned."""
ORDER = ("bad", "warn", "good")
LENGTHS = {"llm": "rollout.sampling.max_tokens", "vla": "rollout.sampling.max_steps"}
"""The key with the maximum length of a rollout, by domain."""


class HealthFinding(NamedTuple):
    """One sentence."""

    level: Literal["bad", "warn", "good"]
    text: str
    key: str = ""
    """The recipe's key to change."""


def health(
    curves: Curves,
    *,
    status: Mapping[str, Any],
    outcome: Mapping[str, Any],
    live: bool,
    shares: Mapping[str, float] | None = None,
    monitor: Sequence[Mapping[str, Any]] = (),
    recipe: Mapping[str, Any] | None = None,
    resume: str = "",
) -> list[HealthFinding]:
    """Return at most MOST sentences, the worst first.

    status, outcome: as in status.json and outcome.json. live: whether the controller is alive. monitor: its checks.
    shares: of the time of the last steps by span: `Timeline.recent_shares`.
    recipe: as in resolved.toml. resume: the command that continues the run.
    """
    findings = [
        *_life(status, outcome, live=live, resume=resume),
        *_monitored(monitor),
        *diverged(curves, recipe or {}),
    ]
    if curves.steps >= LAST:
        findings += [*_waits(shares or {}, curves), *_learning(curves, recipe or {}), *_policy(curves)]
    findings += _reward(curves)
    return sorted(findings, key=lambda finding: ORDER.index(finding.level))[:MOST]


def _life(status: Mapping[str, Any], outcome: Mapping[str, Any], *, live: bool, resume: str) -> list[HealthFinding]:
    if outcome:
        state, message = outcome.get("state"), outcome.get("message", "")
        again = f" Continue: {outcome['resume']}" if outcome.get("resume") else ""
        if state == "failed":
            worker = f" in {outcome['worker']}" if outcome.get("worker") else ""
            return [
                HealthFinding("bad", f"The run failed{worker} after {outcome.get('step', 0)} steps: {message}.{again}")
            ]
        if state == "stopped":
            return [HealthFinding("warn", f"The monitor ended the run: {message}.{again}")]
        if state == "interrupted":
            return [HealthFinding("warn", f"The run was interrupted after {outcome.get('step', 0)} steps.{again}")]
        return [HealthFinding("good", f"The run is done: {outcome.get('step', 0)} steps.")]
    if status and not live and status.get("phase") != "finished":
        last = f"its last phase was {status.get('phase')!r}"
        if status.get("life") == "elsewhere":
            return [HealthFinding("warn", f"It is not known whether the run, on another machine, is alive; {last}.")]
        return [HealthFinding("bad", f"The controller is gone; {last}. Continue: {resume}")]
    return [
        HealthFinding(
            "bad", f"{member['name']} ({member['state']}) sent its last heartbeat {member['age_s']:.0f} s ago."
        )
        for member in status.get("members", ())
        if live and (member.get("state") == "suspect" or member.get("age_s", 0.0) > SILENT_S)
    ]


def _monitored(monitor: Sequence[Mapping[str, Any]]) -> list[HealthFinding]:
    last = [check for check in monitor if check.get("text")][-2:]
    return [
        HealthFinding("bad" if check.get("action") != "warn" else "warn", f"Monitor: {check['text']}.")
        for check in last
    ]


def _waits(shares: Mapping[str, float], curves: Curves) -> list[HealthFinding]:
    policy, rollout = (sum(shares.get(name, 0.0) for name in names) for names in (POLICY_WAITS, ROLLOUT_WAITS))
    if policy > 0.2 and rollout > 0.2:
        text = f"Both sides wait, the policy {policy:.0%} and the rollouts {rollout:.0%} of the time: they take turns."
        return [HealthFinding("warn", text, "sync.max_staleness: 1 or more lets them overlap")]
    if policy > 0.4 and shares.get("score", 0.0) > shares.get("generate", 0.0):
        text = f"The policy waits {policy:.0%} of the time, the rollouts {rollout:.0%}: the rewards are the bottleneck."
        return [
            HealthFinding("warn", text, "reward.functions: a quicker one, or workers for it (cosmos-rl reward-server)")
        ]
    model_s, environment_s = (curves.mean(f"episode_{side}_s", last=LAST) or 0.0 for side in ("model", "environment"))
    if policy > 0.4 and environment_s > model_s:
        text = (
            f"The policy waits {policy:.0%} of the time: the environment is the bottleneck, an episode waits "
            f"{environment_s:.2g} s for it and {model_s:.2g} s for the model."
        )
        return [HealthFinding("warn", text, "environment: a quicker tool, or more environment.max_episodes")]
    if policy > 0.4:
        text = f"The policy waits {policy:.0%} of the time, the rollouts {rollout:.0%}: generation is the bottleneck."
        return [HealthFinding("warn", text, "rollout.replicas: more of them, or a faster rollout.engine")]
    if rollout > 0.4:
        text = f"The rollouts wait {rollout:.0%} of the time, the policy {policy:.0%}: training is the bottleneck."
        return [HealthFinding("warn", text, "policy.replicas: more of them, or fewer rollout.replicas")]
    return []


def _learning(curves: Curves, recipe: Mapping[str, Any]) -> Iterator[HealthFinding]:
    equal = curves.mean("zero_variance_fraction", last=LAST)
    is_alone = recipe.get("rollout", {}).get("group_size") == 1  # its rollouts are compared with the critic
    if equal is not None and equal > 0.5 and not is_alone and not diverged(curves, recipe):
        text = f"{equal:.0%} of the groups have equal rewards and train nothing."
        yield HealthFinding("warn", text, "algorithm.filter_zero_variance, harder prompts, or a higher temperature")
    cut = curves.mean("truncated_fraction", last=LAST)
    if cut is not None and cut > 0.2:
        key = LENGTHS.get(recipe.get("run", {}).get("domain", ""), "rollout.sampling")
        key += ", environment.max_turns" if recipe.get("environment") else ""
        yield HealthFinding("warn", f"{cut:.0%} of the rollouts are cut off.", key)
    skipped = int((~np.isfinite(curves.column("grad_norm")[-LAST:])).sum())
    if skipped:
        text = f"{skipped} of the last {LAST} steps were skipped: their gradient was not finite."
        yield HealthFinding("bad", text, "policy.optimizer.learning_rate")


def diverged(curves: Curves, recipe: Mapping[str, Any]) -> list[HealthFinding]:
    """Return a sentence about rewards that differed at first, and are equal and lower since then: the weights broke."""
    equal, means = curves.column("zero_variance_fraction"), curves.column("reward_mean")
    differed = np.flatnonzero(equal < EQUAL)
    if not differed.size or not np.isfinite(means).all():
        return []
    last = int(differed[-1])
    if len(equal) - last - 1 < min(LAST, len(equal) // 2 + 1):  # too few to know
        return []
    before, now = float(means[: last + 1].mean()), float(means[last + 1 :].mean())
    if not now < before:
        return []
    text = f"Since step {last + 1} all rewards of a group are equal, and their mean fell from {before:.3g} to {now:.3g}"
    gradients = curves.column("grad_norm")
    if np.isfinite(gradients).any():
        text += f"; the gradient norm was {gradients[0]:.3g} at first and at most {np.nanmax(gradients):.3g}"
    rate = recipe.get("policy", {}).get("optimizer", {}).get("learning_rate")
    key = "policy.optimizer.learning_rate" + (f" = {rate:g}: a smaller one" if isinstance(rate, float) else "")
    return [HealthFinding("bad", f"{text}: the weights diverged.", f"{key}; policy.max_grad_norm")]


def _policy(curves: Curves) -> Iterator[HealthFinding]:
    before, now = curves.mean("entropy", first=LAST), curves.mean("entropy", last=LAST)
    if before and now is not None and now < 0.25 * before:
        text = f"Entropy fell from {before:.3g} to {now:.3g}: rollouts of a group become equal."
        yield HealthFinding("warn", text, "algorithm.entropy_coef, or a smaller policy.optimizer.learning_rate")
    mismatch = curves.mean("mismatch_kl", last=LAST)
    if mismatch is not None and mismatch > 0.05:
        text = f"Engine and policy compute different log-probabilities (KL {mismatch:.3g})."
        yield HealthFinding("warn", text, "algorithm.correction, or the same model.dtype on both sides")
    clipped = curves.mean("clip_fraction", last=LAST)
    if clipped is not None and clipped > 0.3:
        text = f"{clipped:.0%} of the terms are clipped."
        yield HealthFinding("warn", text, "policy.optimizer.learning_rate, or a smaller sync.max_staleness")


def _reward(curves: Curves) -> list[HealthFinding]:
    last = min(LAST, max(1, curves.steps // 2))
    before, now = curves.mean("reward_mean", first=last), curves.mean("reward_mean", last=last)
    if before is None or now is None or curves.steps < 2 or f"{before:.3g}" == f"{now:.3g}":
        return []
    rose = now > before
    if not rose and curves.steps < LAST:  # too few to warn
        return []
    verb = "rose" if rose else "fell"
    return [
        HealthFinding(
            "good" if rose else "warn", f"Reward {verb} from {before:.3g} to {now:.3g} in {curves.steps} steps."
        )
    ]
