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

from cosmos_rl_wfm.samplers import WindowName


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowChoice:
    """The choice for one rollout, by step index."""

    stochastic: tuple[int, ...] = ()
    """Steps that add noise, ascending; the others follow the ODE."""
    trained: tuple[int, ...] = ()
    """Steps whose log-probabilities are trained on, ascending; some or all of `stochastic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A rule of choice: a pure function of the number of steps, the policy version and a seed.

    all             every step but the last. FlowGRPO (arXiv 2505.05470)
    fixed           `steps`
    random_window   `width` neighbours, anywhere in [low, high). FlowGRPO-Fast's sde_window
    random_subset   `width` steps, each anywhere in [low, high). DanceGRPO (arXiv 2505.07818), with elsewhere = "sde"
    sliding         `width` neighbours from `low` on, moved by `stride` every `every` versions, up to `high`, where
                    they stay, or start over with `restart`. MixGRPO (arXiv 2507.21802)
    """

    name: WindowName = "all"
    steps: tuple[int, ...] = ()
    """The trained steps of "fixed"."""
    width: int = 4
    low: int = 0
    high: int | None = None
    """End of the range, exclusive; None: the last step."""
    stride: int = 1
    every: int = 25
    restart: bool = False
    elsewhere: Literal["ode", "sde"] = "ode"
    """Kind of the untrained steps other than the last."""

    def at(self, num_steps: int, *, version: int = 0, seed: int = 0) -> WindowChoice:
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
        if self.name == "all":
            return tuple(range(last))
        if self.name == "fixed":
            return self._fixed(last)
        high = last if self.high is None else self.high
        if not (0 <= self.low < high <= last and 1 <= self.width <= high - self.low):
            raise ValueError(
                f"a window of {self.width} steps does not fit steps {self.low} to {high - 1} of {num_steps}; "
                f"the last one, {last}, is never trained"
            )
        choices = range(self.low, high)
        if self.name == "random_subset":
            return tuple(sorted(self._random(version, seed).sample(choices, self.width)))
        if self.stride < 1 or self.every < 1:
            raise ValueError(f"stride = {self.stride} and every = {self.every} of a sliding window must be 1 or more")
        places = len(choices) - self.width + 1
        if self.name == "random_window":
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
