"""Feeds the monitor with a run's evaluations, and carries out what it says.

rewards of held-out prompts   from the controller   \
loss on held-out rows         from the policy         >  one look a version, when all that is measured has come
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cosmos_rl_core.config.run import RunConfig
from cosmos_rl_core.control.observer import Observer
from cosmos_rl_core.monitor.figures import Figures
from cosmos_rl_core.monitor.monitor import HackMonitor
from cosmos_rl_core.types import RolloutGroup

LOSS, REWARD = "eval/loss", "eval/reward_mean"


class Watch:
    """An `Observer` that tells another, and looks at evaluations on the way."""

    def __init__(self, observer: Observer, config: RunConfig, *, stop: Callable[[str], None]) -> None:
        """stop: ends the run after the step in work, with a reason."""
        self._observer = observer
        self._monitor = HackMonitor(config.monitor)
        self._stop = stop
        self._judges = config.monitor.judges
        self._needs_loss = config.eval.loss_data is not None
        self._known: dict[int, dict[str, float]] = {}

    def phase(self, text: str) -> None:
        self._observer.phase(text)

    def note(self, text: str) -> None:
        self._observer.note(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._observer.step(step, metrics)

    def evaluated(self, version: int, metrics: Mapping[str, float], groups: list[RolloutGroup]) -> None:
        self._observer.evaluated(version, metrics, groups)
        known = self._known.setdefault(version, {})
        known.update(metrics)
        if REWARD in known and (LOSS in known or not self._needs_loss):
            self._look(version, self._known.pop(version))

    def _look(self, version: int, known: Mapping[str, float]) -> None:
        verdict = self._monitor.observe(
            Figures(
                step=version,
                reward=known[REWARD],
                judges={name: known[f"eval/reward/{name}"] for name in self._judges},
                held_out_loss=known.get(LOSS),
            )
        )
        if verdict.action is None:
            return
        self._observer.note(f"monitor: {verdict.text}")
        if verdict.action == "rollback":
            good = verdict.rollback_to
            self._observer.note(f"monitor: the run ends; --resume goes on from a checkpoint of step {good} or before")
        if verdict.action != "warn":
            self._stop(f"the monitor ends the run: {verdict.text}")
