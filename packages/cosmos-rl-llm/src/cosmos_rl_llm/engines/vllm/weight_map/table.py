"""The layer classes of vLLM and each one's part of a checkpoint tensor: one short rule per class.

A rule gets the parameter that takes a tensor and the tensor's whole shape, and returns this rank's box with the view
of the parameter, in the shape of the box; None if one box is not enough. Parameters are in their state before vLLM
processes them after loading.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from cosmos_rl_llm.engines.vllm.weight_map.names import Target, VllmNames
from cosmos_rl_llm.engines.vllm.weight_map.region import LandingRegion
from cosmos_rl_transfer import Box, whole_box

Shape = tuple[int, ...]
Rule = Callable[[Any, Target, Shape], tuple[Box, Tensor] | None]

_PLAIN_PARAMETERS = ("Parameter", "ModelWeightParameter")
"""Classes of parameters with the checkpoint's values; scales and packed ones are traced."""
_LOADERS = ("weight_loader", "weight_loader_v2", "load_weights")


def cut(shape: Shape, dim: int, start: int, size: int) -> Box:
    """Return the box with `size` indices of one dim and all of the others."""
    offset, sizes = [0] * len(shape), list(shape)
    offset[dim], sizes[dim] = start, size
    return Box(tuple(offset), tuple(sizes))


def replicated(layer: Any, target: Target, shape: Shape) -> tuple[Box, Tensor] | None:
    """Every rank has all of it."""
    tensor = target.tensor
    return (whole_box(shape), tensor) if tuple(tensor.shape) == shape else None


def column(layer: Any, target: Target, shape: Shape) -> tuple[Box, Tensor] | None:
    """Rows are sharded over the ranks."""
    tensor = target.tensor
    rows = tensor.shape[0]
    return (cut(shape, 0, layer.tp_rank * rows, rows), tensor) if shape[0] == rows * layer.tp_size else None


def merged_column(layer: Any, target: Target, shape: Shape) -> tuple[Box, Tensor] | None:
    """Several matrices stacked in rows, each sharded over the ranks."""
    if not isinstance(target.shard, int):
        return replicated(layer, target, shape) if layer.tp_size == 1 and target.shard is None else None
    rows = [size // layer.tp_size for size in layer.output_sizes]
    size = rows[target.shard]
    if shape[0] != layer.output_sizes[target.shard]:
        return None
    return cut(shape, 0, layer.tp_rank * size, size), target.tensor.narrow(0, sum(rows[: target.shard]), size)


def qkv(layer: Any, target: Target, shape: Shape) -> tuple[Box, Tensor] | None:
    """Queries, keys and values stacked in rows, sharded by heads; ranks share a key head when there are few."""
    if not isinstance(target.shard, str):
        return replicated(layer, target, shape) if layer.tp_size == 1 else None
    q, k = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    start, size = {"q": (0, q), "k": (q, k), "v": (q + k, layer.num_kv_heads * layer.v_head_size)}[target.shard]
    part = layer.tp_rank if target.shard == "q" else layer.tp_rank // layer.num_kv_head_replicas
    parts = layer.tp_size if target.shard == "q" else layer.tp_size // layer.num_kv_head_replicas
    if shape[0] != parts * size:
        return None
    return cut(shape, 0, part * size, size), target.tensor.narrow(0, start, size)


def row(layer: Any, target: Target, shape: Shape) -> tuple[Box, Tensor] | None:
    """Columns are sharded over the ranks; the bias is not."""
    tensor = target.tensor
    if tensor.ndim == 1:
        return replicated(layer, target, shape)
    columns = tensor.shape[1]
    return (cut(shape, 1, layer.tp_rank * columns, columns), tensor) if shape[1] == columns * layer.tp_size else None


def vocabulary(layer: Any, target: Target, shape: Shape) -> tuple[Box, Tensor] | None:
    """Rows are padded, then sharded over the ranks; the last ranks may have only padding."""
    start, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
    if shape[0] != layer.org_vocab_size:
        return None
    return cut(shape, 0, start, end - start), target.tensor[: end - start]


def heads(layer: Any, target: Target, shape: Shape) -> tuple[Box, Tensor] | None:
    """One value per query head."""
    tensor = target.tensor
    size = tensor.shape[0]
    return cut(shape, 0, layer.qkv_proj.tp_rank * size, size), tensor


def experts(layer: Any, target: Target, shape: Shape) -> tuple[Box, Tensor] | None:
    """One matrix (or bias) of one expert: gate (w1) over up (w3) in w13, down in w2; the expert's width is sharded."""
    if target.expert is None or layer.moe_config.tp_shard_with_padding or not layer.moe_config.is_act_and_mul:
        return None
    local = layer.expert_map_manager.map_global_to_local(target.expert)
    if local < 0:
        return Box((0,) * len(shape), (0,) * len(shape)), target.tensor[0].new_empty((0,) * len(shape))
    view = target.tensor[local]
    if target.shard != "w2":
        half = view.shape[0] // 2
        view = view.narrow(0, 0 if target.shard == "w1" else half, half)
    elif view.ndim == 1:
        return (whole_box(shape), view) if tuple(view.shape) == shape else None
    return _cut_expert(layer, view, shape, dim=1 if target.shard == "w2" else 0)


def stacked_experts(layer: Any, target: Target, shape: Shape) -> tuple[Box, Tensor] | None:
    """All experts in one tensor as in gpt-oss: input before output, gate and up interleaved, biases.

    w13 [E, H, 2I], w2 [E, I, H]. Only the first rank adds the down projection's bias.
    """
    tensor = target.tensor
    if tensor.ndim == 3:
        tensor = tensor.transpose(1, 2)
    first = layer.moe_config.ep_rank * tensor.shape[0] if layer.use_ep else 0
    offset, sizes = [first, *[0] * (len(shape) - 1)], list(tensor.shape)
    if not layer.use_ep and target.attribute == "w2_bias":
        if layer.moe_config.tp_rank > 0:
            return Box((0,) * len(shape), (0,) * len(shape)), tensor.new_empty((0,) * len(shape))
    elif not layer.use_ep:
        dim = 1 if target.attribute == "w2_weight" else len(shape) - 1
        offset[dim] = layer.moe_config.tp_rank * sizes[dim]
    box = Box(tuple(offset), tuple(sizes))
    return (box, tensor) if whole_box(shape).contains(box) else None


def _cut_expert(layer: Any, view: Tensor, shape: Shape, *, dim: int) -> tuple[Box, Tensor] | None:
    """Shard along the expert's width; the parameter may be padded beyond it and beyond the model's width."""
    ranks = layer.moe_config.moe_parallel_config.tp_size
    if shape[dim] % ranks:
        return None
    size = shape[dim] // ranks
    box = cut(shape, dim, layer.moe_config.tp_rank * size, size)
    return box, view[tuple(slice(0, n) for n in box.shape)]


TABLE: dict[str, Rule] = {
    "ReplicatedLinear": replicated,
    "ColumnParallelLinear": column,
    "MergedColumnParallelLinear": merged_column,
    "QKVParallelLinear": qkv,
    "RowParallelLinear": row,
    "VocabParallelEmbedding": vocabulary,
    "ParallelLMHead": vocabulary,
    "RoutedExperts": experts,
    "GptOssRoutedExperts": stacked_experts,
    "OAIAttention": heads,  # gpt-oss's sinks
}
"""By class name; subclasses with their base's loader use its rule."""


def place(names: VllmNames, name: str, shape: Shape) -> list[LandingRegion] | None:
    """Return a tensor's places: one per copy, empty if it does not land on this rank, None if unknown."""
    targets = names(name)
    if targets is None:
        return None
    places = []
    for target in targets:
        landed = _apply(target, shape)
        if landed is None:
            return None
        box, view = landed
        if target.expert is None or box.numel:
            places.append(LandingRegion.of(name, box, parameter=target.parameter, tensor=target.tensor, view=view))
    return places


def _apply(target: Target, shape: Shape) -> tuple[Box, Tensor] | None:
    rule = rule_of(target)
    if rule is None:
        return None
    landed = rule(target.layer, target, shape)
    if landed is None or landed[0].numel == 0:
        return landed
    box, view = landed
    return landed if whole_box(shape).contains(box) and tuple(view.shape) == box.shape else None


def rule_of(target: Target) -> Rule | None:
    """Return the rule of a parameter; None for a class not in the table or a loader that is not its class's."""
    parameter = target.layer.get_parameter(target.attribute)
    if type(parameter).__name__ not in _PLAIN_PARAMETERS:
        return None
    kinds = type(target.layer).__mro__
    known = next((i for i, kind in enumerate(kinds) if kind.__name__ in TABLE), None)
    loader = getattr(parameter, "weight_loader", None)
    is_default = loader is None or loader.__name__ == "default_weight_loader"
    if known is None:
        return replicated if is_default else None
    if any(name in vars(kind) for kind in kinds[:known] for name in _LOADERS):
        return None
    if loader is not None and not is_default and not _is_bound(loader, target.layer):
        return None
    return TABLE[kinds[known].__name__]


def _is_bound(loader: Callable[..., object], layer: nn.Module) -> bool:
    """Whether a loader is a (possibly wrapped) method of the layer."""
    return getattr(inspect.unwrap(loader), "__self__", None) is layer
