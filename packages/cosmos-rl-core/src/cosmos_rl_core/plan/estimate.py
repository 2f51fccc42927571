"""Estimates the memory of a policy rank in bytes, from sizes alone. No torch, nothing is loaded.

    weights     parameters + gradients + optimizer state, cut over tp, ep, pp and FSDP
    passing     blocks that FSDP has gathered, and gradients on their way to their owners
    microbatch  activations that wait for the backward pass, the logits, and the backward pass's own tensors
    root        after them, the gathered embedding, norm and head with their whole gradients, while those are reduced

The weights are exact. The rest is a close upper bound, for a microbatch as full as [policy] microbatch_terms allows,
in which every token is a term.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from cosmos_rl_core.parallel.config import OptimizerSection, PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.stages import cut_layers, num_stages
from cosmos_rl_core.plan.layer_bytes import BYTES, LayerBytes, layer_bytes, norm_bytes, stream_bytes
from cosmos_rl_core.plan.needs import START, MemoryPart
from cosmos_rl_core.plan.shape import ModelShape
from cosmos_rl_core.types import WeightSpec

LOGITS_BYTES = 256 * 2**20
"""Most memory that log-probabilities of terms take at a time on a CPU; more terms are cut into chunks."""
_LOGITS_PART, _MOST_LOGITS_BYTES = 1 / 64, 2 * 2**30
"""Of a GPU's memory. Each chunk reads and writes the head's whole gradient, so few large ones are faster."""
_STEP_BYTES = 4
"""Adam's step counter, a tensor for each parameter."""

_JOINED = 4
"""Thirds of a layer's experts that exist while gates and ups, two thirds of them, are joined: they and the result."""
_PLACES_BYTES = 6 * 8
"""A token's positions and labels, int64."""

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_EMBEDDING = re.compile(r"embed|wte")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Whole parameters of the blocks that run and are prefetched, of the root, and copies in the compute type."""
    reduction: int
    """Whole gradients of the previous block, while they are reduced to shards."""
    activations: int
    """Kept from forward to backward passes, of all microbatches that are in flight in a pipeline."""
    logits: int
    """Of the terms that are computed at a time."""
    backward: int
    """Gradients of activations, and activations of the one layer that is recomputed."""
    root: int = 0
    """At the end of the backward pass, in place of the five parts before: what FSDP's root takes to be reduced."""
    largest: int = 0
    """Elements of the largest trained tensor of the rank. Not part of the sum."""
    largest_matrix: int = 0
    """Elements of the largest matrix that muon updates, of all ranks. Not part of the sum."""
    read: int = 0
    """The largest single read while a model over ranks is filled: this rank's part of one weight, in the checkpoint's
    dtype. Not part of the sum."""
    reference: int = 0
    """The second model that a KL term loads. Not part of the sum."""
    host: int = 0
    """The part of the above that [policy.memory] keeps in the host's memory; on a CPU it is the same memory."""

    @property
    def total(self) -> int:
        """Sum of the weights, and of the passes or the root's reduction, whichever is more."""
        return self.parameters + self.gradients + self.optimizer + max(self.passes, self.root)

    @property
    def passes(self) -> int:
        """Bytes of the forward and backward passes, beside the weights."""
        return self.gathered + self.reduction + self.activations + self.logits + self.backward

    @property
    def device(self) -> int:
        """Bytes that have to fit into the memory of the rank's own device."""
        return self.total - self.host

    def while_filled(self, *, host: bool) -> list[MemoryPart]:
        """Return the memory of a rank of several while its model is filled, having been made on meta and sharded.

        host: whether parameters are in the host's memory. A reference is filled after the policy.
        """
        parts = [MemoryPart(name="parameters, as they are filled", bytes=self.parameters, at=(START,), host=host)]
        if self.reference:
            parts.append(MemoryPart(name="reference, as it is filled", bytes=self.reference, at=(START,), host=host))
        return [*parts, MemoryPart(name="the largest weight, as it is read", bytes=self.read, at=(START,))]


def logits_budget(device_bytes: int | None) -> int:
    """Return the most bytes of logits at a time on a device with that much memory; None: a CPU, or not known."""
    if device_bytes is None:
        return LOGITS_BYTES
    return min(max(LOGITS_BYTES, int(_LOGITS_PART * device_bytes)), _MOST_LOGITS_BYTES)


def estimate(
    shape: ModelShape,
    *,
    dims: ParallelDims,
    policy: PolicySection,
    tokens: int,
    device_bytes: int | None = None,
    with_entropy: bool = True,
) -> MemoryEstimate:
    """Return the peak memory of the fullest rank in a step whose microbatches have `tokens` tokens.

    device_bytes: memory of the rank's GPU, which sets its `logits_budget`. with_entropy: as in a run with rollouts.
    """
    budget = logits_budget(device_bytes)
    ranks = ranks_of(shape, dims=dims, policy=policy, tokens=tokens, budget=budget, with_entropy=with_entropy)
    return max((rank.estimate() for rank in ranks), key=lambda estimated: estimated.device)


def ranks_of(
    shape: ModelShape,
    *,
    dims: ParallelDims,
    policy: PolicySection,
    tokens: int,
    budget: int,
    with_entropy: bool = True,
) -> list[Rank]:
    """Return a rank of each place of the pipeline.

    tokens: of a microbatch. budget: most bytes of logits at a time.
    """
    stages = cut_layers(shape.num_layers, num_stages(policy.parallel))
    return [
        Rank(shape, dims, policy, tokens, stages, place=place, budget=budget, with_entropy=with_entropy)
        for place in range(dims.pp)
    ]


class Rank:
    """A rank at place `place` of the pipeline; those along the other axes hold as much."""

    def __init__(
        self,
        shape: ModelShape,
        dims: ParallelDims,
        policy: PolicySection,
        tokens: int,
        stages: Sequence[range],
        *,
        place: int,
        budget: int,
        with_entropy: bool = True,
    ) -> None:
        self.shape, self.dims, self.policy = shape, dims, policy
        self.place, self.budget, self.with_entropy = place, budget, with_entropy
        self.stages = [stages[number] for number in range(place, len(stages), dims.pp)]
        self.first, self.last = place == 0, place == dims.pp - 1
        self.tokens = -(-tokens // dims.cp)
        self.bytes = BYTES[shape.compute_dtype]
        self.tied = _is_tied([spec for spec in shape.weights if spec.name not in shape.tower])
        self.specs = [spec for spec in shape.weights if self._holds(spec)]

    def estimate(self) -> MemoryEstimate:
        policy = self.policy
        trained_bytes = BYTES[policy.precision.parameters]
        num_parameters = sum(self.shard(spec) for spec in self.specs)
        learning = [spec for spec in self.specs if spec.name not in self.shape.frozen]
        trained, num_tensors = sum(map(self.shard, learning)), len(learning)
        if self.shape.adapter_parameters:
            trained, num_tensors = -(-self.shape.adapter_parameters // self._ranks_of_weights), 0
            num_parameters += trained
        steps = _STEP_BYTES * num_tensors if policy.optimizer.name != "sgd" else 0
        weights = trained_bytes * num_parameters
        gradients = trained_bytes * trained
        adapters = bool(self.shape.adapter_parameters)  # matrices
        moments = (
            num_moments(policy.optimizer) * trained
            if adapters
            else sum(num_moments(policy.optimizer, spec) * self.shard(spec) for spec in learning)
        )
        optimizer = trained_bytes * moments + steps
        kept, logits, backward = self._microbatch()
        gathered, reduction, root = self._passing()
        memory = policy.memory
        offloaded = memory.parameter_offload and self.dims.world_size > 1
        host = (weights + gradients + optimizer if offloaded else 0) + (kept if memory.activation_offload else 0)
        return MemoryEstimate(
            parameters=weights,
            gradients=gradients,
            optimizer=optimizer,
            gathered=gathered,
            reduction=reduction,
            activations=kept,
            logits=logits,
            backward=backward,
            root=root,
            largest=0 if self.shape.adapter_parameters else max(map(self.shard, learning), default=0),
            largest_matrix=max(map(self._matrix, learning), default=0),
            read=self._largest_read(),
            host=host,
        )

    def _matrix(self, spec: WeightSpec) -> int:
        """Elements of a whole matrix that muon updates; 0 for any other weight."""
        return math.prod(spec.shape) if num_moments(self.policy.optimizer, spec) == 1 else 0

    @property
    def _ranks_of_weights(self) -> int:
        """Ranks that an adapter's parameters are cut over, roughly."""
        return self.dims.dp_shard * self.dims.cp * self.dims.pp

    def _holds(self, spec: WeightSpec) -> bool:
        if self.first and self.last:
            return True
        if spec.name in self.shape.tower:
            return self.first
        layer = layer_of(spec.name)
        if layer is not None:
            return any(layer in stage for stage in self.stages)
        if _EMBEDDING.search(spec.name):
            return self.first or (self.tied and self.last)
        return self.last

    def _cut(self, spec: WeightSpec) -> tuple[int, int]:
        """Rows and numbers a row of a weight after tp and ep; vectors are whole on every rank of them."""
        rows, row = (spec.shape[0] if spec.shape else 1), math.prod(spec.shape[1:])
        if is_expert(spec.name) or len(spec.shape) < 2 or self.is_router(spec) or spec.name in self.shape.tower:
            return rows, row
        return -(-rows // self.dims.tp), row

    def is_router(self, spec: WeightSpec) -> bool:
        """Whether a weight scores the experts for each token."""
        return self.shape.experts > 0 and spec.shape[0] == self.shape.experts and len(spec.shape) == 2

    def block(self, spec: WeightSpec) -> int | None:
        """Return the number of the layer that FSDP gathers a weight with, the tower's after the decoder's; or None."""
        if spec.name not in self.shape.tower:
            return layer_of(spec.name)
        layer = self.shape.tower[spec.name]
        return None if layer is None else self.shape.num_layers + layer

    def shard(self, spec: WeightSpec) -> int:
        """Numbers of a weight that this rank holds."""
        rows, row = self._cut(spec)
        if is_expert(spec.name):  # spread over ep, and over the rest of the replica's data and tensor ranks by FSDP
            return -(-rows * row // (self.dims.dp_shard * self.dims.cp * self.dims.tp))
        ranks = self.dims.dp_shard * self.dims.cp
        if spec.shape and rows < spec.shape[0]:  # FSDP cuts the other dim
            return -(-rows * row // ranks)
        return -(-rows // ranks) * row

    def gathered(self, spec: WeightSpec) -> int:
        """Numbers of a weight where FSDP has gathered it."""
        rows, row = self._cut(spec)
        return rows * row // (self.dims.ep if is_expert(spec.name) else 1)

    def _largest_read(self) -> int:
        """Bytes of the largest read; a layer's experts are read one by one, stacked, and gates joined with ups."""
        sizes: Counter[int | str | None] = Counter()
        for spec in self.specs:
            size = BYTES.get(spec.dtype, 4) * self.shard(spec)
            if is_expert(spec.name):
                sizes[layer_of(spec.name)] += -(-_JOINED * size // 3)
            else:
                sizes[spec.name] = size
        return max(sizes.values())

    def _passing(self) -> tuple[int, int, int]:
        """Bytes that FSDP has gathered, that it reduces, and those of its root at the end.

        A layer's experts are gathered by themselves. The root's gradients are reduced together.
        """
        blocks: Counter[int] = Counter()
        experts: Counter[int] = Counter()
        root = 0
        for spec in self.specs:
            layer = self.block(spec)
            if layer is None:
                root += self.gathered(spec)
            else:
                (experts if is_expert(spec.name) else blocks)[layer] += self.gathered(spec)
        if self.dims.world_size == 1:  # nothing is sharded, but autocast makes copies
            return self._casts(), 0, 0
        # FSDP prefetches: while a block runs, the next one is gathered. A layer's experts follow its other weights, so
        # the two that exist together are the largest layer and the largest set of experts, or two layers.
        largest = max(blocks.values(), default=0)
        following = max(experts.values(), default=largest)
        everything = blocks.total() + experts.total()
        at_a_time = largest + following if self.policy.parallel.reshard_after_forward else everything
        # In the backward pass the whole gradients of a block exist until the ranks have their shards of the sum. With
        # `reduce_once` they stay for all microbatches, those of the root too.
        parallel, summed = self.policy.parallel, BYTES[self.policy.precision.reduce]
        sums = summed * (everything + root if parallel.reduce_once else max(largest, following))
        # The root is reduced last: its gathered weights, their gradients, and these in the dtype of the sum.
        ending = (2 * self.bytes + summed) * root + (sums if parallel.reduce_once else 0)
        if not (parallel.reshard_after_forward or parallel.reduce_once):
            sums = max(sums - self.bytes * largest, 0)  # a block whose gradients are reduced is no longer gathered
        return self.bytes * (at_a_time + root), sums, ending

    def _casts(self) -> int:
        """Copies of matrices in the compute type, which autocast makes in a replica of one process."""
        if self.shape.compute_dtype == "float32":
            return 0
        cast = (spec for spec in self.specs if len(spec.shape) == 2 and not is_expert(spec.name))
        return self.bytes * sum(math.prod(s.shape) for s in cast if self.tied or not _EMBEDDING.search(s.name))

    def _microbatch(self) -> tuple[int, int, int]:
        """Bytes of activations, of logits, and of the backward pass beside them."""
        layers = [self._layer(layer) for stage in self.stages for layer in stage]
        hidden, stream = self.shape.hidden, stream_bytes(self.shape, self.dims)
        # Every layer keeps its part for the backward pass, for each microbatch that is in the pipeline. The cosines and
        # sines of the rotary positions, float32, and the tokens' positions and labels are kept once.
        kept = sum(layer.kept for layer in layers) * self.tokens * self._in_flight()
        kept += (2 * 4 * self.shape.head_dim + _PLACES_BYTES) * self.tokens
        # One layer at a time runs its backward pass: what it recomputes, and its gradients at their widest.
        in_layer = self.tokens * max(layer.activations - layer.kept + layer.gradients for layer in layers)
        if not self.last:
            return round(kept), 0, round(in_layer)
        # The head: the last norm, and the hidden states that predict a term. Its backward pass precedes the layers'.
        head = ((norm_bytes(self.shape, stream) + self.bytes) * hidden + _PLACES_BYTES) * self.tokens
        outputs = -(-self.shape.vocabulary // self.dims.tp)
        logits = min(4 * outputs * self.tokens, self.budget)
        # Beside the logits [chunk, V] in float32: entropies, or the same in the type of the products; then gradients.
        narrow = logits // 2 if self.bytes < 4 else 0
        in_head = 4 * outputs * hidden + 3 * stream * hidden * self.tokens + narrow
        in_head = max(in_head, logits if self.with_entropy else narrow)
        if self.dims.world_size > 1:  # the root's gradients, the head's among them, wait for the end
            in_layer += self.bytes * outputs * hidden
        return round(kept + head), logits, round(max(in_head, in_layer - head - logits))

    def _layer(self, layer: int) -> LayerBytes:
        section = self.policy.parallel
        return layer_bytes(
            self.shape,
            dims=self.dims,
            memory=self.policy.memory,
            sequence_parallel=section.sequence_parallel,
            layer=layer,
        )

    def _in_flight(self) -> float:
        """Microbatches whose activations a stage keeps at a time; GPipe keeps all of a step, assumed to be pp."""
        section, pp = self.policy.parallel, self.dims.pp
        if pp == 1:
            return 1
        later = pp - 1 - self.place
        if section.pipeline_schedule == "interleaved_1f1b":
            chunks = section.stages_per_rank
            return ((chunks - 1) * pp + 2 * later + 1) / chunks
        return later + 1 if section.pipeline_schedule == "1f1b" else pp


def layer_of(name: str) -> int | None:
    """Return the layer a weight belongs to, the first number in its name; None outside of the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def is_expert(name: str) -> bool:
    """Return whether a weight is one of the experts that tokens are routed to."""
    return ".experts." in name


def num_moments(optimizer: OptimizerSection, spec: WeightSpec | None = None) -> int:
    """Return the number of moments that an optimizer keeps of a trained weight. None: of a hidden matrix."""
    if optimizer.name != "muon":
        return 1 if optimizer.name == "sgd" else 2
    if spec is None:
        return 1
    by_adamw = len(spec.shape) != 2 or is_expert(spec.name)
    return 2 if by_adamw or any(fnmatchcase(spec.name, pattern) for pattern in optimizer.muon.adamw) else 1


def _is_tied(specs: Sequence[WeightSpec]) -> bool:
    """Whether the embedding serves as the output head: there is no other."""
    outside = [spec for spec in specs if layer_of(spec.name) is None and len(spec.shape) == 2]
    return len(outside) == 1
