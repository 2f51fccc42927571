"""A batch of which each policy replica has the groups of its own part.

own groups -> outlines to all replicas -> all groups of the batch, the others' as outlines
           -> advantages, minibatches and metrics as with whole groups -> own groups collated -> counts summed

An outline is a group without the data that only its own replica trains on. It is enough for everything that needs the
whole batch, and small: the arrays of a term in the domain's form and its log-probabilities are left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from cosmos_rl_core.train.replicas import ReplicaGroup
from cosmos_rl_core.types import Exchange, RolloutGroup, TrainBatch
from cosmos_rl_core.wire.payload import decode_group, encode_group

_FASTEST = 1
_decode_counts = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
_decode_outlines = msgspec.msgpack.Decoder(list[bytes]).decode


class BatchPart:
    """One replica's part of a batch. All replicas make theirs, and call `collate`, at the same time."""

    def __init__(
        self,
        groups: Sequence[RolloutGroup],
        replicas: ReplicaGroup,
        *,
        collate: Callable[[Sequence[RolloutGroup]], TrainBatch],
        with_text: bool,
    ) -> None:
        """Exchange outlines with the other replicas. Raises EpochOver.

        groups: of this part. collate: groups of this part -> this rank's share of them. with_text: whether outlines
        have the texts of prompts and rollouts.
        """
        self._replicas = replicas
        self._collate = collate
        self._samples = {group.prompt.sample_id for group in groups}
        mine = [encode_group(outline(group, with_text=with_text)) for group in groups]
        outlines = replicas.gather(zlib.compress(msgspec.msgpack.encode(mine), _FASTEST))
        others = [
            decode_group(encoded)
            for place, data in enumerate(outlines)
            if place != replicas.place
            for encoded in _decode_outlines(zlib.decompress(data))
        ]
        self.groups = sorted([*groups, *others], key=lambda group: group.prompt.sample_id)
        """All groups of the batch, ascending by sample."""

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples of the whole batch."""
        return tuple(group.prompt.sample_id for group in self.groups)

    def collate(self, minibatches: Sequence[Sequence[RolloutGroup]]) -> list[TrainBatch]:
        """Return the batches of this replica's groups, with the counts of all replicas. Raises EpochOver.

        minibatches: groups of the whole batch.
        """
        batches = [self._collate(self._own(groups)) for groups in minibatches]
        mine = [(batch.num_terms, batch.num_rollouts) for batch in batches]
        counts = np.array([_decode_counts(data) for data in self._replicas.gather(msgspec.msgpack.encode(mine))])
        return [
            replace(batch, num_terms=int(terms), num_rollouts=int(rollouts))
            for batch, (terms, rollouts) in zip(batches, counts.sum(0), strict=True)
        ]

    def _own(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Return those groups that this replica trains on; where there is none, one that trains nothing."""
        mine = [group for group in groups if group.prompt.sample_id in self._samples]
        return mine or [_untrained(next(group for group in self.groups if group.prompt.sample_id in self._samples))]


def outline(group: RolloutGroup, *, with_text: bool) -> RolloutGroup:
    """Return the group without arrays and with log-probabilities of 0; its texts are empty unless `with_text`."""
    rollouts = tuple(
        replace(
            rollout,
            arrays={},
            rollout_logprobs=np.zeros_like(rollout.rollout_logprobs),
            text=rollout.text if with_text else "",
            exchanges=rollout.exchanges if with_text else tuple(_without_text(each) for each in rollout.exchanges),
        )
        for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts, prompt_text=group.prompt_text if with_text else "")


def _without_text(exchange: Exchange) -> Exchange:
    return replace(exchange, text="", reasoning="", calls=(), messages=())


def _untrained(group: RolloutGroup) -> RolloutGroup:
    rollout = group.rollouts[0]
    return replace(group, rollouts=(replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask)),))
