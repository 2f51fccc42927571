"""Observers of a run, and its result: `RunObserver` writes console and files, `Watch` runs the monitor in between.

The monitor makes one check per evaluated version, and one of the training metrics every [monitor] every_steps:

metric                          source
rewards of held-out prompts     the controller
loss on held-out rows           the policy
diversity of training groups    the last step
best reward of real rows        the recipe, or the first rollout replica
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cosmos_rl_core.observe.record import Events, resume_command
from cosmos_rl_core.observe.rollouts import DROPPED, first_reasons, write_rollouts
from cosmos_rl_core.observe.services import RunLabels
from cosmos_rl_core.observe.sinks import Grids, JsonLines, build_sinks, keep_earlier, read_lines
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.types import RolloutGroup

if TYPE_CHECKING:
    from cosmos_rl_core.observe.console import Console


from collections.abc import Callable, Iterator, Sequence

from cosmos_rl_core.control.reports import ProgressObserver
from cosmos_rl_core.monitor.config import DIVERSITY
from cosmos_rl_core.monitor.data_rewards import BEST
from cosmos_rl_core.monitor.monitor import (
    CheckMetrics,
    HackMonitor,
    History,
    TrainingSteps,
    Verdict,
    beyond,
    first_mismatch,
    read_alarms,
)

METRICS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"
_REASONS_SHOWN = 3
"""Rows of rows_dropped.jsonl in the closing table."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run. Metrics and evaluations are read from its directory when they are first asked for."""

    run_dir: Path
    first_step: int
    """The step that the run began with: 0, or that of the checkpoint it was resumed from."""
    first_evaluated: int
    """The first version that this run evaluates."""
    steps: int
    """Number of optimizer steps in the final weights."""
    trained: int
    """Number of optimizer steps done: more than `steps` after a rollback by the monitor."""
    checkpoint: Path | None
    """The last checkpoint, if it is on disk; its folder `policy` can be loaded as a model if one process trained."""
    checkpoint_url: str
    """Path or URL of the last checkpoint; empty if there is none."""
    samples: Mapping[str, int]
    """Number of groups by state."""
    wall_s: float
    interrupted: bool
    stopped: str = ""
    """The monitor's reason for the end of the run; empty if it did not end it."""

    @cached_property
    def metrics(self) -> tuple[Mapping[str, float], ...]:
        """One mapping per step of this run, as in metrics.jsonl."""
        return tuple(self.each_step())

    @cached_property
    def evaluations(self) -> Mapping[int, Mapping[str, float]]:
        """Policy version -> metrics on the held-out rows."""
        by_version: dict[int, dict[str, float]] = {}
        for line in read_lines(self.run_dir / EVALUATIONS, first_step=self.first_evaluated, last_step=self.trained):
            metrics = {name: value for name, value in line.items() if name not in ("step", "policy_version")}
            by_version.setdefault(int(line["step"]), {}).update(metrics)
        return by_version

    def each_step(self) -> Iterator[Mapping[str, float]]:
        """Yield the metrics of each step without keeping them."""
        return read_lines(self.run_dir / METRICS, first_step=self.first_step, last_step=self.trained - 1)


class RunObserver:
    """Console, metric sinks and files of one run. Implements `control.server.Observer`."""

    def __init__(
        self, config: RunConfig, directory: Path, *, first_step: int, first_evaluated: int, max_steps: int
    ) -> None:
        """Open the sinks of [logging] in the run's directory; their lines of `first_step` and later are dropped.

        first_evaluated: likewise, of evaluations.
        """
        self.current_phase = "starting"
        self.events = Events(directory)
        self.events.step = first_step
        self._config = config
        self._directory = directory
        self._started = self._last_step_at = time.perf_counter()
        self._first_step, self._first_evaluated = first_step, first_evaluated
        sinks = ["jsonl", *(name for name in config.logging.sinks if name != "console")]
        labels = RunLabels(name=config.run.name, project=config.logging.project, group=config.logging.group)
        self._sinks = build_sinks(sinks, directory, labels=labels, first_step=first_step)
        self._grids = Grids(directory / "media", self._sinks)
        keep_earlier(directory / DROPPED, first_step)
        self._eval_sink = JsonLines(directory / EVALUATIONS, first_step=first_evaluated)
        self._console = _console(config, directory, max_steps) if "console" in config.logging.sinks else None

    def __enter__(self) -> RunObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._grids.show_new()
        for sink in [*self._sinks, self._eval_sink]:
            sink.close()
        if self._console is not None:
            self._console.close()

    def phase(self, text: str) -> None:
        if text != self.current_phase:
            self.events.add("phase", text)
        self.current_phase = text
        if self._console is not None:
            self._console.phase(text)

    def starting(self, workers: Sequence[tuple[str, str, float]]) -> None:
        """Show workers that start: name, phase and seconds."""
        if self._console is not None:
            self._console.starting(workers)

    def note(self, text: str, *, kind: str = "note") -> None:
        self.events.add(kind, text)
        if self._console is not None:
            self._console.note(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter()
        step_s = now - self._last_step_at
        self._last_step_at = now
        line = {
            "step": step,
            "policy_version": step + 1,
            "time_s": now - self._started,
            "step_s": step_s,
            "terms_per_s": metrics.get("terms", 0.0) / step_s,
            **metrics,
        }
        self.events.step = step + 1
        self.current_phase = "training"
        for sink in self._sinks:
            sink.log(step, line)
        self._grids.show_new()
        if self._console is not None and (step + 1) % self._config.run.log_every == 0:
            self._console.step(step, line)

    def evaluated(self, version: int, metrics: Mapping[str, float], groups: list[RolloutGroup]) -> None:
        self._eval_sink.log(version, {"policy_version": version, **metrics})
        if groups:
            write_rollouts(self._directory / "rollouts", step=version, groups=groups, name="eval")
        self._grids.show_new()
        shown = ", ".join(f"{name.removeprefix('eval/')} {value:.3g}" for name, value in metrics.items())
        self.note(f"version {version} on held-out rows: {shown}", kind="evaluation")

    def rolled_back(self, version: int) -> None:
        for sink in self._sinks:
            sink.roll_back(version)
        self._eval_sink.roll_back(version + 1)
        keep_earlier(self._directory / DROPPED, version)

    def finish(
        self,
        *,
        steps: int,
        trained: int,
        checkpoint: str,
        counts: Mapping[str, int],
        reasons: Mapping[str, int],
        wall_s: float,
        interrupted: bool,
        stopped: str = "",
    ) -> RunResult:
        result = RunResult(
            run_dir=self._directory,
            first_step=self._first_step,
            first_evaluated=self._first_evaluated,
            steps=steps,
            trained=trained,
            checkpoint=Path(checkpoint) if checkpoint and "://" not in checkpoint else None,
            checkpoint_url=checkpoint,
            samples=counts,
            wall_s=wall_s,
            interrupted=interrupted,
            stopped="" if interrupted else stopped,
        )
        if self._console is not None:
            rows = _summary(result, reasons)
            if interrupted or stopped:
                rows["continue"] = resume_command(self._directory, checkpoint=checkpoint)
            state = "interrupted" if interrupted else "stopped by the monitor" if stopped else "done"
            if state == "done" and "alarms" in rows:
                state = "done, with alarms"
            self._console.summary(rows, state=state)
        return result


def _console(config: RunConfig, directory: Path, max_steps: int) -> Console:
    from cosmos_rl_core.observe.console import Console  # rich is imported only if the console is used

    return Console(config.run.name, max_steps, directory)


def _summary(result: RunResult, reasons: Mapping[str, int]) -> dict[str, str]:
    """Rows of the closing table, top to bottom."""
    rows = {}
    evaluated = [version for version in result.evaluations if version <= result.steps]
    if evaluated:
        first, last = min(evaluated), max(evaluated)
        for name in result.evaluations[first]:
            if name.startswith(("eval/reward", "eval/loss", "eval/perplexity")):
                before, after = (
                    result.evaluations[first][name],
                    result.evaluations[last].get(name, float("nan")),
                )
                rows[f"held-out {name.removeprefix('eval/')}"] = f"{before:.3f} -> {after:.3f}"
    totals = _Totals.of(result)
    if "reward_mean" in totals.first:
        rows["reward"] = f"{totals.first['reward_mean']:.3f} -> {totals.last['reward_mean']:.3f}"
    elif totals.steps:
        rows["loss"] = f"{totals.first['loss']:.4f} -> {totals.last['loss']:.4f}"
    rows |= _alarms(result, totals)
    rows["steps"] = f"{result.trained}" + (" (interrupted)" if result.interrupted else "")
    if result.steps < result.trained:
        rows["rolled back"] = f"the weights are those of step {result.steps}; later checkpoints are set aside"
    rows["wall time"] = f"{result.wall_s:.1f} s"
    rows["trained terms"] = f"{totals.terms:,.0f}"
    if totals.rows_dropped:
        first = first_reasons(result.run_dir, first_step=result.first_step, count=_REASONS_SHOWN)
        rows["rows dropped"] = "; ".join([f"{totals.rows_dropped:,.0f}", *first])
    for reason, number in sorted(reasons.items()):
        rows[f"dropped: {reason}"] = f"{number}"
    rows["files"] = str(result.run_dir)
    if result.checkpoint is not None and any((result.checkpoint / "policy").glob("*.safetensors")):
        rows["model"] = str(result.checkpoint / "policy")
    elif result.checkpoint_url:
        rows["checkpoint"] = result.checkpoint_url
        rows["model"] = f"cosmos-rl export {result.checkpoint_url} DIR"
    return rows


@dataclass(slots=True)
class _Totals:
    """Sums over the steps of a run."""

    steps: int = 0
    skipped: int = 0
    """Steps whose gradients were not finite."""
    terms: float = 0.0
    rows_dropped: float = 0.0
    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, result: RunResult) -> _Totals:
        totals = cls()
        for line in result.each_step():
            totals.first, totals.last = totals.first or line, line
            totals.steps += 1
            totals.skipped += not math.isfinite(line.get("grad_norm", 0.0))
            totals.terms += line.get("terms", 0.0)
            totals.rows_dropped += line.get("rows_dropped", 0.0) + line.get("data_term/rows_dropped", 0.0)
        return totals


def _alarms(result: RunResult, totals: _Totals) -> dict[str, str]:
    """Rows of a run that did not go well."""
    rows = {"stopped": result.stopped} if result.stopped else {}
    if alarms := read_alarms(result.run_dir):
        rows["alarms"] = "; ".join(alarms)
    if totals.skipped:
        rows["skipped steps"] = f"{totals.skipped} of {totals.steps}, as their gradients were not finite"
    return rows


LOSS, REWARD, BEYOND = "eval/loss", "eval/reward_mean", "eval/beyond"
ALONE = f"eval/reward/{DIVERSITY}"
"""Left out: an evaluation samples one rollout per prompt, so its diversity is undefined."""


class Watch:
    """An `ProgressObserver` that forwards to another one and runs the monitor on evaluations."""

    def __init__(
        self,
        observer: ProgressObserver,
        config: RunConfig,
        *,
        history: History,
        stop: Callable[[str], None],
        stepped: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ) -> None:
        """history: log of the checks. stop: ends the run after the current step, with a reason.

        stepped: called with the metrics of each step.
        """
        self._stepped = stepped
        self.stopped = ""
        """The verdict that ended the run, as a sentence."""
        self.rollback: Verdict | None = None
        """The verdict that requires a rollback, or None."""
        self._observer = observer
        self._history = history
        self._monitor = HackMonitor(config.monitor, state=history.state)
        self._stop = stop
        self._judges = config.monitor.judges
        self._best = config.monitor.best_of_data
        self._diversity: float | None = None
        self._training = TrainingSteps()
        self._every = 0 if config.is_sft else config.monitor.every_steps
        self._compares_engines = config.policy.epochs * config.policy.minibatches == 1  # the metrics are of one update
        self._is_evaluated = partial(config.eval.due, last=config.run.max_steps)
        self._needs_loss = config.eval.loss_data is not None
        self._checks_rewards = config.eval.data is not None and not config.is_sft
        self._measured: dict[int, dict[str, float]] = {}
        """Version -> metrics of an evaluation that is not complete."""

    def phase(self, text: str) -> None:
        self._observer.phase(text)

    def note(self, text: str) -> None:
        self._observer.note(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._observer.step(step, metrics)
        self._stepped(metrics)
        self._check_first(metrics)
        early = {"entropy": "entropy", "response_length": "response_length_mean"}
        self._monitor.begin(**{name: metrics[source] for name, source in early.items() if source in metrics})
        self._diversity = metrics.get(f"reward/{DIVERSITY}")
        if self._diversity is not None:
            self._monitor.begin(diversity=self._diversity)
        self._training.add(metrics)
        if self._every and len(self._training) >= self._every and not self._is_evaluated(step + 1):
            self._observe(CheckMetrics(step=step + 1, reward=None, training=self._training.metrics()))

    def _check_first(self, metrics: Mapping[str, float]) -> None:
        """Compare engine and policy at the first step whose terms are all of the weights that it trains."""
        if self._compares_engines and metrics.get("staleness_max") == 0.0:
            self._compares_engines = False
            if text := first_mismatch(metrics):
                self.note(text)

    def evaluated(self, version: int, metrics: Mapping[str, float], groups: list[RolloutGroup]) -> None:
        if BEST in metrics:
            self._best = metrics[BEST] if self._best is None else self._best
            self._observer.note(
                f"monitor: the best of {metrics['data/rows']:.0f} real rows has reward {self._best:.3g}"
            )
            return
        metrics = {name: value for name, value in metrics.items() if name != ALONE}
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        if rewards and self._best is not None:
            metrics = {**metrics, BEYOND: beyond(rewards, self._best)}
        self._observer.evaluated(version, metrics, groups)
        if not self._checks_rewards:
            return
        measured = self._measured.setdefault(version, {})
        measured.update(metrics)
        if REWARD in measured and (LOSS in measured or not self._needs_loss):
            self._check(version, self._measured.pop(version))

    def rolled_back(self, version: int) -> None:
        self._observer.rolled_back(version)
        self._history.roll_back(version + 1)
        self._monitor.state = self._history.state
        self._training = TrainingSteps()
        self._measured = {each: metrics for each, metrics in self._measured.items() if each <= version}

    def _check(self, version: int, measured: Mapping[str, float]) -> None:
        metrics = CheckMetrics(
            step=version,
            reward=measured[REWARD],
            judges={name: measured[f"eval/reward/{name}"] for name in self._judges},
            held_out_loss=measured.get(LOSS),
            diversity=self._diversity,
            beyond=measured.get(BEYOND),
            training=self._training.metrics(),
        )
        self._observe(metrics)

    def _observe(self, metrics: CheckMetrics) -> None:
        """Run a check and carry out its action."""
        verdict = self._monitor.observe(metrics)
        self._history.add(metrics, verdict, self._monitor.state)
        if verdict.action is None:
            return
        self._observer.note(f"monitor: {verdict.text}")
        if verdict.action == "rollback":
            self.rollback = verdict
        if verdict.action != "warn":
            self.stopped = verdict.text
            self._stop(f"the monitor ends the run: {verdict.text}")
