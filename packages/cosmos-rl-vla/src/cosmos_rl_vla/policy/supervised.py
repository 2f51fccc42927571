"""Collates frames of demonstrations into microbatches: observations, and the actions that followed.

    row -- read --> images, state, instruction, actions, auxiliary targets -- the model's statistics, tokenizer --> B
    seed, sample_id --> seed of the noise and time of flow matching

One term per sample. A rank reads only the images of its own share. So the counts of the whole batch, which all ranks
agree on, are of rows; a row whose images cannot be read is logged and has weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.train.balance import deal
from cosmos_rl_core.types import Microbatch, Prompt, Share, TermBatch, TrainBatch
from cosmos_rl_vla.data.config import VLADataConfig

if TYPE_CHECKING:
    from cosmos_rl_vla.data.demos import Demonstrations
    from cosmos_rl_vla.models.instructions import Tokens
    from cosmos_rl_vla.policy.policy import VLAPolicy


def collate_sft(
    prompts: Sequence[Prompt], *, data: VLADataConfig, policy: VLAPolicy, microbatch_terms: int, share: Share
) -> TrainBatch:
    """Return the microbatches of `share`, of at most `microbatch_terms` frames each, with counts of the whole batch.

    Raises UserError if the demonstrations do not fit the model, and if most images cannot be read.
    """
    assert policy.demonstrations is not None, "a policy of supervised training opens demonstrations"
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
        samples = self._demonstrations.read([prompt.row for prompt in prompts], horizon=self._policy.model_horizon)
        stats = self._policy.stats
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
            return self._policy.instructions(instructions, states)
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
    own, model = demonstrations.stats, policy.stats
    sizes = {
        "actions": (len(own.action), len(model.action)),
        "states": (len(own.state or ()), len(model.state or own.state or ())),
    }
    for name, (recorded, known) in sizes.items():
        if recorded != known:
            raise UserError(f"[data] demos = {data.demos!r} has {name} of {recorded} numbers, the model's are {known}")
    if demonstrations.aux_dim and demonstrations.aux_dim != policy.aux_dim:
        raise UserError(
            f"[data] aux_columns {list(data.aux_columns)} have {demonstrations.aux_dim} numbers, the model's aux_dim "
            f"is {policy.aux_dim}: set [model] aux_dim = {demonstrations.aux_dim}, or remove the columns"
        )
