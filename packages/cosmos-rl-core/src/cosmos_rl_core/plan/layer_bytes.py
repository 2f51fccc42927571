"""Bytes that a transformer layer keeps for its backward pass, for each token of a microbatch. No torch.

As in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198, section 4),
counted anew for gated feed-forward layers, RMS norms, grouped-query attention in one fused kernel, and no dropout. With
c the bytes of the compute type, H hidden, q = heads x head_dim, v = kv_heads x head_dim and I intermediate:

    norms        2 (4 + 2c) H            the input in float32, normalised and scaled values; some families have 4;
    attention    c (3 q + 2 v)           queries, keys, values, the output, and the output in the packed row
    feed-forward 4 c I                   gate, its activation, up, their product; some families keep more
    experts      k c (2 H + 4 I_e)       the same for each chosen expert, and its input and output

"full" keeps the layer's input c H; "selective" also what matrix products and attention return:

    3 c H + c (2 q + 2 v) + 2 c I        or k c (H + 2 I_e) for experts

tp divides q, v and I, and with sequence_parallel H of the norms; cp divides the tokens. In one process autocast leaves
the residual stream, norms and experts in float32, and keeps a copy of its input for each matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

from cosmos_rl_core.parallel.config import MemorySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.shape import ModelShape

BYTES = {"float32": 4, "bfloat16": 2}
_INDEX_BYTES = 8
"""Of an int64, as places of tokens are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes a token and layer, on one rank."""

    kept: float
    """From the forward to the backward pass."""
    activations: float
    """Without recomputation: held while the layer's own backward pass runs."""
    gradients: float
    """Gradients that flow through the layer, at its widest."""


def layer_bytes(
    shape: ModelShape, *, dims: ParallelDims, memory: MemorySection, sequence_parallel: bool, layer: int
) -> LayerBytes:
    """Return the bytes of one layer for each token of this rank; ranks along cp have 1 / cp of the tokens."""
    sizes = _Sizes.of(shape, dims, sequence_parallel=sequence_parallel, layer=layer)
    activations = sizes.norms + sizes.attention + sizes.feed_forward
    kept = {"none": activations, "selective": sizes.products, "full": stream_bytes(shape, dims) * sizes.along}
    return LayerBytes(kept=kept[memory.activation_checkpointing], activations=activations, gradients=sizes.gradients)


def stream_bytes(shape: ModelShape, dims: ParallelDims) -> int:
    """Return the bytes of a number in the residual stream."""
    return BYTES["float32"] if dims.world_size == 1 else BYTES[shape.compute_dtype]


def norm_bytes(shape: ModelShape, normalised: int) -> int:
    """Return the bytes that a norm keeps of each number beside its output; `normalised`: of a normalised one."""
    return 4 if shape.adapter_parameters else 4 + normalised  # a frozen scale needs its input no more


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sums of the table above, in bytes a token."""

    along: float
    """Numbers of the residual stream on this rank."""
    norms: float
    attention: float
    feed_forward: float
    products: float
    """The part that "selective" keeps."""
    gradients: float

    @classmethod
    def of(cls, shape: ModelShape, dims: ParallelDims, *, sequence_parallel: bool, layer: int) -> _Sizes:
        c, stream = BYTES[shape.compute_dtype], stream_bytes(shape, dims)
        heads, kv_heads = shape.heads / dims.tp, max(shape.kv_heads / dims.tp, 1)
        query, value = heads * shape.head_dim, kv_heads * shape.head_dim
        along = shape.hidden / dims.tp if sequence_parallel else shape.hidden
        norms = shape.stream_norms * ((norm_bytes(shape, stream) + c) * along + 4)
        if stream != c:  # autocast: the norm's output is cast for each product it goes into
            norms += c * along * (2 if shape.has_experts(layer) else 3)
        norms += 2 * c * (shape.hidden - along)  # products keep the gathered rows instead of this rank's
        attention = c * (3 * query + 2 * value) + 4 * heads
        if shape.head_norms:
            attention += norm_bytes(shape, c) * (query + value) + 4 * (heads + kv_heads)
        attention += (4 + 2 * c) * shape.latent + (4 * c * query if shape.sinks else 0)
        attention -= c * shape.unread_inputs / dims.tp
        inner = _feed_forward(shape, dims, layer=layer)
        return cls(
            along=along,
            norms=norms,
            attention=attention,
            feed_forward=inner.activations,
            products=stream * along + c * (along + 2 * query + 2 * value) + 4 * heads + inner.kept,
            gradients=2 * stream * along + inner.gradients,
        )


def _feed_forward(shape: ModelShape, dims: ParallelDims, *, layer: int) -> LayerBytes:
    """The part after attention; `kept` are the outputs of its matrix products."""
    c, hidden, copies = BYTES[shape.compute_dtype], shape.hidden, shape.gate_copies
    if not shape.has_experts(layer):
        width = shape.intermediate / dims.tp
        return LayerBytes(activations=copies * c * width, kept=c * (hidden + 2 * width), gradients=3 * c * width)
    chosen = shape.experts_per_token / dims.tp  # the tokens of a tp group are split over its ranks
    e, width = stream_bytes(shape, dims), shape.expert_intermediate
    shared = shape.shared_intermediate / dims.tp
    routes = 4 * shape.experts + 4 * _INDEX_BYTES * shape.experts_per_token
    return LayerBytes(
        activations=routes + chosen * (e * (2 * hidden + copies * width) + 4) + copies * c * shared,
        kept=c * shape.experts + e * chosen * (hidden + 2 * width) + 2 * c * shared,
        gradients=e * chosen * (hidden + 3 * width),
    )
