"""Feeds the monitor with a run's evaluations, and carries out its actions: one check per evaluated version.

metric                          source
rewards of held-out prompts     the controller
loss on held-out rows           the policy
diversity of training groups    the last step
best reward of real rows        the recipe, or the first rollout replica
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cosmos_rl_core.control.observer import Observer
from cosmos_rl_core.monitor.config import DIVERSITY
from cosmos_rl_core.monitor.data_rewards import BEST
from cosmos_rl_core.monitor.history import History
from cosmos_rl_core.monitor.metrics import Metrics, beyond
from cosmos_rl_core.monitor.monitor import HackMonitor, Verdict
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.types import RolloutGroup

LOSS, REWARD, BEYOND = "eval/loss", "eval/reward_mean", "eval/beyond"
ALONE = f"eval/reward/{DIVERSITY}"
"""Left out: an evaluation samples one rollout per prompt, so its diversity is undefined."""


class Watch:
    """An `Observer` that forwards to another one and runs the monitor on evaluations."""

    def __init__(self, observer: Observer, config: RunConfig, *, history: History, stop: Callable[[str], None]) -> None:
        """history: log of the checks. stop: ends the run after the current step, with a reason."""
        self.rollback: Verdict | None = None
        """The verdict that requires a rollback, or None."""
        self._observer = observer
        self._history = history
        self._monitor = HackMonitor(config.monitor, state=history.state)
        self._stop = stop
        self._judges = config.monitor.judges
        self._best = config.monitor.best_of_data
        self._diversity: float | None = None
        self._needs_loss = config.eval.loss_data is not None
        self._known: dict[int, dict[str, float]] = {}

    def phase(self, text: str) -> None:
        self._observer.phase(text)

    def note(self, text: str) -> None:
        self._observer.note(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._observer.step(step, metrics)
        self._diversity = metrics.get(f"reward/{DIVERSITY}")
        if self._diversity is not None:
            self._monitor.begin(diversity=self._diversity)

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
        known = self._known.setdefault(version, {})
        known.update(metrics)
        if REWARD in known and (LOSS in known or not self._needs_loss):
            self._check(version, self._known.pop(version))

    def _check(self, version: int, known: Mapping[str, float]) -> None:
        metrics = Metrics(
            step=version,
            reward=known[REWARD],
            judges={name: known[f"eval/reward/{name}"] for name in self._judges},
            held_out_loss=known.get(LOSS),
            diversity=self._diversity,
            beyond=known.get(BEYOND),
        )
        verdict = self._monitor.observe(metrics)
        self._history.add(metrics, verdict, self._monitor.state)
        if verdict.action is None:
            return
        self._observer.note(f"monitor: {verdict.text}")
        if verdict.action == "rollback":
            self.rollback = verdict
        if verdict.action != "warn":
            self._stop(f"the monitor ends the run: {verdict.text}")
