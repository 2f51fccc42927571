"""The rules of the monitor, as they stand in a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core.settings.base import Strict

Action = Literal["warn", "rollback", "stop"]
DIVERSITY = "diversity"
"""Label of the reward whose mean over training groups is the metric of that name."""
WATCHED = ("reward", "held_out_loss", "diversity", "beyond", "judges")


def strongest(actions: Iterable[Action]) -> Action | None:
    """Return the one that matters: a rollback, which is a stop with better weights, a stop, a warning; None of none."""
    given = set(actions)
    return "rollback" if "rollback" in given else "stop" if "stop" in given else "warn" if given else None


class Rule(Strict):
    """One bound on one metric, and what follows when it is crossed.

    {watch = "held_out_loss", above = 5, action = "stop"}               # five times its start
    {watch = "judge/prompt_ok", below = 0.3, of_start = false}          # the metric itself
    """

    watch: str
    """"held_out_loss", "diversity", "beyond", "reward", "judge/NAME" for one judge, or "judges" for each of them."""
    above: float | None = None
    """Crossed by a metric above this."""
    below: float | None = None
    """Crossed by a metric below this. One of `above` and `below` is given."""
    of_start: bool = True
    """The bound is a multiple of the metric's first value; false: it is the metric itself."""
    if_reward_rose: bool = False
    """Crossed only while the reward is above its start: gaming it, and not plain failure to learn."""
    action: Action = "warn"
    """What follows: a warning; the end of the run, with the weights of its last healthy look, or with the newest."""
    patience: int = Field(default=1, ge=1)
    """Checks in a row that must cross the bound before the alarm is raised."""
    release: float = Field(default=0.1, ge=0, lt=1)
    """The alarm stands until the metric is back inside the bound by this share of it."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.watch not in WATCHED and not self.watch.startswith("judge/"):
            raise ValueError(f"watch = {self.watch!r} is no metric; known: {', '.join(WATCHED)}, judge/NAME")
        if (self.above is None) == (self.below is None):
            raise ValueError("give one of above and below")
        if self.of_start and self.limit <= 0:
            raise ValueError("a multiple of the start must be above 0; of_start = false bounds the metric itself")
        return self

    @property
    def limit(self) -> float:
        """`above` or `below`, whichever is given."""
        limit = self.below if self.above is None else self.above
        assert limit is not None, "checked when the rule was made"
        return limit

    @property
    def label(self) -> str:
        """The bound in words, unique among rules that differ."""
        side = "below" if self.above is None else "above"
        return f"{side} {self.limit:g}{' of start' if self.of_start else ''}: {self.action}"

    def names(self, measured: Iterable[str]) -> list[str]:
        """Return the metrics it watches among those measured."""
        if self.watch == "judges":
            return [name for name in measured if name.startswith("judge/")]
        return [name for name in measured if name == self.watch]

    def bound(self, start: float) -> float:
        """Return the bound on a metric that began at `start`."""
        return self.limit * start if self.of_start else self.limit

    def crossed(self, value: float, start: float) -> bool:
        """Whether the metric is outside. What is no finite number is outside every bound."""
        if not math.isfinite(value):
            return True
        bound = self.bound(start)
        return value > bound if self.above is not None else value < bound

    def released(self, value: float, start: float) -> bool:
        """Whether the metric is back inside by the margin."""
        if not math.isfinite(value):
            return False
        bound = self.bound(start)
        margin = self.release * abs(bound)
        return value <= bound - margin if self.above is not None else value >= bound + margin


DEFAULT_RULES = (
    Rule(watch="held_out_loss", above=2.0),
    Rule(watch="held_out_loss", above=5.0, action="stop"),
    Rule(watch="judges", below=0.7, if_reward_rose=True),
    Rule(watch="judges", below=0.5, if_reward_rose=True, action="stop"),
    Rule(watch="diversity", below=0.5),
    Rule(watch="beyond", above=0.5, of_start=False),
)


class MonitorConfig(Strict):
    """[monitor]: when a run that games its reward is warned about, stopped, or taken back."""

    judges: tuple[str, ...] = ()
    """Rewards of weight 0 that watch over those that are trained on, by their labels; higher is better."""
    rules: tuple[Rule, ...] = DEFAULT_RULES
    """Bounds; several on one metric may have different actions. The rules of a recipe take the place of these."""
    best_of_data: float | None = None
    """Highest reward that real data earns; the share of held-out rollouts above it is "beyond"."""
    data_rows: int = Field(default=0, ge=0)
    """Without best_of_data: first rows of [eval.loss_data] that are scored at the start, to find it; 0 does not."""

    @property
    def rolls_back(self) -> bool:
        """Whether a rule may take the run back."""
        return any(rule.action == "rollback" for rule in self.rules)

    @model_validator(mode="after")
    def _rules_differ(self) -> Self:
        seen = [(rule.watch, rule.label) for rule in self.rules]
        twice = sorted({f"{watch} {label}" for watch, label in seen if seen.count((watch, label)) > 1})
        if twice:
            raise ValueError(f"has the same rule more than once: {', '.join(twice)}")
        return self
