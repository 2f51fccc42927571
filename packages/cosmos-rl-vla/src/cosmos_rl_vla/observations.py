"""What the simulators show -> what a model reads; what a model says -> what the simulators do."""

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
"""Every pixel of an image that is hidden from the policy."""


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
        """Return them as a model reads them."""
        return Inputs(
            images=torch.from_numpy(self.images),
            state=torch.from_numpy(self.states),
            tokens=torch.from_numpy(self.tokens),
            token_mask=torch.from_numpy(self.token_mask),
        ).to(device)


class Observer:
    """Stands between a model and its simulators, with the statistics and the tokenizer that belong to the model."""

    def __init__(self, stats: ActionStats, instructions: Instructions) -> None:
        self._stats = stats
        self._instructions = instructions

    @property
    def max_tokens(self) -> int:
        """Longest prompt of the model."""
        return self._instructions.max_length

    def look(self, pool: SimulatorPool, slots: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> Seen:
        """Copy what `slots` show. A row's `instruction` tells what to do; under `perturb` its images may be hidden."""
        chosen = list(slots)
        images = stacked_cameras([camera[chosen] for camera in pool.images.values()], count=len(chosen))
        images[[row.get("perturb") == "grey_images" for row in rows]] = GREY
        states = self._stats.normalise_state(pool.states[chosen])
        tokens = self._instructions([row["instruction"] for row in rows], states)
        return Seen(images=images, states=states, tokens=tokens.tokens, token_mask=tokens.mask)

    def check(self, row: Mapping[str, Any], pool: SimulatorPool) -> None:
        """Raise ValueError for an instruction that is longer than the model's prompts may be."""
        self._instructions([row["instruction"]], self._stats.normalise_state(pool.states[:1]))

    def actions(self, normalised: np.ndarray) -> np.ndarray:
        """[..., D] of the model -> [..., D] in the simulator's units."""
        return self._stats.unnormalise(normalised)


def stacked_cameras(cameras: Sequence[np.ndarray], *, count: int) -> np.ndarray:
    """Return images [n, height, width, 3] of cameras as [n, cameras, height, width, 3]; without any, of no cameras."""
    return np.stack(cameras, axis=1) if cameras else np.zeros((count, 0, 1, 1, 3), np.uint8)
