"""Frozen passes of preference training: the reference's log-probability of each answer, and a baseline.

    microbatch i    all answers kept, on every rank?  --yes-->  ref_sums from memory
                                                      --no--->  reference.forward, gathered from all ranks, kept

The reference does not change, so each answer is computed once in a process, whichever rank trains on it in a later
epoch. After a resume it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from cosmos_rl_core.algorithms.aggregation import rollout_sums
from cosmos_rl_core.interfaces import Policy, Reference
from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.metrics import sum_metrics
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.train.replicas import ReplicaGroup
from cosmos_rl_core.types import Microbatch, TrainBatch

_decode_sums = msgspec.msgpack.Decoder(dict[int, float]).decode
_decode_total = msgspec.msgpack.Decoder(tuple[float, float]).decode
PADDING = 0
"""Key of a rollout that trains nothing."""


class AnswerSumsStage:
    """Adds `ref_sums` and `baseline` to batches. All ranks of a replica make and call it together."""

    def __init__(self, policy: Policy, reference: Reference, mesh: ReplicaMesh | None) -> None:
        self._policy, self._reference, self._mesh = policy, reference, mesh
        self._ranks = RankGroup() if mesh is None else RankGroup.of_all()
        self._is_last_stage = mesh is None or mesh.dims.coordinates(mesh.rank)["pp"] == mesh.dims.pp - 1
        self._kept: dict[int, float] = {PADDING: 0.0}
        self.passes = 0
        """Passes of the reference so far."""

    @torch.no_grad()
    def complete(self, batch: TrainBatch, replicas: ReplicaGroup | None = None) -> TrainBatch:
        """Return the batch with them. replicas: the policy replicas that train together. Raises EpochOver."""
        new = self._measured(batch.microbatches)
        for encoded in [] if replicas is None else replicas.gather(msgspec.msgpack.encode(new)):
            self._kept |= _decode_sums(encoded)
        baseline = self._baseline(batch.mismatched, replicas) if batch.mismatched else None
        microbatches = (self._with_sums(microbatch, baseline) for microbatch in batch.microbatches)
        return replace(batch, microbatches=tuple(microbatches))

    def _measured(self, microbatches: Sequence[Microbatch]) -> dict[int, float]:
        """Keep the answers of microbatches of which some rank does not have all; return those of all ranks."""
        lacks = bytes(any(key not in self._kept for key in _keys(microbatch)) for microbatch in microbatches)
        of_ranks = self._ranks.gather(lacks)
        own: dict[int, float] = {}
        with self._reference.prepared() if any(map(any, of_ranks)) else nullcontext():
            for microbatch, needed in zip(microbatches, map(any, zip(*of_ranks, strict=True)), strict=True):
                if needed:
                    sums = self._sums(self._reference, microbatch)
                    own |= dict(zip(_keys(microbatch), sums.tolist(), strict=True)) if self._is_last_stage else {}
                    self.passes += 1
        own[PADDING] = 0.0
        new = {
            key: value
            for data in self._ranks.gather(msgspec.msgpack.encode(own))
            for key, value in _decode_sums(data).items()
        }
        self._kept |= new
        return new

    def _baseline(self, mismatched: Sequence[Microbatch], replicas: ReplicaGroup | None) -> Tensor:
        """Mean log-ratio of policy and reference over the answers of all ranks and replicas, at least 0."""
        with self._reference.prepared():
            of_reference = [self._sums(self._reference, microbatch) for microbatch in mismatched]
        ratio, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for microbatch, sums in zip(mismatched, of_reference, strict=True):
            ratio += (self._sums(self._policy, microbatch) - sums).sum()
            count += rollout_sums(microbatch.terms.loss_mask, microbatch.terms).count_nonzero()
        if self._mesh is not None:
            summed = sum_metrics({"ratio": ratio, "count": count}, self._mesh)
            ratio, count = torch.tensor(summed["ratio"]), torch.tensor(summed["count"])
        totals = [(float(ratio), float(count))]
        if replicas is not None:
            totals = [_decode_total(each) for each in replicas.gather(msgspec.msgpack.encode(totals[0]))]
        total, number = map(sum, zip(*totals, strict=True))
        return torch.tensor(max(0.0, total / max(1.0, number)), dtype=torch.float32)

    def _sums(self, model: Reference, microbatch: Microbatch) -> Tensor:
        """[num_rollouts] float64, on the host."""
        logprobs = model.forward(microbatch).logprobs
        terms = to_device(microbatch.terms, logprobs.device)
        return rollout_sums(logprobs.double().masked_fill(terms.loss_mask == 0, 0.0), terms).cpu()

    def _with_sums(self, microbatch: Microbatch, baseline: Tensor | None) -> Microbatch:
        sums = torch.tensor([self._kept[key] for key in _keys(microbatch)], dtype=torch.float32)
        return replace(microbatch, terms=replace(microbatch.terms, ref_sums=sums, baseline=baseline))


def _keys(microbatch: Microbatch) -> list[int]:
    assert microbatch.terms.rollout_keys is not None, "the rows have no preferences"
    return microbatch.terms.rollout_keys.tolist()
