"""The sizes of a model that decide how it can be sharded and how much memory it needs. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.stages import cut_layers, num_stages
from cosmos_rl_core.types import WeightSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder of transformer layers between an embedding and an output head."""

    num_layers: int
    hidden: int
    """H: width of the residual stream."""
    heads: int
    """Attention heads."""
    kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    intermediate: int
    """I: width of a gated feed-forward layer; 0 where all layers have experts alone."""
    vocabulary: int
    """V: outputs of the head."""
    stream_norms: int = 2
    """Norms of a layer over the whole width."""
    head_norms: bool = False
    """Queries and keys are normalised in each head."""
    latent: int = 0
    """Width of the latent that queries, keys and values are made from (latent attention); 0: from the stream."""
    sinks: bool = False
    """Attention has learnt sinks: a part of its weight may go to no position."""
    gate_copies: int = 4
    """Tensors of a feed-forward's width that its backward pass needs: gate, its activation, up, their product."""
    experts: int = 0
    """E: experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    """k."""
    expert_intermediate: int = 0
    """Width of one expert."""
    shared_intermediate: int = 0
    """Width of the experts that see every token."""
    dense_layers: int = 0
    """First layers without experts, in a model with experts."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations."""
    reference_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights of a KL term's reference over ranks; None: as the trained weights."""
    weights: tuple[WeightSpec, ...]
    """All of them by checkpoint name; the first number in a name is the layer."""
    tokens_per_term: int = 1
    """Positions of the stream per term: a denoising step passes over a whole clip."""
    exchanges: int = 4
    """All-to-alls of a layer's attention over cp: of queries, keys, values, outputs; 2 where three of them travel
    together; 0: they are not counted."""
    axes: frozenset[str] = frozenset({"pp", "cp", "tp", "ep"})
    """Axes beside those of data parallelism that it can be spread over."""
    adapter_parameters: int = 0
    """Parameters that are trained beside these, which are then frozen (LoRA); 0: there are none."""
    whole: frozenset[str] = frozenset()
    """Names of weights that are trained in full beside adapters; they count among `adapter_parameters` too."""
    unread_inputs: int = 0
    """Inputs of a layer's linear layers that have no adapters, in numbers a token: its backward pass needs none."""
    frozen: frozenset[str] = frozenset()
    """Names of weights that are not trained, where the others are."""
    tower: Mapping[str, int | None] = field(default_factory=dict)
    """Names of weights beside the decoder, of a vision tower: on the first stage, and whole along tp; with the tower's
    layer that a weight belongs to, None outside of its layers."""

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers


def check_fit(shape: ModelShape, section: ParallelSection, *, dims: ParallelDims) -> None:
    """Raise one UserError with every size of a model that does not fit `dims`."""
    if reasons := list(misfits(shape, section, dims)):
        raise UserError("; ".join(reasons))


def misfits(shape: ModelShape, section: ParallelSection, dims: ParallelDims) -> Iterator[str]:
    """Yield a message for each size of a model that does not fit `dims`."""
    axes = ["dp", *sorted(shape.axes)]
    others = " and cp for activations that do not" if "cp" in shape.axes else ""
    for axis in ("tp", "pp", "ep", "cp"):
        if (size := getattr(section, axis)) > 1 and axis not in shape.axes:
            yield (
                f"[policy.parallel] {axis} = {size}: this model is spread over {' and '.join(axes)} alone; use "
                f"dp_shard for parameters that do not fit{',' if others else ''}{others}"
            )
    try:
        cut_layers(shape.num_layers, num_stages(section))
    except UserError as error:
        yield str(error)
    if shape.heads % (dims.tp * dims.cp):
        yield (
            f"[policy.parallel] tp x cp = {dims.tp} x {dims.cp} = {dims.tp * dims.cp} does not divide the model's "
            f"{shape.heads} attention heads"
        )
    if shape.kv_heads % dims.tp:
        yield (
            f"[policy.parallel] tp = {dims.tp} does not divide the model's {shape.kv_heads} key-value heads: choose a "
            "tp that does, and dp_shard or cp for the other ranks"
        )
    if dims.ep > 1 and not shape.experts:
        yield f"[policy.parallel] ep = {dims.ep}: the model has no experts; set ep = 1"
    elif shape.experts % dims.ep:
        yield f"[policy.parallel] ep = {dims.ep} does not divide the model's {shape.experts} experts"
    if shape.vocabulary <= -(-shape.vocabulary // dims.tp) * (dims.tp - 1):
        yield f"[policy.parallel] tp = {dims.tp} leaves ranks without a part of the {shape.vocabulary} outputs"
