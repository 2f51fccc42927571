"""[monitor]: the rules of the monitor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core.settings.base import Strict

Action = Literal["warn", "rollback", "stop"]
DIVERSITY = "diversity"
"""Label of the reward whose mean over training groups is the metric `diversity`."""
TRAINING = ("training_reward", "entropy", "grad_norm", "skipped_steps", "response_length", "mismatch")
"""Metrics of the training steps since the last check."""
WATCHED = ("reward", "held_out_loss", "diversity", "beyond", "judges", *TRAINING)


def strongest(actions: Iterable[Action]) -> Action | None:
    """Return the strongest action: rollback (a stop with better weights), then stop, then warn; None for none."""
    kinds = set(actions)
    return "rollback" if "rollback" in kinds else "stop" if "stop" in kinds else "warn" if kinds else None


class Rule(Strict):
    """A bound on a metric, and the action taken when the metric crosses it.

    {watch = "held_out_loss", above = 5, action = "stop"}               # 5 times its first value
    {watch = "reward", below = 0.5, of_best = true}                     # half of its best value so far is lost
    {watch = "judge/prompt_ok", below = 0.3, of_start = false}          # the metric itself
    """

    watch: str
    """"held_out_loss", "diversity", "beyond", "reward", "judge/NAME" for one judge, or "judges" for every judge; of the
    training steps "training_reward", "entropy", "grad_norm", "skipped_steps", "response_length" and "mismatch"."""
    above: float | None = None
    """Upper bound of the metric. Set exactly one of `above` and `below`."""
    below: float | None = None
    """Lower bound of the metric."""
    of_start: bool = True
    """Whether the bound is a multiple of the metric's first value; false: an absolute value."""
    of_best: bool = False
    """Compare with the best value so far: `below = 0.5` is crossed when half of the highest value is lost, `above = 2`
    when twice the lowest is exceeded. A negative value counts by its size, and 0 as 1."""
    if_reward_rose: bool = False
    """Apply the rule only while the reward is above its first value: detects gaming, not failure to learn."""
    action: Action = "warn"
    """"warn"; "stop" ends the run with the newest weights; "rollback" ends it with those of the last healthy check."""
    patience: int = Field(default=1, ge=1)
    """Consecutive checks beyond the bound before the alarm is raised."""
    release: float = Field(default=0.1, ge=0, lt=1)
    """The alarm ends when the metric is back inside the bound by this fraction of the bound."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.watch not in WATCHED and not self.watch.startswith("judge/"):
            raise ValueError(f"watch = {self.watch!r} is not a metric; known: {', '.join(WATCHED)}, judge/NAME")
        if (self.above is None) == (self.below is None):
            raise ValueError("set exactly one of above and below")
        if self.of_best and not self.of_start:
            raise ValueError("set one of of_best = true and of_start = false")
        if self.of_start and self.limit <= 0:
            raise ValueError("a multiple of the start must be above 0; of_start = false bounds the metric itself")
        return self

    @property
    def limit(self) -> float:
        """`above` or `below`, whichever is set."""
        limit = self.below if self.above is None else self.above
        assert limit is not None, "checked when the rule was made"
        return limit

    @property
    def label(self) -> str:
        """The bound as text, unique among different rules of a metric."""
        side = "below" if self.above is None else "above"
        of = " of best" if self.of_best else " of start" if self.of_start else ""
        return f"{side} {self.limit:g}{of}: {self.action}"

    def names(self, measured: Iterable[str]) -> list[str]:
        """Return the measured metrics that the rule watches."""
        if self.watch == "judges":
            return [name for name in measured if name.startswith("judge/")]
        return [name for name in measured if name == self.watch]

    def bound(self, origin: float) -> float:
        """Return the absolute bound of a metric whose first, or best, value is `origin`."""
        if self.of_best:
            return origin + (self.limit - 1) * (abs(origin) or 1.0)
        return self.limit * origin if self.of_start else self.limit

    def crossed(self, value: float, origin: float) -> bool:
        """Whether the metric is beyond the bound. A value that is not finite is beyond every bound."""
        if not math.isfinite(value):
            return True
        bound = self.bound(origin)
        return value > bound if self.above is not None else value < bound

    def released(self, value: float, origin: float) -> bool:
        """Whether the metric is back inside the bound by the margin `release`."""
        if not math.isfinite(value):
            return False
        bound = self.bound(origin)
        margin = self.release * abs(bound)
        return value <= bound - margin if self.above is not None else value >= bound + margin


DEFAULT_RULES = (
    Rule(watch="held_out_loss", above=2.0),
    Rule(watch="held_out_loss", above=5.0, action="stop"),
    Rule(watch="judges", below=0.7, if_reward_rose=True),
    Rule(watch="judges", below=0.5, if_reward_rose=True, action="stop"),
    Rule(watch="diversity", below=0.5),
    Rule(watch="beyond", above=0.5, of_start=False),
    Rule(watch="reward", below=0.5, of_best=True),
    Rule(watch="training_reward", below=0.5, of_best=True, patience=2),
    Rule(watch="entropy", below=0.1),
    Rule(watch="grad_norm", above=20.0, patience=2),
    Rule(watch="skipped_steps", above=0.1, of_start=False),
    Rule(watch="response_length", below=0.2),
    Rule(watch="response_length", above=5.0),
    Rule(watch="mismatch", above=0.1, of_start=False),
)


class MonitorConfig(Strict):
    """[monitor]: detection of collapse and reward hacking, and the action: a warning, a stop or a rollback."""

    judges: tuple[str, ...] = ()
    """Labels of rewards of weight 0 against which the trained reward is checked; higher is better."""
    rules: tuple[Rule, ...] = DEFAULT_RULES
    """Bounds on metrics; a metric may have several with different actions. A recipe's rules replace the defaults."""
    every_steps: int = Field(default=10, ge=0)
    """Steps between checks of the training metrics, beside the checks of evaluations; 0: at evaluations alone."""
    best_of_data: float | None = None
    """Highest reward of real data; the metric "beyond" is the fraction of held-out rollouts above it."""
    data_rows: int = Field(default=0, ge=0)
    """If best_of_data is not set: number of rows of [eval.loss_data] scored at the start to measure it; 0: none."""

    @property
    def rolls_back(self) -> bool:
        """Whether a rule has the action "rollback"."""
        return any(rule.action == "rollback" for rule in self.rules)

    @model_validator(mode="after")
    def _rules_differ(self) -> Self:
        seen = [(rule.watch, rule.label) for rule in self.rules]
        twice = sorted({f"{watch} {label}" for watch, label in seen if seen.count((watch, label)) > 1})
        if twice:
            raise ValueError(f"has the same rule more than once: {', '.join(twice)}")
        return self
