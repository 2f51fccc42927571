"""Calls and bytes of the collectives of a policy rank, from sizes alone. No torch, nothing is loaded.

    fsdp, efsdp    all-gather of parameters, reduce-scatter of gradients, of each block and of the rest of the model
    dp_replicate   all-reduce of the shards of gradients
    tp             all-reduce around each attention and feed-forward; with sequence_parallel an all-gather before and a
                   reduce-scatter after; gradients of parameters that every rank holds; scalars of the logits
    cp             all-to-all around each attention; outputs of all terms
    ep             all-to-all of counts and rows before the experts, of rows after them
    pp             hidden states to the next stage, their gradients to the previous one

They are those of one forward pass and its backward pass, with those that "selective" and "full" repeat. Not counted:
joint attention (SD3) over cp, second passes (a reference, guidance, blocks of unpacked sequences), and scalars: the
norm of the gradients, metrics, and the vote with which torch begins each step of a pipeline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cosmos_rl_core.parallel.config import PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.estimate import Rank, is_expert, layer_of, logits_budget, ranks_of
from cosmos_rl_core.plan.layer_bytes import BYTES
from cosmos_rl_core.plan.shape import ModelShape
from cosmos_rl_core.types import WeightSpec

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send", "receive"]

_Unit = tuple[int | None, bool]
"""The parameters that FSDP gathers together: a layer, or the rest of the model; and whether they are experts."""
_COUNT_BYTES = 8
"""Of the number of rows for an expert, int64."""
_REGIONS = 2
"""Parts of a layer that ranks along tp compute together: attention and feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCalls:
    """Calls of one kind along one axis; bytes are those of whole tensors, of all calls."""

    axis: str
    """fsdp is dp_shard x cp; efsdp is what ep leaves of dp_shard x cp x tp."""
    kind: Kind
    content: str
    calls: int
    bytes: int
    each: Literal["microbatch", "step"] = "microbatch"


def traffic(
    shape: ModelShape,
    *,
    dims: ParallelDims,
    policy: PolicySection,
    tokens: int,
    with_entropy: bool = False,
    device_bytes: int | None = None,
) -> tuple[CollectiveCalls, ...]:
    """Return the collectives of the rank with the most bytes, for a microbatch of `tokens` tokens, all of them terms.

    Args:
        with_entropy: the entropy of each term is computed too.
        device_bytes: memory of the rank's GPU, which sets its `logits_budget`.
    """
    budget = logits_budget(device_bytes)
    ranks = ranks_of(shape, dims=dims, policy=policy, tokens=tokens, budget=budget)
    of_ranks = [tuple(_Traffic(rank, tokens, with_entropy).of_all_axes()) for rank in ranks]
    return max(of_ranks, key=lambda calls: sum(one.bytes for one in calls))


class _Traffic:
    """The collectives of one rank."""

    def __init__(self, rank: Rank, num_terms: int, with_entropy: bool) -> None:
        self.rank, self.shape, self.dims, self.policy = rank, rank.shape, rank.dims, rank.policy
        self.num_terms, self.with_entropy = num_terms, with_entropy
        self.layers = [layer for stage in rank.stages for layer in stage]
        self.stream = rank.bytes * self.shape.hidden * rank.tokens
        """Bytes of the residual stream, whole along the sequence."""
        self.mode = rank.policy.memory.activation_checkpointing
        self.sequence = rank.policy.parallel.sequence_parallel

    def of_all_axes(self) -> Iterator[CollectiveCalls]:
        calls = [*self._weights(), *self._tensors(), *self._context(), *self._experts(), *self._stages()]
        yield from (one for one in calls if one.calls)

    def _weights(self) -> Iterator[CollectiveCalls]:
        """FSDP: each layer, each layer's experts and the rest of the model are gathered and reduced together."""
        parallel, dims = self.policy.parallel, self.dims
        gathered: Counter[_Unit] = Counter()
        reduced: Counter[_Unit] = Counter()
        groups = {"fsdp": dims.dp_shard * dims.cp, "efsdp": dims.dp_shard * dims.cp * dims.tp // dims.ep}
        adapters = round(self.shape.adapter_parameters / self.shape.num_layers / dims.tp)
        for spec in self.rank.specs:
            layer = self.rank.block(spec)
            unit = layer, layer is not None and is_expert(spec.name)
            padded = self.rank.shard(spec) * groups["efsdp" if unit[1] else "fsdp"]  # every rank sends as much
            gathered[unit] += padded
            if not adapters and spec.name not in self.shape.frozen:
                reduced[unit] += padded
        for layer in self.layers if adapters else ():
            gathered[layer, False] += adapters
            reduced[layer, False] += adapters
        summed = BYTES[self.policy.precision.reduce]
        once = "step" if parallel.reduce_once else "microbatch"
        replicated = "microbatch" if dims.pp > 1 and not parallel.reduce_once else "step"
        for axis, size in groups.items():
            units = {unit: number for unit, number in gathered.items() if unit[1] == (axis == "efsdp")}
            gradients = [summed * number for unit, number in reduced.items() if unit in units]
            calls, moved = len(gradients), sum(gradients)
            if size > 1:
                yield from self._gathers(axis, units)
                yield _collective(axis, "reduce-scatter", "gradients", calls, moved, each=once)
            if dims.dp_replicate > 1:
                yield _collective("dp_replicate", "all-reduce", "gradients", calls, moved // size, each=replicated)

    def _gathers(self, axis: str, units: Mapping[_Unit, int]) -> Iterator[CollectiveCalls]:
        """Blocks are gathered for the forward and for the backward pass, the rest of the model for both together.

        A pipeline with `reduce_once` leaves blocks gathered after a backward pass, and the rest to the end of a step.
        """
        parallel = self.policy.parallel
        blocks = [self.rank.bytes * number for (layer, _), number in units.items() if layer is not None]
        root = [self.rank.bytes * number for (layer, _), number in units.items() if layer is None]
        kept = self.dims.pp > 1 and parallel.reduce_once
        passes = 2 if parallel.reshard_after_forward else 1
        often, once = (blocks * (passes - 1), blocks + root) if kept else (blocks * passes + root, [])
        yield _collective(axis, "all-gather", "parameters", len(often), sum(often))
        yield _collective(axis, "all-gather", "parameters", len(once), sum(once), each="step")

    def _tensors(self) -> Iterator[CollectiveCalls]:
        """Tensor parallelism: regions, the embedding before them and the head after them."""
        if self.dims.tp == 1:
            return
        regions = _REGIONS * len(self.layers)
        enters, leaves = regions + self.rank.last, regions + self.rank.first
        # A recomputed block stops at the last tensor that its backward pass needs: a norm's input, or the stream.
        again = (_REGIONS if self.shape.stream_norms > _REGIONS else 1) * len(self.layers)
        if self.sequence:
            gathers = enters + leaves + (regions if self.mode != "none" else 0)
            reductions = enters + leaves + (again if self.mode == "full" else 0)
            yield _collective("tp", "all-gather", "activations", gathers, gathers * self.stream)
            yield _collective("tp", "reduce-scatter", "activations", reductions, reductions * self.stream)
        else:
            sums = enters + leaves + (again if self.mode == "full" else 0)
            yield _collective("tp", "all-reduce", "activations", sums, sums * self.stream)
        partial = [math.prod(spec.shape) for spec in self._partial()]
        yield _collective("tp", "all-reduce", "gradients", len(partial), self.rank.bytes * sum(partial))
        if self.rank.last:
            scalars = 3 + self.with_entropy  # maximum, sum and chosen logit, in chunks of terms
            per_term = 4 * -(-self.shape.vocabulary // self.dims.tp)
            terms = -(-self.num_terms // self.dims.cp)
            chunks = -(-terms // max(1, self.rank.budget // per_term))
            yield _collective("tp", "all-reduce", "terms", scalars * chunks, 4 * scalars * terms)

    def _partial(self) -> list[WeightSpec]:
        """Trained parameters of which every rank along tp holds all, and computes a part of the gradient."""
        if self.shape.adapter_parameters:
            return []
        parts: Counter[str] = Counter()  # dims of the widest parameter of each part of a layer
        for spec in self.rank.specs:
            parts[_part(spec.name)] = max(parts[_part(spec.name)], len(spec.shape))
        decoder = [spec for spec in self.rank.specs if spec.name not in self.shape.tower]
        vectors = [spec for spec in decoder if len(spec.shape) < 2 or self.rank.is_router(spec)]
        inside = [spec for spec in vectors if layer_of(spec.name) is not None and parts[_part(spec.name)] > 1]
        return vectors if self.sequence else inside

    def _context(self) -> Iterator[CollectiveCalls]:
        """Context parallelism: rows to heads before attention, heads to rows after it; all terms on every rank."""
        if self.dims.cp == 1:
            return
        shape, passes = self.shape, 2 if self.mode == "none" else 3
        heads = shape.heads // self.dims.tp
        kv_heads = math.lcm(max(shape.kv_heads // self.dims.tp, 1), self.dims.cp)  # fewer than cp are repeated
        calls = passes * shape.exchanges * len(self.layers)
        moved = 2 * (heads + kv_heads) * shape.head_dim * self.rank.bytes * self.rank.tokens
        yield _collective("cp", "all-to-all", "attention", calls, passes * moved * len(self.layers) * (calls > 0))
        if not self.rank.last:
            return
        if shape.tokens_per_term == 1:
            values = 1 + self.with_entropy
            yield _collective("cp", "all-reduce", "terms", values, 4 * values * self.num_terms)
        else:
            size = self.rank.bytes * shape.vocabulary * self.rank.tokens * self.dims.cp
            yield _collective("cp", "all-gather", "outputs", 1, size)

    def _experts(self) -> Iterator[CollectiveCalls]:
        """Expert parallelism: counts, rows to their experts and back; the backward pass sends rows alone."""
        shape, dims = self.shape, self.dims
        if dims.ep == 1:
            return
        layers = sum(shape.has_experts(layer) for layer in self.layers)
        forward = 2 if self.mode == "full" else 1  # "selective" keeps what was received
        slots = self.rank.tokens // dims.tp * shape.experts_per_token
        rows, counts = layers * 2 * (forward + 1), layers * forward
        yield _collective("ep", "all-to-all", "rows", rows, rows * slots * shape.hidden * self.rank.bytes)
        yield _collective("ep", "all-to-all", "counts", counts, counts * shape.experts * _COUNT_BYTES)

    def _stages(self) -> Iterator[CollectiveCalls]:
        """Pipeline: hidden states go forward, their gradients back."""
        dims, rank = self.dims, self.rank
        if dims.pp == 1:
            return
        final = dims.pp * self.policy.parallel.stages_per_rank - 1
        numbers = range(rank.place, final + 1, dims.pp)
        before, after = sum(number > 0 for number in numbers), sum(number < final for number in numbers)
        size = self.stream // (dims.tp if self.sequence else 1)
        directions: list[tuple[Kind, int, int]] = [("send", after, before), ("receive", before, after)]
        for kind, hidden, gradients in directions:
            yield _collective("pp", kind, "hidden states", hidden, hidden * size)
            yield _collective("pp", kind, "their gradients", gradients, gradients * size)
        if rank.tied and (rank.first or rank.last) and not self.shape.adapter_parameters:
            size = BYTES[self.policy.precision.parameters] * sum(
                rank.shard(spec)
                for spec in rank.specs
                if layer_of(spec.name) is None and len(spec.shape) == 2 and spec.name not in self.shape.tower
            )
            for kind, *_ in directions:
                yield _collective("pp", kind, "gradients of embedding and head", 1, size, each="step")


def _part(name: str) -> str:
    """Name of the layer's child that a weight belongs to: layers.3.mlp.up_proj.weight -> layers.3.mlp"""
    parts = name.split(".")
    index = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: index + 2])


def _collective(
    axis: str, kind: Kind, content: str, calls: int, size: int, *, each: Literal["microbatch", "step"] = "microbatch"
) -> CollectiveCalls:
    return CollectiveCalls(axis=axis, kind=kind, content=content, calls=calls, bytes=size, each=each)
