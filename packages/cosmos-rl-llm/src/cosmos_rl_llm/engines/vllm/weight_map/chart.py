"""Maps all tensors of a checkpoint to places in a model, by the table and the trace.

The result is verified for a few tensors by running the model's own loader on values. A twin has no memory: only the
parameters under test get memory while the loader runs.

lands           load numbers; the places must have the same values as the parameters filled by the loader
is_repeatable   the result must not depend on the parameters' previous values
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.vllm.weight_map.names import VllmNames
from cosmos_rl_llm.engines.vllm.weight_map.region import LandingRegion
from cosmos_rl_llm.engines.vllm.weight_map.table import place
from cosmos_rl_llm.engines.vllm.weight_map.trace import LOADER_ERRORS, Trace, touched, trace
from cosmos_rl_transfer import Box, TensorLayout, whole_box

_EXACT = {
    "float64": 1 << 24, "float32": 1 << 24, "bfloat16": 256, "float16": 2048, "float8_e4m3fn": 16, "float8_e5m2": 8,
    "int64": 1 << 24, "int32": 1 << 24, "int16": 1 << 15, "int8": 128, "uint8": 256,
}  # fmt: skip
"""Integers below these survive any cast between the dtypes."""


def lands(
    model: nn.Module, spec: WeightSpec, places: Sequence[LandingRegion], *, beside: Sequence[LandingRegion] = ()
) -> bool:
    """Whether `load_weights` with only this tensor fills the places with their boxes and leaves the rest zero.

    beside: other places to check, where nothing may land.
    """
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    names = {place.parameter for place in (*places, *beside)}
    dtypes = {str(before[name].dtype).removeprefix("torch.") for name in names} | {spec.dtype}
    if not dtypes <= _EXACT.keys():
        return False
    limit = min(_EXACT[dtype] for dtype in dtypes)
    numbers = torch.randint(1, limit, spec.shape, generator=torch.Generator().manual_seed(0))
    tensor = numbers.to(getattr(torch, spec.dtype))
    loaded = _loaded(model, {spec.name: tensor}, names, fill=0)
    if loaded is None:
        return False
    expected = {name: torch.zeros_like(value) for name, value in loaded.items()}
    for at in places:
        at.view(expected[at.parameter]).copy_(tensor[at.box.slices()])
    return all(_same(loaded[name], expected[name]) for name in names)


def is_repeatable(model: nn.Module, specs: Sequence[WeightSpec], parameters: set[str]) -> bool:
    """Whether `load_weights` with only these tensors sets all elements of the parameters, and nothing else.

    If so, it may be called with new values at any time, on a serving model.
    """
    if touched(model, specs) != parameters:
        return False
    generator = torch.Generator().manual_seed(0)
    tensors = {spec.name: torch.rand(spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for spec in specs}
    first, second = (_loaded(model, tensors, parameters, fill=fill) for fill in (1, 2))
    return first is not None and second is not None and all(_same(first[name], second[name]) for name in parameters)


def _loaded(model: nn.Module, tensors: Mapping[str, Tensor], names: set[str], *, fill: int) -> dict[str, Tensor] | None:
    """Return the named parameters after loading, initialised with `fill`; None if the loader fails."""
    loader: Any = model
    with torch.no_grad(), _memory(model, names, fill=fill):
        try:
            loader.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
        except LOADER_ERRORS:
            return None
        after = dict(model.named_parameters()) | dict(model.named_buffers())
        return {name: after[name].detach() for name in names}


@contextmanager
def _memory(model: nn.Module, names: set[str], *, fill: int) -> Iterator[None]:
    """Allocate the named parameters and buffers in all modules that have them."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    allocated = {id(tensors[name]): _filled(tensors[name], fill) for name in names}
    slots = [
        (own, name, tensor)
        for layer in model.modules()
        for own in (cast(dict[str, Any], layer._parameters), cast(dict[str, Any], layer._buffers))
        for name, tensor in own.items()
        if id(tensor) in allocated
    ]
    try:
        for own, name, tensor in slots:
            own[name] = allocated[id(tensor)]
        yield
    finally:
        for own, name, tensor in slots:
            own[name] = tensor


def _filled(tensor: Tensor, fill: int) -> Tensor:
    """Return an allocated tensor of the same class with the same attributes: loaders check both."""
    filled: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").fill_(fill)
    filled.__class__ = type(tensor)
    filled.__dict__.update(vars(tensor))
    return filled


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


_FLOATS = ("float64", "float32", "bfloat16", "float16")
"""Dtypes that can be cast into one another without a scale."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Map of a checkpoint's tensors to one rank's model, before vLLM processes its parameters."""

    specs: dict[str, WeightSpec]
    """Specs by checkpoint name, in the checkpoint's order. The dtype is that of the parameter, or of the checkpoint if
    the tensor lands in none."""
    places: dict[str, tuple[LandingRegion, ...]]
    """Places by tensor: several for replicated experts and for tensors with separate parts; none for tensors of other
    ranks. Excludes computed and refused tensors."""
    computed: dict[str, tuple[str, ...]]
    """By tensor, the parameters that the loader computes from it: it is delivered whole and passed to the loader."""
    refused: dict[str, str]
    """By tensor, why its place is unknown: it must be delivered whole, and all tensors passed to the loader."""
    strides: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Shape and strides of each parameter and buffer."""
    aliases: dict[str, str]
    """Buffer -> the parameter of which it is a view: a write to one must be visible in the other."""

    def box(self, name: str) -> Box | None:
        """Return the smallest box of a tensor with all elements that this rank needs; None if it needs none."""
        if name in self.refused or name in self.computed:
            return whole_box(self.specs[name].shape)
        boxes = [place.box for place in self.places[name] if place.box.numel]
        if not boxes:
            return None
        offset = tuple(map(min, *(box.offset for box in boxes))) if len(boxes) > 1 else boxes[0].offset
        end = tuple(map(max, *(box.end for box in boxes))) if len(boxes) > 1 else boxes[0].end
        return Box(offset, tuple(high - low for low, high in zip(offset, end)))

    def is_scattered(self, name: str) -> bool:
        """Whether parts of a tensor land separately and do not form a box."""
        return any(place.box != self.box(name) for place in self.places.get(name, ()) if place.box.numel)

    def layouts(self, rank: int) -> tuple[TensorLayout, ...]:
        """Return this rank's parts as the layouts of a manifest."""
        boxes = {name: self.box(name) for name in self.specs}
        return tuple(
            TensorLayout(spec, {rank: box} if (box := boxes[name]) else {}) for name, spec in self.specs.items()
        )


def chart_of(model: nn.Module, specs: Sequence[WeightSpec]) -> Chart:
    """Find the places of all tensors in a `twin`, before vLLM processes its parameters.

    Uses the rules of the table and the model's own loader. If they differ, the loader decides, after a run on values
    has confirmed the places (`replay`). Must run under the parallel state in which the model was built.
    Raises ValueError for tensors that need scales the checkpoint lacks, if neither result is right, and for a loader
    that stores computed values outside of parameters.
    """
    names, traced = VllmNames(model), trace(model, specs)
    if traced.read:
        raise ValueError(
            f"the loader of {type(model).__name__} computes values from {min(traced.read)}, "
            'which new weights would not update; set rollout.engine = "torch"'
        )
    places: dict[str, tuple[LandingRegion, ...]] = {}
    for spec in specs:
        by_rule, by_loader = place(names, spec.name, spec.shape), traced.places.get(spec.name)
        if by_loader is not None:
            agreed = by_rule is None or set(by_rule) == set(by_loader)
            places[spec.name] = tuple(by_loader if agreed else _decided(model, spec, by_rule or (), by_loader))
    computed, refused = _computed(model, specs, places, traced)
    places = {name: regions for name, regions in places.items() if name not in computed}
    tensors = dict(model.named_buffers()) | dict(model.named_parameters())
    known = {}
    for spec in specs:
        for parameter in computed.get(spec.name, ()):
            _landed(spec, tensors[parameter].dtype)
        regions = places.get(spec.name)
        known[spec.name] = _landed(spec, tensors[regions[0].parameter].dtype) if regions else spec
    strides = {name: (tuple(t.shape), t.stride()) for name, t in tensors.items()}
    return Chart(known, places, computed, refused, strides, _aliases(model))


def _aliases(model: nn.Module) -> dict[str, str]:
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in model.named_parameters()}
    storages = {name: buffer.untyped_storage()._cdata for name, buffer in model.named_buffers()}
    return {name: owners[storage] for name, storage in storages.items() if storage in owners}


def _decided(
    model: nn.Module, spec: WeightSpec, by_rule: Sequence[LandingRegion], by_loader: Sequence[LandingRegion]
) -> Sequence[LandingRegion]:
    """Return the places that the loader fills in a run on values."""
    watched = (*by_rule, *by_loader)
    for regions in (by_loader, by_rule):
        if lands(model, spec, regions, beside=watched):
            return regions
    where = ", ".join(sorted({place.parameter for place in watched}))
    raise ValueError(
        f"{spec.name} cannot be delivered: the loader of {type(model).__name__} does not write it to the expected "
        f'place of its layer ({where}), and its actual place is unknown; set rollout.engine = "torch"'
    )


def _computed(
    model: nn.Module, specs: Sequence[WeightSpec], places: Mapping[str, Sequence[LandingRegion]], traced: Trace
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the tensors that can be loaded alone at any time, with their computed parameters, and the refused ones.

    A tensor in the same parameter as a computed one, such as values next to reordered queries, is passed with it.
    """
    if not traced.computed:
        return {}, traced.refused
    parameters = {parameter for owners in traced.computed.values() for parameter in owners}
    beside = {name: tuple(sorted({place.parameter for place in regions})) for name, regions in places.items()}
    computed = traced.computed | {name: owners for name, owners in beside.items() if not parameters.isdisjoint(owners)}
    chosen = [spec for spec in specs if spec.name in computed]
    if all(is_repeatable(model, *group) for group in _groups(chosen, computed)) and touched(model, chosen) == {
        parameter for owners in computed.values() for parameter in owners
    }:
        return computed, traced.refused
    why = "the loader computes it, and not from the tensors that land in it alone"
    return {}, traced.refused | {name: f"{', '.join(owners)}: {why}" for name, owners in traced.computed.items()}


def _groups(
    specs: Sequence[WeightSpec], computed: Mapping[str, Sequence[str]]
) -> list[tuple[list[WeightSpec], set[str]]]:
    """Return the smallest groups of tensors that share no parameter, with their parameters: checked group by group."""
    groups: list[tuple[list[WeightSpec], set[str]]] = []
    for spec in specs:
        members, parameters = [spec], set(computed[spec.name])
        joined = [group for group in groups if not parameters.isdisjoint(group[1])]
        for others, theirs in joined:
            members, parameters = others + members, parameters | theirs
        groups = [group for group in groups if group not in joined] + [(members, parameters)]
    return groups


def _landed(spec: WeightSpec, dtype: torch.dtype) -> WeightSpec:
    """Return the spec with the dtype of the tensor's parameter."""
    name = str(dtype).removeprefix("torch.")
    if name != spec.dtype and not (name in _FLOATS and spec.dtype in _FLOATS):
        raise ValueError(
            f"{spec.name} is {spec.dtype} in the trainer and {name} in the engine: publish quantised weights with "
            "their scales, or let the engine quantise an unquantised checkpoint"
        )
    return WeightSpec(name=spec.name, shape=spec.shape, dtype=name)
