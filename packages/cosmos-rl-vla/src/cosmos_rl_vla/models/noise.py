"""Denoising steps that sample noise instead of following the ODE. The formulas are in `flow`; no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["sde", "cps", "learned", "fixed"]
Steps = Literal["random", "last", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The denoising steps that sample, and their noise level. All others follow the ODE."""

    kind: Kind = "fixed"
    level: float = 0.3
    """sde: a of sigma. cps: 0 .. 1, a right angle at 1. fixed: the std. learned: not read."""
    level_end: float | None = None
    """Level after a linear schedule over `level_steps` optimizer steps; None: constant."""
    level_steps: int = 0
    steps: Steps = "last"
    """random: one step per decision, uniformly. last: the step that ends at the action. all: every step, with the
    initial noise; the log-prob is the mean over them."""
    ignore_last: bool = False
    """The last step follows the ODE: "random" never picks it, "all" counts the steps before it."""
    std_low: float = 0.08
    """learned: minimum standard deviation."""
    std_high: float = 0.16
    """learned: maximum standard deviation."""

    def level_at(self, version: int) -> float:
        """Return the noise level at a version of the weights."""
        if self.level_end is None:
            return self.level
        return self.level + (self.level_end - self.level) * min(max(version, 0) / self.level_steps, 1)

    def check(self, num_steps: int) -> None:
        """Raise ValueError for options out of range, and if none of K denoising steps would sample."""
        if self.kind == "cps" and self.steps == "last":
            raise ValueError(
                'noise "cps" samples nothing at the last step: set steps to "random" or "all", or use another kind'
            )
        if self.ignore_last and self.steps == "last":
            raise ValueError(
                'ignore_last leaves steps = "last" without a step: set steps to "random" or "all", or remove it'
            )
        if self.kind == "cps" and num_steps == 1:
            raise ValueError('noise "cps" samples nothing in a single denoising step: use 2 or more, or another kind')
        if self.ignore_last and num_steps == 1:
            raise ValueError("ignore_last needs 2 or more denoising steps")
        if not 0 < self.std_low <= self.std_high:
            raise ValueError(f"std_low {self.std_low} and std_high {self.std_high}: needs 0 < std_low <= std_high")
        for level in (self.level, self.level if self.level_end is None else self.level_end):
            if level <= 0 or (self.kind == "cps" and level > 1):
                raise ValueError(f'level {level} of noise "{self.kind}": must be above 0, and at most 1 for cps')
        if (self.level_end is None) != (self.level_steps == 0):
            raise ValueError("set level_end and level_steps together: the final level, and the steps until it")
        if self.kind == "learned" and self.level_end is not None:
            raise ValueError('level_end: noise "learned" has no level; set std_low and std_high')

    def num_stochastic(self, num_steps: int) -> int:
        """Return n: steps 0 .. n - 1 may sample."""
        return num_steps - self.ignore_last
