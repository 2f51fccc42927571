"""Collates episodes, and frames of demonstrations, into microbatches.

Microbatch.inputs of episodes: B decisions. A decision without trained terms has no forward pass.
  images, state, tokens, token_mask      `models.base.Inputs`
  valid                                  bool [B, H]
  replay/<name>                          [B, ...]
Microbatch.inputs of demonstrations: B frames, one term each.
  images, state, tokens, token_mask      `models.base.Inputs`
  actions, action_mask                   [B, M, D] float32 normalised, [B, M] bool
  seeds                                  int64 [B]: of the noise and time of flow matching, from seed and sample_id
  aux                                    [B, n] float32, with auxiliary targets

A rank reads only the images of its own share. So the counts of a batch of demonstrations, which all ranks agree on, are
of rows; a row whose images cannot be read is logged and has weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.train.balance import deal
from cosmos_rl_core.types import Microbatch, Prompt, Rollout, RolloutGroup, Share, TermBatch, TrainBatch
from cosmos_rl_vla.config import VLADataConfig
from cosmos_rl_vla.trajectory import REPLAY, padded

if TYPE_CHECKING:
    from cosmos_rl_vla.data.demos import Demonstrations
    from cosmos_rl_vla.models.instructions import Tokens
    from cosmos_rl_vla.policy.policy import VLAPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionIndex:
    """Index of a decision in the batch."""

    rollout: int
    decision: int


def collate(groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
    """Split the decisions of episodes into microbatches; return those of `share`, with counts of the whole batch."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    places = [
        DecisionIndex(rollout=number, decision=int(decision))
        for number, rollout in enumerate(rollouts)
        for decision in np.flatnonzero(_by_decision(rollout, rollout.loss_mask).any(1))
    ]
    if not places:
        places = [DecisionIndex(rollout=0, decision=0)]
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


def _microbatch(rollouts: Sequence[Rollout], places: Sequence[DecisionIndex], *, idle: DecisionIndex) -> Microbatch:
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


def collate_sft(
    prompts: Sequence[Prompt], *, data: VLADataConfig, policy: VLAPolicy, microbatch_terms: int, share: Share
) -> TrainBatch:
    """Return the microbatches of `share`, of at most `microbatch_terms` frames each, with counts of the whole batch.

    Raises UserError if the demonstrations do not fit the model, and if most images cannot be read.
    """
    demonstrations = policy.demonstrations(data)
    _check_fit(demonstrations, policy, data)
    dealt = deal([1] * len(prompts), capacity=microbatch_terms, share=share)
    own = Reader(demonstrations, policy)
    microbatches = tuple(own.microbatch([prompts[place] for place in places], idle=prompts[0]) for places in dealt)
    return TrainBatch(
        microbatches=microbatches,
        num_terms=len(prompts),
        num_rollouts=len(prompts),
        metrics={"rows_dropped": float(own.dropped)},
        rows_dropped=demonstrations.faults.take_new(),
    )


class Reader:
    """Builds the microbatches of one rank's share."""

    def __init__(self, demonstrations: Demonstrations, policy: VLAPolicy) -> None:
        self._demonstrations = demonstrations
        self._policy = policy
        self.dropped = 0
        """Number of rows without images."""

    def microbatch(self, prompts: Sequence[Prompt], *, idle: Prompt) -> Microbatch:
        """Stack samples. Without any, return a masked one of `idle`, for ranks that have fewer microbatches."""
        mask = np.ones(len(prompts) or 1, np.float32) * bool(prompts)
        prompts = prompts or [idle]
        loaded = self._policy.loaded
        stats, horizon = loaded.stats, loaded.model.model_horizon
        samples = self._demonstrations.read([prompt.row for prompt in prompts], horizon=horizon)
        states = stats.normalise_state(samples.states)
        words = self._tokens(samples.instructions, states)
        arrays = {
            "images": samples.images,
            "state": states,
            "tokens": words.tokens,
            "token_mask": words.mask,
            "actions": np.where(samples.action_mask[..., None], stats.normalise(samples.actions), np.float32(0)),
            "action_mask": samples.action_mask,
            "seeds": np.array([_seed(self._policy.seed, prompt.sample_id) for prompt in prompts], np.int64),
        }
        if samples.aux is not None:
            arrays["aux"] = samples.aux
        self._demonstrations.faults.want(len(prompts))
        for place, reason in samples.unreadable.items():
            self.dropped += bool(mask[place])
            mask[place] = 0
            row = prompts[place].row
            self._demonstrations.faults.add((row["episode"], row["frame"]), reason)
        return Microbatch(inputs={name: torch.from_numpy(array) for name, array in arrays.items()}, terms=_terms(mask))

    def _tokens(self, instructions: Sequence[str], states: np.ndarray) -> Tokens:
        try:
            return self._policy.loaded.instructions(instructions, states)
        except ValueError as error:
            raise UserError(f"[data] demos: {error}") from error


def _seed(seed: int, sample_id: int) -> int:
    return int(np.random.default_rng([seed, sample_id]).integers(2**63))


def _terms(mask: np.ndarray) -> TermBatch:
    """Return a batch with one rollout of one term per sample."""
    count = len(mask)
    return TermBatch(
        rollout_logprobs=torch.zeros(count),
        advantages=torch.ones(count),
        loss_mask=torch.from_numpy(mask),
        rollout_index=torch.arange(count),
        num_rollouts=count,
    )


def _check_fit(demonstrations: Demonstrations, policy: VLAPolicy, data: VLADataConfig) -> None:
    """Raise UserError for demonstrations of another robot, or with other auxiliary targets than the model's."""
    own, model = demonstrations.stats, policy.loaded.stats
    sizes = {
        "actions": (len(own.action), len(model.action)),
        "states": (len(own.state or ()), len(model.state or own.state or ())),
    }
    for name, (recorded, known) in sizes.items():
        if recorded != known:
            raise UserError(f"[data] demos = {data.demos!r} has {name} of {recorded} numbers, the model's are {known}")
    model.check_demonstrated(*demonstrations.action_bounds, origin=f"[data] demos = {data.demos!r}")
    aux_dim = policy.loaded.model.aux_dim
    if demonstrations.aux_dim not in (0, aux_dim):
        raise UserError(
            f"[data] aux_columns {list(data.aux_columns)} have {demonstrations.aux_dim} numbers, the model's aux_dim "
            f"is {aux_dim}: set [model] aux_dim = {demonstrations.aux_dim}, or remove the columns"
        )
