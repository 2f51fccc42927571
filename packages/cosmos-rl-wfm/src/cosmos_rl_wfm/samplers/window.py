"""Chooses the stochastic denoising steps, and the trained ones among them.

    step             0    1    2    3    4    5    6    7         0 is the noisiest; the last always follows the ODE
    all              T    T    T    T    T    T    T    .         T trained (and stochastic)   s stochastic   . ODE
    fixed 0, 2       T    .    T    .    .    .    .    .         elsewhere = "ode"
    fixed 0, 2       T    s    T    s    s    s    s    .         elsewhere = "sde"
    sliding of 3     .    .    T    T    T    .    .    .         moves towards clean as versions advance

The last step is never stochastic: its noise would stay in the video, and its standard deviation tends to 0.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from cosmos_rl_core.settings.base import Strict
from cosmos_rl_wfm.samplers import WindowName


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowChoice:
    """The choice for one rollout, by step index."""

    stochastic: tuple[int, ...] = ()
    """Steps that add noise, ascending; the others follow the ODE."""
    trained: tuple[int, ...] = ()
    """Steps whose log-probabilities are trained on, ascending; some or all of `stochastic`."""


class WindowSection(Strict):
    """A rule of choice, whose result is a pure function of the number of steps, the policy version and a seed.

    all             every step but the last. FlowGRPO (arXiv 2505.05470)
    fixed           `steps`
    random_window   `width` neighbours, anywhere in [low, high). FlowGRPO-Fast's sde_window
    random_subset   `width` steps, each anywhere in [low, high). DanceGRPO (arXiv 2505.07818), with elsewhere = "sde"
    sliding         `width` neighbours from `low` on, moved by `stride` every `every` versions, up to `high`, where
                    they stay, or start over with `restart`. MixGRPO (arXiv 2507.21802)
    """

    window: WindowName = "all"
    """Rule that chooses the trained steps."""
    steps: tuple[int, ...] = ()
    """window = "fixed": the steps, 0 is the noisiest."""
    width: int = Field(default=4, ge=1)
    """window = "random_window", "random_subset" or "sliding": number of steps."""
    low: int = Field(default=0, ge=0)
    """The same windows: the first eligible step."""
    high: int | None = Field(default=None, ge=1)
    """The same windows: the end of the eligible steps, exclusive; by default the last step."""
    stride: int = Field(default=1, ge=1)
    """window = "sliding": steps it moves by."""
    every: int = Field(default=25, ge=1)
    """window = "sliding": versions after which it moves."""
    restart: bool = False
    """window = "sliding": start over at the end of its range instead of staying there."""
    elsewhere: Literal["ode", "sde"] = "ode"
    """Rule of the steps that are not trained."""

    def choose_steps(self, num_steps: int, *, version: int = 0, seed: int = 0) -> WindowChoice:
        """Return the choice.

        Raises:
            ValueError: the window does not fit the steps, or includes the last.
        """
        trained = self._trained(num_steps, version=version, seed=seed)
        return WindowChoice(
            stochastic=trained if self.elsewhere == "ode" else tuple(range(num_steps - 1)), trained=trained
        )

    def _trained(self, num_steps: int, *, version: int, seed: int) -> tuple[int, ...]:
        last = num_steps - 1
        if last < 1:
            raise ValueError("a rollout with trained steps takes 2 denoising steps or more: the last is never trained")
        if self.window == "all":
            return tuple(range(last))
        if self.window == "fixed":
            return self._fixed(last)
        high = last if self.high is None else self.high
        if not (self.low < high <= last and self.width <= high - self.low):
            raise ValueError(
                f"a window of {self.width} steps does not fit steps {self.low} to {high - 1} of {num_steps}; "
                f"the last one, {last}, is never trained"
            )
        choices = range(self.low, high)
        if self.window == "random_subset":
            return tuple(sorted(self._random(version, seed).sample(choices, self.width)))
        places = len(choices) - self.width + 1
        if self.window == "random_window":
            return self._neighbours(self._random(version, seed).randrange(places))
        return self._neighbours(self._slid(version, places))

    def _fixed(self, last: int) -> tuple[int, ...]:
        steps = tuple(sorted(set(self.steps)))
        if not steps or steps[0] < 0 or steps[-1] >= last:
            raise ValueError(
                f"steps = {list(self.steps)}: name steps from 0 to {last - 1}, the noisiest first; "
                f"of {last + 1} steps the last one is never trained"
            )
        return steps

    def _slid(self, version: int, places: int) -> int:
        moved = version // self.every * self.stride
        return moved % places if self.restart else min(moved, places - 1)

    def _neighbours(self, place: int) -> tuple[int, ...]:
        return tuple(range(self.low + place, self.low + place + self.width))

    def _random(self, version: int, seed: int) -> random.Random:
        return random.Random(f"{seed}/{version}")  # text is hashed alike in every process
