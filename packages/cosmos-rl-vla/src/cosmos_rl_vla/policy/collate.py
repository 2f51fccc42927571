"""Collates episodes into microbatches of decisions. A decision without trained terms has no forward pass.

Microbatch.inputs   B decisions
  images, state, tokens, token_mask      `models.base.Inputs`
  valid                                  bool [B, H]
  replay/<name>                          [B, ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cosmos_rl_core.train.balance import deal
from cosmos_rl_core.types import Microbatch, Rollout, RolloutGroup, Share, TermBatch, TrainBatch
from cosmos_rl_vla.trajectory import REPLAY, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Index of a decision in the batch."""

    rollout: int
    decision: int


def collate(groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
    """Split the decisions of episodes into microbatches; return those of `share`, with counts of the whole batch."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    places = [
        Place(rollout=number, decision=int(decision))
        for number, rollout in enumerate(rollouts)
        for decision in np.flatnonzero(_by_decision(rollout, rollout.loss_mask).any(1))
    ]
    if not places:
        places = [Place(rollout=0, decision=0)]
    terms = [rollouts[place.rollout].num_terms // _decisions(rollouts[place.rollout]) for place in places]
    dealt = deal(terms, capacity=microbatch_terms, share=share)
    return TrainBatch(
        microbatches=tuple(
            _microbatch(rollouts, [places[index] for index in members], idle=places[0]) for members in dealt
        ),
        num_terms=sum(int(rollout.loss_mask.sum()) for rollout in rollouts),
        num_rollouts=sum(bool(rollout.loss_mask.any()) for rollout in rollouts),
        metrics={"decisions": float(len(places))},
    )


def _microbatch(rollouts: Sequence[Rollout], places: Sequence[Place], *, idle: Place) -> Microbatch:
    """Stack decisions. Without any, return a masked pass over `idle`, for ranks that have fewer microbatches."""
    trains, places = bool(places), places or [idle]
    of = [(rollouts[place.rollout], place.decision) for place in places]
    numbers = {number: i for i, number in enumerate(dict.fromkeys(place.rollout for place in places))}

    def terms(values: str) -> np.ndarray:
        """Concatenate an array of the rollouts' terms, [T]."""
        return np.concatenate([_by_decision(rollout, _TERMS[values](rollout))[at] for rollout, at in of])

    per_decision = len(terms("mask")) // len(places)
    return Microbatch(
        inputs=_inputs(of),
        terms=TermBatch(
            rollout_logprobs=torch.from_numpy(terms("logprobs")),
            advantages=torch.from_numpy(terms("advantages").astype(np.float32)),
            loss_mask=torch.from_numpy(terms("mask").astype(np.float32) * trains),
            rollout_index=torch.tensor([numbers[place.rollout] for place in places]).repeat_interleave(per_decision),
            num_rollouts=len(numbers),
            values=torch.from_numpy(terms("values")),
            returns=torch.from_numpy(terms("returns")),
            rollout_terms=torch.tensor([float(rollouts[number].loss_mask.sum()) for number in numbers]),
        ),
    )


def _values(rollout: Rollout) -> np.ndarray:
    assert rollout.episode is not None, "an episode of a simulator has steps"
    return rollout.episode.values[:-1][rollout.episode.term_steps]


def _returns(rollout: Rollout) -> np.ndarray:
    """Return the returns; zeros for algorithms without a critic."""
    assert rollout.episode is not None, "an episode of a simulator has steps"
    returns = rollout.episode.returns
    return np.zeros(rollout.num_terms, np.float32) if returns is None else returns[rollout.episode.term_steps]


_TERMS = {
    "logprobs": lambda rollout: rollout.rollout_logprobs,
    "advantages": lambda rollout: rollout.term_advantages,
    "mask": lambda rollout: rollout.loss_mask,
    "values": _values,
    "returns": _returns,
}


def _decisions(rollout: Rollout) -> int:
    return len(rollout.arrays["valid"])


def _by_decision(rollout: Rollout, values: np.ndarray) -> np.ndarray:
    """[K, terms of a decision]."""
    return values.reshape(_decisions(rollout), -1)


def _inputs(of: Sequence[tuple[Rollout, int]]) -> dict[str, torch.Tensor]:
    prompts = [rollout.arrays["tokens"][at][rollout.arrays["token_mask"][at]] for rollout, at in of]
    tokens, mask = padded(prompts)
    names = [name for name in of[0][0].arrays if name in ("images", "state", "valid") or name.startswith(REPLAY)]
    stacked = {name: np.stack([rollout.arrays[name][at] for rollout, at in of]) for name in names}
    arrays = {"tokens": tokens.astype(np.int64), "token_mask": mask, **stacked}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
