"""Runs a model's own loader on values, to verify the result of the table or the trace for a few tensors.

A twin has no memory: only the parameters under test get memory while the loader runs.

lands           load numbers; the places must have the same values as the parameters filled by the loader
is_repeatable   the result must not depend on the parameters' previous values
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.vllm.weight_map.place import Place
from cosmos_rl_llm.engines.vllm.weight_map.trace import LOADER_ERRORS, touched

_EXACT = {
    "float64": 1 << 24, "float32": 1 << 24, "bfloat16": 256, "float16": 2048, "float8_e4m3fn": 16, "float8_e5m2": 8,
    "int64": 1 << 24, "int32": 1 << 24, "int16": 1 << 15, "int8": 128, "uint8": 256,
}  # fmt: skip
"""Integers below these survive any cast between the dtypes."""


def lands(model: nn.Module, spec: WeightSpec, places: Sequence[Place], *, beside: Sequence[Place] = ()) -> bool:
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
    found = _loaded(model, {spec.name: tensor}, names, fill=0)
    if found is None:
        return False
    expected = {name: torch.zeros_like(value) for name, value in found.items()}
    for place in places:
        place.view(expected[place.parameter]).copy_(tensor[place.box.slices()])
    return all(_same(found[name], expected[name]) for name in names)


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
    made = {id(tensors[name]): _filled(tensors[name], fill) for name in names}
    held = [
        (own, name, tensor)
        for layer in model.modules()
        for own in (cast(dict[str, Any], layer._parameters), cast(dict[str, Any], layer._buffers))
        for name, tensor in own.items()
        if id(tensor) in made
    ]
    try:
        for own, name, tensor in held:
            own[name] = made[id(tensor)]
        yield
    finally:
        for own, name, tensor in held:
            own[name] = tensor


def _filled(tensor: Tensor, fill: int) -> Tensor:
    """Return an allocated tensor of the same class with the same attributes: loaders check both."""
    made: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").fill_(fill)
    made.__class__ = type(tensor)
    made.__dict__.update(vars(tensor))
    return made


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
