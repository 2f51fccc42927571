"""Forward passes of a fixed shape: a policy's output for an episode is then bitwise equal in any batch.

The summation order of a matrix product depends on its number of rows. So a pass always has the same number of
observations, padded with the first one, and of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from cosmos_rl_vla.models.base import Acted, Inputs, Randomness

if TYPE_CHECKING:
    from cosmos_rl_vla.models.base import ActionModel


def act(model: ActionModel, inputs: Inputs, *, randomness: Randomness, greedy: bool, rows: int, length: int) -> Acted:
    """Act at B observations, in passes over `rows` of them with `length` tokens each."""
    parts = [
        _pass(model, inputs, range(first, min(first + rows, len(inputs))), randomness, greedy, rows, length)
        for first in range(0, len(inputs), rows)
    ]
    return Acted(
        actions=torch.cat([part.actions for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        values=torch.cat([part.values for part in parts]),
        replay={name: torch.cat([part.replay[name] for part in parts]) for name in parts[0].replay},
    )


def _pass(
    model: ActionModel, inputs: Inputs, chosen: range, randomness: Randomness, greedy: bool, rows: int, length: int
) -> Acted:
    places = [*chosen, *[chosen[0]] * (rows - len(chosen))]
    own = inputs.select(torch.tensor(places, device=inputs.tokens.device))
    missing = length - own.tokens.shape[1]
    own = replace(own, tokens=F.pad(own.tokens, (0, missing)), token_mask=F.pad(own.token_mask, (0, missing)))
    own_randomness = replace(
        randomness, seeds=[randomness.seeds[i] for i in places], places=[randomness.places[i] for i in places]
    )
    acted = model.act(own, randomness=own_randomness, greedy=greedy)
    return Acted(
        actions=acted.actions[: len(chosen)],
        logprobs=acted.logprobs[: len(chosen)],
        values=acted.values[: len(chosen)],
        replay={name: tensor[: len(chosen)] for name, tensor in acted.replay.items()},
    )
