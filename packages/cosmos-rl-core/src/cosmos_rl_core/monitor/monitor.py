"""The monitor: detects collapse and a gamed reward from the metrics of each check; and its file, monitor.jsonl.

metrics --compared with first values and bounds--> crossed? --patience--> alarm active --release--> alarm over
                                                                |
                                                      warn | rollback | stop, with a sentence for the user

`check` is a pure function; `History` writes one line per check: metrics, action, and the state after it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.monitor.config import Action, MonitorConfig, Rule, strongest
from cosmos_rl_core.observe.sinks import keep_earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckMetrics:
    """Metrics of one check. A metric that was not measured is None or absent."""

    step: int
    """Number of optimizer steps so far."""
    reward: float | None
    """Mean of the reward that is trained on, the proxy, on held-out prompts; None between evaluations."""
    judges: Mapping[str, float] = field(default_factory=dict)
    """Means of the judges (rewards that are never trained on), by name; higher is better."""
    held_out_loss: float | None = None
    """Flow-matching loss on real clips that no step trained on."""
    diversity: float | None = None
    """Mean distance between samples of a group in training: the reward labelled `diversity`."""
    beyond: float | None = None
    """`beyond` of the rewards: the fraction above the highest reward of real data."""
    training: Mapping[str, float] = field(default_factory=dict)
    """Metrics of `config.TRAINING`, of the steps since the last check: `TrainingSteps.metrics`."""

    def named(self) -> dict[str, float]:
        """Return the measured metrics by the names used in rules; a judge is "judge/NAME"."""
        optional = {"held_out_loss": self.held_out_loss, "diversity": self.diversity, "beyond": self.beyond}
        measured = {name: value for name, value in optional.items() if value is not None}
        measured |= self.training
        held_out = {} if self.reward is None else {"reward": self.reward}
        return {**held_out, **measured, **{f"judge/{name}": value for name, value in self.judges.items()}}


def beyond(rewards: Sequence[float] | np.ndarray, best: float) -> float:
    """Return the fraction of rewards above `best`, the highest reward of real data.

    Raises:
        ValueError: there are no rewards.
    """
    values = np.asarray(rewards, np.float64)
    if values.size == 0:
        raise ValueError("a fraction of no rewards is not defined")
    return float((values > best).mean())


FIRST_MISMATCH = 0.05
"""Largest distance of the first on-policy step's mean ratio from 1, and of its `mismatch_kl` from 0. bfloat16 stays far
below it; sampling from the 90 % most likely tokens alone gives 0.1."""


def first_mismatch(metrics: Mapping[str, float]) -> str:
    """Return a warning about a step that trains once on rollouts of its own weights; "" where all is well.

    The policy then computes the log-probabilities that the engine has sampled with: the ratio of their probabilities is
    1 and the mean difference 0, up to FIRST_MISMATCH for the rounding of low precision.
    """
    ratio, mismatch = metrics.get("ratio_mean", 1.0), metrics.get("mismatch_kl", 0.0)
    if abs(ratio - 1.0) <= FIRST_MISMATCH and abs(mismatch) <= FIRST_MISMATCH:
        return ""
    return (
        f"engine and policy disagree on rollouts of the same weights: ratio_mean is {ratio:.3g} in place of 1, "
        f"mismatch_kl {mismatch:.3g} in place of 0. Compare on both sides: the keys of [rollout.sampling], the dtype "
        "and the attention implementation; and look up the model's family in docs/families.md"
    )


class TrainingSteps:
    """Means of the training metrics between two checks.

    steps.add(metrics)          # of each step
    steps.metrics()             # at a check; begins the next interval
    """

    SOURCES: ClassVar[Mapping[str, str]] = {
        "training_reward": "reward_mean",
        "entropy": "entropy",
        "grad_norm": "grad_norm",
        "response_length": "response_length_mean",
        "mismatch": "mismatch_kl",
    }
    """Metrics of metrics.jsonl by their names in rules."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._num_steps = self._num_skipped = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def __len__(self) -> int:
        """Number of steps in the current interval."""
        return self._num_steps

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one step."""
        self._num_steps += 1
        # the optimizer skips a step whose gradients are not finite
        self._num_skipped += not math.isfinite(metrics.get("grad_norm", 0.0))
        for name, source in self.SOURCES.items():
            if math.isfinite(value := metrics.get(source, math.nan)):
                self._sums[name] += value
                self._counts[name] += 1

    def metrics(self) -> dict[str, float]:
        """Return the means over the finite values of each metric, and the fraction of skipped steps."""
        means = {name: self._sums[name] / self._counts[name] for name in self.SOURCES if self._counts[name]}
        if self._num_steps:
            means["skipped_steps"] = self._num_skipped / self._num_steps
        self._begin()
        return means


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """State of the monitor between checks, as plain values for a journal or a checkpoint."""

    start: Mapping[str, float] = field(default_factory=dict)
    """First finite value of each metric."""
    highest: Mapping[str, float] = field(default_factory=dict)
    """Highest finite value of each metric before the last check."""
    lowest: Mapping[str, float] = field(default_factory=dict)
    """Likewise the lowest."""
    crossed: Mapping[str, int] = field(default_factory=dict)
    """Consecutive checks at which a bound was crossed, by "metric rule"."""
    standing: tuple[str, ...] = ()
    """Active alarms, as "metric rule"."""
    last_good: int | None = None
    """Step of the last check without a crossed bound; None before the first."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `State.from_json`."""
        return asdict(self) | {"standing": list(self.standing)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> State:
        """Return the state that `as_json` wrote."""
        return cls(**{**values, "standing": tuple(values["standing"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorAlarm:
    """A bound that was crossed at `Rule.patience` consecutive checks."""

    metric: str
    """Its name in `CheckMetrics.named`."""
    rule: str
    """`Rule.label`."""
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of one check."""

    action: Action | None
    """The strongest action of the new alarms; None without a new alarm."""
    text: str
    """The reason, as a sentence for the user; empty without an action."""
    rollback_to: int | None
    """With "rollback": the run ends with the newest checkpoint at or before this step."""
    alarms: tuple[MonitorAlarm, ...]
    """Alarms raised at this check."""
    over: tuple[str, ...]
    """Alarms that ended at this check, as "metric rule"."""
    standing: int
    """Number of active alarms after this check."""


class HackMonitor:
    """Monitors one run.

    monitor = HackMonitor(MonitorConfig())
    verdict = monitor.observe(metrics)          # once per evaluation
    journal.append(monitor.state.as_json())     # HackMonitor(config, state=State.from_json(...)) continues from it
    """

    def __init__(self, config: MonitorConfig, *, state: State | None = None) -> None:
        self._config = config
        self.state = state or State()

    def begin(self, **metrics: float) -> None:
        """Set first values of metrics that were measured before the first check; existing ones are kept."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.state = replace(self.state, start=finite | dict(self.state.start))

    def observe(self, metrics: CheckMetrics) -> Verdict:
        """Run one check, update the state and return the verdict.

        Raises:
            UserError: a rule watches a judge that is not among the measured judges.
        """
        self.state, verdict = check(self._config, self.state, metrics)
        return verdict


def check(config: MonitorConfig, state: State, metrics: CheckMetrics) -> tuple[State, Verdict]:
    """One check as a pure function: return the next state and the verdict. Raises like `HackMonitor.observe`."""
    _check_judges(config, metrics)
    values = metrics.named()
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    start = finite | dict(state.start)
    highest = _extremes(max, state.highest, finite, start)
    lowest = _extremes(min, state.lowest, finite, start)
    rose = "reward" in values and "reward" in start and values["reward"] > start["reward"]
    is_whole = metrics.reward is not None or "reward" not in start
    crossed, standing = dict(state.crossed), list(state.standing)
    alarms: list[MonitorAlarm] = []
    over: list[str] = []
    for rule, name in _watched(config, values, start):
        key = f"{name} {rule.label}"
        crossed[key], stands = _follow(
            rule,
            values[name],
            (start if not rule.of_best else highest if rule.above is None else lowest).get(name, math.nan),
            applies=rose or not rule.if_reward_rose,
            count=crossed.get(key, 0),
            stood=key in standing,
        )
        if stands and key not in standing:
            standing.append(key)
            alarms.append(MonitorAlarm(metric=name, rule=rule.label, action=rule.action))
        elif not stands and key in standing:
            standing.remove(key)
            over.append(key)
    after = State(
        start=start,
        highest=highest,
        lowest=lowest,
        crossed={key: count for key, count in crossed.items() if count},
        standing=tuple(standing),
        last_good=metrics.step if is_whole and not any(crossed.values()) else state.last_good,
    )
    return after, _verdict(after, metrics, tuple(alarms), tuple(over))


def _extremes(
    pick: Callable[[float, float], float],
    before: Mapping[str, float],
    finite: Mapping[str, float],
    start: Mapping[str, float],
) -> dict[str, float]:
    """Return the highest or lowest value of each metric, with its value at this check and its first one."""
    return {name: pick(before.get(name, first), finite.get(name, first)) for name, first in start.items()}


def _watched(config: MonitorConfig, values: Mapping[str, float], start: Mapping[str, float]) -> list[tuple[Rule, str]]:
    """Return each rule with each metric that it applies to now.

    A multiple of a first value <= 0 does not apply, unless the metric is not finite; nor does a rule about a reward
    that rose where none was measured.
    """
    return [
        (rule, name)
        for rule in config.rules
        for name in rule.names(values)
        if not rule.of_start or rule.of_best or not math.isfinite(values[name]) or start[name] > 0
        if not rule.if_reward_rose or "reward" in values
    ]


def _follow(rule: Rule, value: float, start: float, *, applies: bool, count: int, stood: bool) -> tuple[int, bool]:
    """Return the number of consecutive crossings and whether the alarm is active, after one more value."""
    count = count + 1 if applies and rule.crossed(value, start) else 0
    if stood:
        return count, applies and not rule.released(value, start)
    return count, count >= rule.patience


def _verdict(state: State, metrics: CheckMetrics, alarms: tuple[MonitorAlarm, ...], over: tuple[str, ...]) -> Verdict:
    action = strongest(alarm.action for alarm in alarms)
    if action == "rollback" and state.last_good is None:
        action = "stop"
    back_to = state.last_good if action == "rollback" else None
    metrics_in_alarm = [key.partition(" ")[0] for key in state.standing]
    of_best = [key for key in state.standing if " of best: " in key]
    best = {key.partition(" ")[0]: state.lowest if " above " in key else state.highest for key in of_best}
    origin = {**state.start, **{name: values[name] for name, values in best.items() if name in values}}
    text = sentence(metrics, origin, metrics_in_alarm, action=action, back_to=back_to) if action else ""
    return Verdict(
        action=action, text=text, rollback_to=back_to, alarms=alarms, over=over, standing=len(state.standing)
    )


def _check_judges(config: MonitorConfig, metrics: CheckMetrics) -> None:
    named = {rule.watch.removeprefix("judge/") for rule in config.rules if rule.watch.startswith("judge/")}
    if metrics.judges and (absent := sorted(named - set(metrics.judges))):
        raise UserError(
            f"a rule of the monitor watches judge/{absent[0]}, which is not measured; "
            f"measured judges: {', '.join(metrics.judges)}"
        )


_NAMES = {
    "held_out_loss": "held-out loss",
    "reward": "held-out reward",
    "training_reward": "reward",
    "grad_norm": "gradient norm",
    "skipped_steps": "fraction of skipped steps",
    "response_length": "response length",
    "mismatch": "mismatch of engine and policy",
}


def sentence(
    metrics: CheckMetrics, start: Mapping[str, float], alarmed: Sequence[str], *, action: Action, back_to: int | None
) -> str:
    """Return a sentence with the changes of the metrics in `alarmed` and the action.

    "step 60: the reward rose from 0.089 to 0.994 while judge 'prompt_ok' fell from 0.394 to 0.083: the model games the
    reward; held-out loss 0.16 -> 6.7; the run stops"
    """
    values = metrics.named()
    judges = [name for name in dict.fromkeys(alarmed) if name.startswith("judge/") and name in values]
    others = [name for name in dict.fromkeys(alarmed) if not name.startswith("judge/") and name in values]
    parts = [_judged(judges, values, start)] if judges else []
    parts += [_moved(name, values[name], start) for name in others]
    if action != "warn":
        parts.append("the run stops" if back_to is None else f"the run stops and goes back to step {back_to}")
    return f"step {metrics.step}: {'; '.join(parts)}"


def _judged(judges: Sequence[str], values: Mapping[str, float], start: Mapping[str, float]) -> str:
    fell = " and ".join(
        f"judge {name.removeprefix('judge/')!r} fell {_from_to(values[name], start.get(name))}" for name in judges
    )
    if "reward" not in values or not values["reward"] > start.get("reward", values["reward"]):
        return fell
    return f"the reward rose {_from_to(values['reward'], start['reward'])} while {fell}: the model games the reward"


def _moved(name: str, value: float, start: Mapping[str, float]) -> str:
    if name == "beyond":
        return f"{value:.0%} of the rewards are above the best of the data"
    begun = f"{start[name]:.3g} -> " if name in start else ""
    return f"{_NAMES.get(name, name)} {begun}{value:.3g}"


def _from_to(value: float, begun: float | None) -> str:
    return f"to {value:.3g}" if begun is None else f"from {begun:.3g} to {value:.3g}"


NAME = "monitor.jsonl"


class History:
    """The file of one run.

    history = History(run_dir, first_step=20)      # a resumed run keeps the earlier checks
    monitor = HackMonitor(config, state=history.state)
    history.add(metrics, monitor.observe(metrics), monitor.state)
    """

    def __init__(self, run_dir: Path, *, first_step: int) -> None:
        """Drop the checks at `first_step` and later: they will be repeated."""
        self._path = run_dir / NAME
        self.roll_back(first_step)

    def roll_back(self, first_step: int) -> None:
        """Drop the checks at `first_step` and later: they will be repeated."""
        keep_earlier(self._path, first_step)
        self.state = _last_state(self._path) or State()
        """State of the monitor after the newest check that is kept."""

    def add(self, metrics: CheckMetrics, verdict: Verdict, state: State) -> None:
        """Append one check."""
        line = {
            "step": metrics.step,
            **{name: value if math.isfinite(value) else None for name, value in metrics.named().items()},
            "action": verdict.action,
            "text": verdict.text,
            "state": state.as_json(),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


def read_healthy(run_dir: Path) -> int | None:
    """Return the step of the last check without a crossed bound, or None. The run may still be active."""
    state = _last_state(run_dir / NAME)
    return state.last_good if state else None


def read_alarms(run_dir: Path) -> tuple[str, ...]:
    """Return the alarms that are active after the last check, such as "reward below 0.5 of start"."""
    state = _last_state(run_dir / NAME)
    return tuple(key.rpartition(": ")[0] for key in state.standing) if state else ()


def _last_state(path: Path) -> State | None:
    """State of the newest readable line, or None. Incomplete and damaged lines are skipped."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            return State.from_json(json.loads(line)["state"])
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return None
