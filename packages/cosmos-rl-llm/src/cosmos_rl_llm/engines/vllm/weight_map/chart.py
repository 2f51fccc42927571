"""The places of all tensors of a checkpoint in a model, by the table and the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.vllm.weight_map.names import Names
from cosmos_rl_llm.engines.vllm.weight_map.place import Place
from cosmos_rl_llm.engines.vllm.weight_map.replay import is_repeatable, lands
from cosmos_rl_llm.engines.vllm.weight_map.table import place
from cosmos_rl_llm.engines.vllm.weight_map.trace import Trace, touched, trace
from cosmos_rl_transfer import Box, TensorLayout, whole_box

_FLOATS = ("float64", "float32", "bfloat16", "float16")
"""What may be cast into one another without a scale."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Where the tensors of a checkpoint land in one rank's model, as it is before vLLM processes its parameters."""

    specs: dict[str, WeightSpec]
    """By checkpoint name, in the checkpoint's order. The dtype is that of the parameter, or of the checkpoint where
    the tensor lands in none."""
    places: dict[str, tuple[Place, ...]]
    """Several for experts held more than once, and for tensors whose parts lie apart; none for tensors of other ranks.
    Without the computed and the refused."""
    computed: dict[str, tuple[str, ...]]
    """By tensor, the parameters that the loader computes from it: it is delivered whole, and the loader given it."""
    refused: dict[str, str]
    """Why it is not known where a tensor lands: it must be delivered whole, and the loader given all tensors."""
    strides: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Shape and strides of each parameter and buffer."""
    aliases: dict[str, str]
    """Buffers that are views of a parameter, and of which: what is written to the one must be seen in the other."""

    def box(self, name: str) -> Box | None:
        """Return the least box with all that this rank needs of a tensor; None if it needs nothing of it."""
        if name in self.refused or name in self.computed:
            return whole_box(self.specs[name].shape)
        boxes = [found.box for found in self.places[name] if found.box.numel]
        if not boxes:
            return None
        offset = tuple(map(min, *(box.offset for box in boxes))) if len(boxes) > 1 else boxes[0].offset
        end = tuple(map(max, *(box.end for box in boxes))) if len(boxes) > 1 else boxes[0].end
        return Box(offset, tuple(high - low for low, high in zip(offset, end)))

    def is_scattered(self, name: str) -> bool:
        """Say whether parts of a tensor that are no box together land apart."""
        return any(found.box != self.box(name) for found in self.places.get(name, ()) if found.box.numel)

    def layouts(self, rank: int) -> tuple[TensorLayout, ...]:
        """Return what this rank needs, as the layouts of a manifest."""
        boxes = {name: self.box(name) for name in self.specs}
        return tuple(
            TensorLayout(spec, {rank: box} if (box := boxes[name]) else {}) for name, spec in self.specs.items()
        )


def chart_of(model: nn.Module, specs: Sequence[WeightSpec]) -> Chart:
    """Find the places of all tensors in a `twin`, whose parameters nobody has processed.

    The rules of the table and the model's own loader are both asked. Where they differ, the loader decides once it has
    shown on values that the places are right (`replay`). Must run under the parallel state the model was built in.
    Raises ValueError for tensors that need scales the checkpoint lacks, where neither answer is right, and for a loader
    that keeps what it computes out of parameters.
    """
    names, traced = Names(model), trace(model, specs)
    if traced.read:
        raise ValueError(
            f"the loader of {type(model).__name__} computes from {min(traced.read)} what new weights would not reach; "
            'set rollout.engine = "torch"'
        )
    places: dict[str, tuple[Place, ...]] = {}
    for spec in specs:
        by_rule, by_loader = place(names, spec.name, spec.shape), traced.places.get(spec.name)
        if by_loader is not None:
            agreed = by_rule is None or set(by_rule) == set(by_loader)
            places[spec.name] = tuple(by_loader if agreed else _decided(model, spec, by_rule or (), by_loader))
    computed, refused = _computed(model, specs, places, traced)
    places = {name: found for name, found in places.items() if name not in computed}
    tensors = dict(model.named_buffers()) | dict(model.named_parameters())
    known = {}
    for spec in specs:
        for parameter in computed.get(spec.name, ()):
            _landed(spec, tensors[parameter].dtype)
        found = places.get(spec.name)
        known[spec.name] = _landed(spec, tensors[found[0].parameter].dtype) if found else spec
    strides = {name: (tuple(t.shape), t.stride()) for name, t in tensors.items()}
    return Chart(known, places, computed, refused, strides, _aliases(model))


def _aliases(model: nn.Module) -> dict[str, str]:
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in model.named_parameters()}
    storages = {name: buffer.untyped_storage()._cdata for name, buffer in model.named_buffers()}
    return {name: owners[storage] for name, storage in storages.items() if storage in owners}


def _decided(
    model: nn.Module, spec: WeightSpec, by_rule: Sequence[Place], by_loader: Sequence[Place]
) -> Sequence[Place]:
    """Return the places that the loader fills when it runs on values."""
    watched = (*by_rule, *by_loader)
    for found in (by_loader, by_rule):
        if lands(model, spec, found, beside=watched):
            return found
    where = ", ".join(sorted({place.parameter for place in watched}))
    raise ValueError(
        f"{spec.name} cannot be delivered: the loader of {type(model).__name__} does not put it where its layer "
        f'expects it ({where}), and where it lands could not be found out; set rollout.engine = "torch"'
    )


def _computed(
    model: nn.Module, specs: Sequence[WeightSpec], places: Mapping[str, Sequence[Place]], traced: Trace
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the tensors that the loader may be given alone at any time, with what it computes, and the refused.

    A tensor that lands beside a computed one, as values beside reordered queries, goes with it.
    """
    if not traced.computed:
        return {}, traced.refused
    parameters = {parameter for found in traced.computed.values() for parameter in found}
    beside = {name: tuple(sorted({place.parameter for place in found})) for name, found in places.items()}
    computed = traced.computed | {name: found for name, found in beside.items() if not parameters.isdisjoint(found)}
    chosen = [spec for spec in specs if spec.name in computed]
    if all(is_repeatable(model, *group) for group in _groups(chosen, computed)) and touched(model, chosen) == {
        parameter for found in computed.values() for parameter in found
    }:
        return computed, traced.refused
    why = "the loader computes it, and not from the tensors that land in it alone"
    return {}, traced.refused | {name: f"{', '.join(found)}: {why}" for name, found in traced.computed.items()}


def _groups(
    specs: Sequence[WeightSpec], computed: Mapping[str, Sequence[str]]
) -> list[tuple[list[WeightSpec], set[str]]]:
    """Return the least groups of tensors that share no parameter, with their parameters: values are proven by group."""
    groups: list[tuple[list[WeightSpec], set[str]]] = []
    for spec in specs:
        members, parameters = [spec], set(computed[spec.name])
        joined = [group for group in groups if not parameters.isdisjoint(group[1])]
        for others, theirs in joined:
            members, parameters = others + members, parameters | theirs
        groups = [group for group in groups if group not in joined] + [(members, parameters)]
    return groups


def _landed(spec: WeightSpec, dtype: torch.dtype) -> WeightSpec:
    """Return the spec with the dtype of the parameter the tensor lands in."""
    name = str(dtype).removeprefix("torch.")
    if name != spec.dtype and not (name in _FLOATS and spec.dtype in _FLOATS):
        raise ValueError(
            f"{spec.name} is {spec.dtype} at the trainer and {name} in the engine: publish quantised weights with "
            "their scales, or let the engine quantise a checkpoint that is not"
        )
    return WeightSpec(name=spec.name, shape=spec.shape, dtype=name)
