"""Simulator observations -> model inputs; model actions -> simulator actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.models.base import Inputs
from cosmos_rl_vla.models.instructions import Instructions
from cosmos_rl_vla.sims.pool.pool import SimulatorPool

GREY = 128
"""Pixel value of an image that is hidden from the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Observations of n slots, copied out of the simulators' memory."""

    images: np.ndarray
    """uint8 [n, cameras, height, width, 3]."""
    states: np.ndarray
    """[n, s] float32, normalised."""
    tokens: np.ndarray
    """int64 [n, L]."""
    token_mask: np.ndarray
    """bool [n, L]."""

    def inputs(self, device: torch.device) -> Inputs:
        """Return the model's inputs on `device`."""
        return Inputs(
            images=torch.from_numpy(self.images),
            state=torch.from_numpy(self.states),
            tokens=torch.from_numpy(self.tokens),
            token_mask=torch.from_numpy(self.token_mask),
        ).to(device)


class ObservationConverter:
    """Converts between simulators and a model, with the model's statistics and tokenizer."""

    def __init__(self, stats: ActionStats, instructions: Instructions) -> None:
        self._stats = stats
        self._instructions = instructions

    @property
    def max_tokens(self) -> int:
        """Maximum prompt length of the model, in tokens."""
        return self._instructions.max_length

    def observe(self, pool: SimulatorPool, slots: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> Seen:
        """Copy the observations of `slots`, with each row's `instruction`; its `perturb` may grey the images out."""
        chosen = list(slots)
        images = stacked_cameras([camera[chosen] for camera in pool.images.values()], count=len(chosen))
        images[[row.get("perturb") == "grey_images" for row in rows]] = GREY
        states = self._stats.normalise_state(pool.states[chosen])
        tokens = self._instructions([row["instruction"] for row in rows], states)
        return Seen(images=images, states=states, tokens=tokens.tokens, token_mask=tokens.mask)

    def check(self, row: Mapping[str, Any], pool: SimulatorPool) -> None:
        """Raise ValueError for an instruction longer than the model's maximum prompt."""
        self._instructions([row["instruction"]], self._stats.normalise_state(pool.states[:1]))

    def actions(self, normalised: np.ndarray) -> np.ndarray:
        """[..., D] of the model -> [..., D] in the simulator's units."""
        return self._stats.unnormalise(normalised)


def stacked_cameras(cameras: Sequence[np.ndarray], *, count: int) -> np.ndarray:
    """Stack images [n, height, width, 3] by camera into [n, cameras, height, width, 3]; cameras may be 0."""
    return np.stack(cameras, axis=1) if cameras else np.zeros((count, 0, 1, 1, 3), np.uint8)
