"""Where and how denoising draws instead of following the ODE. The formulas are in `flow`; no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["sde", "cps", "learned", "fixed"]
Steps = Literal["random", "last", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Which denoising steps draw, and how much. All others follow the ODE."""

    kind: Kind = "fixed"
    level: float = 0.3
    """sde: a of sigma. cps: 0 .. 1, a right angle at 1. fixed: the std. learned: not read."""
    level_end: float | None = None
    """What the level has come to, in equal parts, after `level_steps` steps of the optimizer; None: it stays."""
    level_steps: int = 0
    steps: Steps = "last"
    """random: one of each decision, drawn uniformly. last: the one that ends at the action. all: every one, with the
    noise they begin from, and the log-prob is the mean over them."""
    ignore_last: bool = False
    """Leave the last step to the ODE: "random" never draws it, "all" counts but the steps before it."""
    std_low: float = 0.08
    """learned: least standard deviation."""
    std_high: float = 0.16
    """learned: greatest."""

    def level_at(self, version: int) -> float:
        """Return the level that weights of a version draw with."""
        if self.level_end is None:
            return self.level
        return self.level + (self.level_end - self.level) * min(max(version, 0) / self.level_steps, 1)

    def check(self, num_steps: int) -> None:
        """Raise ValueError where K denoising steps leave nothing to draw."""
        if self.kind == "cps" and self.steps == "last":
            raise ValueError(
                'noise "cps" draws nothing at the last step: take steps "random" or "all", or another kind'
            )
        if self.ignore_last and self.steps == "last":
            raise ValueError('ignore_last leaves steps = "last" without a step: take "random" or "all", or drop it')
        if self.kind == "cps" and num_steps == 1:
            raise ValueError('noise "cps" draws nothing in a single denoising step: take 2 or more, or another kind')
        if self.ignore_last and num_steps == 1:
            raise ValueError("ignore_last needs 2 or more denoising steps")
        if not 0 < self.std_low <= self.std_high:
            raise ValueError(f"std_low {self.std_low} and std_high {self.std_high}: want 0 < std_low <= std_high")
        for level in (self.level, self.level if self.level_end is None else self.level_end):
            if level <= 0 or (self.kind == "cps" and level > 1):
                raise ValueError(f'level {level} of noise "{self.kind}": above 0, and at most 1 for cps')
        if (self.level_end is None) != (self.level_steps == 0):
            raise ValueError("level_end and level_steps go together: where the level goes to, and in how many steps")
        if self.kind == "learned" and self.level_end is not None:
            raise ValueError('level_end: noise "learned" has no level; set std_low and std_high')

    def num_drawable(self, num_steps: int) -> int:
        """Steps 0 .. this - 1 are those that may draw."""
        return num_steps - self.ignore_last
