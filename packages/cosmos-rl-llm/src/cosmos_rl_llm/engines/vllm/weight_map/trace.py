"""Traces a model's own `load_weights` on tensors without data, to find the places of checkpoint tensors.

    TracedTensor   views of it are views of a meta tensor, whose strides identify the elements of the checkpoint
    a copy_ into a parameter of the model is a landing: from a strided part of the tensor to one of the parameter
    arithmetic on one tensor, or on a parameter that contains it, makes the parameter a computed one (see `replay`)
    for any other use of values (item, cat with other tensors) the tensor is refused

Run it on a model without memory (`twin`): loaders also write padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.vllm.weight_map.region import LandingRegion, Region, join

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default)
_CONSTANTS = (_aten.fill_.Scalar, _aten.zero_.default)
LOADER_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that a loader raises for a traced tensor."""


class Untraceable(RuntimeError):
    """A loader needs values."""


class TracedTensor(torch.Tensor):
    """A part of a checkpoint tensor, without data."""

    tensor_name: str
    source: Tensor
    """Meta view of the whole tensor: storage offset, shape and strides are in elements of the checkpoint's tensor."""
    is_blank: bool
    """Whether the loader overwrote it with zeros."""
    is_computed: bool
    """Whether it is the result of arithmetic instead of elements of the tensor."""

    @staticmethod
    def __new__(
        cls: type[TracedTensor],
        name: str,
        source: Tensor,
        *,
        dtype: torch.dtype,
        is_blank: bool = False,
        is_computed: bool = False,
    ) -> TracedTensor:
        traced = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, strides=source.stride(), storage_offset=source.storage_offset(), dtype=dtype
        )
        traced.tensor_name, traced.source, traced.is_blank, traced.is_computed = name, source, is_blank, is_computed
        return traced

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__()

    def _like(self, source: Tensor, dtype: torch.dtype | None = None) -> TracedTensor:
        return TracedTensor(
            self.tensor_name,
            source,
            dtype=dtype or self.dtype,
            is_blank=self.is_blank,
            is_computed=self.is_computed,
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traced = args[0]
        if isinstance(traced, TracedTensor):
            if func in _CONSTANTS and args[1:] in ((), (0,)) and _is_whole(traced):
                traced.is_blank = True
                return traced
            if func in _COPIES:
                return traced._like(traced.source, kwargs.get("dtype"))
            if func.is_view and func is not _aten.view.dtype:
                result = func(traced.source, *args[1:], **kwargs)
                return [traced._like(view) for view in result] if isinstance(result, list) else traced._like(result)
        return _computed(func, args, kwargs)


def _is_whole(traced: TracedTensor) -> bool:
    """Whether it is a whole tensor: writes to it do not propagate to earlier views."""
    return traced.source.numel() * traced.source.itemsize == traced.source.untyped_storage().nbytes()


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of arithmetic on one traced tensor. Raises Untraceable for several, and if it needs values."""
    traced = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TracedTensor)]
    names = {one.tensor_name for one in traced}
    if func._schema.is_mutable or len(names) > 1 or any(one.is_blank for one in traced):
        raise Untraceable(f"{func} reads values")
    args, kwargs = tree_map_only(Tensor, _shape_of, (args, kwargs))
    try:
        result = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise Untraceable(f"{func} reads values") from error
    if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
        raise Untraceable(f"{func} reads values")
    (name,) = names
    return tree_map_only(Tensor, lambda leaf: TracedTensor(name, leaf, dtype=leaf.dtype, is_computed=True), result)


def _shape_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of this shape without data: a traced one has the strides of the checkpoint."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _Recorder(TorchDispatchMode):
    """Intercepts every operation of a loader and records the copies into parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._owners = {t.untyped_storage()._cdata: (name, t) for name, t in reversed(tensors)}
        self.regions: dict[tuple[str, str], list[Region]] = {}
        """Regions by tensor and parameter."""
        self.blank: set[tuple[str, str]] = set()
        """(tensor, parameter) for which zeros were copied instead."""
        self.computed: set[str] = set()
        """Parameters with other values than those of the checkpoint."""
        self.outcomes: set[tuple[str, str]] = set()
        """(tensor, parameter): values computed from the tensor were copied to the parameter."""
        self.read: set[str] = set()
        """Parameters from which values were computed."""
        self.lost: set[str] = set()
        """Tensors copied to a destination that is not a parameter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and isinstance(args[1], TracedTensor):
            self._landed(args[0], args[1])
            return args[0]
        if not func.is_view:
            self._computes(func, args, kwargs)
        return func(*args, **kwargs)

    def pending(self, names: Iterable[str]) -> list[str]:
        """Return the tensors that have not landed so far."""
        landed = {name for name, _ in (*self.regions, *self.outcomes, *self.blank)}
        return [name for name in names if name not in landed]

    def _owner(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        if isinstance(tensor, TracedTensor):
            return None
        return self._owners.get(tensor.untyped_storage()._cdata)

    def _computes(self, func: Any, args: Any, kwargs: Any) -> None:
        written = args[0] if func._schema.is_mutable else None
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and (owner := self._owner(tensor)) is not None:
                if tensor is not written:
                    self.read.add(owner[0])
                elif func not in _CONSTANTS:
                    self.computed.add(owner[0])

    def _landed(self, destination: Tensor, part: TracedTensor) -> None:
        owner = self._owner(destination)
        if owner is None:
            self.lost.add(part.tensor_name)
        elif part.is_computed:
            self.outcomes.add((part.tensor_name, owner[0]))
        elif part.is_blank:
            self.blank.add((part.tensor_name, owner[0]))
        elif destination.numel():
            start = int(destination.storage_offset()) - int(owner[1].storage_offset())
            region = Region.between(part.source.expand(destination.shape), destination, start=start)
            self.regions.setdefault((part.tensor_name, owner[0]), []).append(region)


@dataclass(slots=True)
class Trace:
    """Result of a loader's run: the places of a checkpoint's tensors."""

    places: dict[str, list[LandingRegion]] = field(default_factory=dict)
    """Places by checkpoint name; empty if the loader ignored the tensor."""
    computed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By checkpoint name, the parameters that the loader computes with the tensor, and others to which it copies it."""
    refused: dict[str, str] = field(default_factory=dict)
    """By tensor, why its landing cannot be expressed as views of parameters."""
    read: set[str] = field(default_factory=set)
    """Parameters from which the loader computes values stored elsewhere."""


def trace(model: nn.Module, specs: Sequence[WeightSpec]) -> Trace:
    """Run `model.load_weights` on tensors without data and return their places.

    `specs` are in the checkpoint's order. Must run under the parallel state in which the model was built.
    """
    recorder = _Recorder(model)
    shapes = {spec.name: spec.shape for spec in specs}
    outcome = Trace({name: [] for name in shapes})
    with torch.no_grad(), recorder:
        for name, error in _load(cast(Any, model), specs):
            for failed in recorder.pending(shapes) if name is None else [name]:
                outcome.refused[failed] = f"{type(error).__name__}: {error}"
    outcome.read = (recorder.read - recorder.computed) & {parameter for _, parameter in recorder.regions}
    for name in recorder.lost:
        outcome.refused.setdefault(name, "the loader stores it outside the model's parameters")
    by_arithmetic = {name for name, parameter in recorder.regions if parameter in recorder.computed}
    by_arithmetic |= {name for name, _ in recorder.outcomes}
    for name in by_arithmetic:
        touched = {owner for tensor, owner in (*recorder.regions, *recorder.outcomes) if tensor == name}
        outcome.computed[name] = tuple(sorted(touched))
    for (name, parameter), regions in recorder.regions.items():
        boxes = None if name in by_arithmetic else join(regions, shapes[name])
        if boxes is not None:
            outcome.places[name] += [
                LandingRegion(name, box, parameter, strides, start) for box, strides, start in boxes
            ]
        elif name not in by_arithmetic:
            outcome.refused.setdefault(name, f"{parameter}: its parts are not boxes")
    for name, parameter in recorder.blank:
        outcome.places[name].append(LandingRegion.nothing(name, parameter, ndim=len(shapes[name])))
    for name in outcome.refused:
        outcome.computed.pop(name, None)
    for name in (*outcome.refused, *outcome.computed):
        del outcome.places[name]
    return outcome


def touched(model: nn.Module, specs: Sequence[WeightSpec]) -> set[str] | None:
    """Return the parameters and buffers that `load_weights` changes with these tensors alone; None if it fails."""
    recorder = _Recorder(model)
    with torch.no_grad(), recorder:
        if any(True for _ in _load(cast(Any, model), specs)) or recorder.lost:
            return None
    return recorder.computed | {owner for _, owner in (*recorder.regions, *recorder.outcomes, *recorder.blank)}


def _load(model: Any, specs: Sequence[WeightSpec]) -> Iterator[tuple[str | None, Exception]]:
    """Load all tensors, continuing after each that raises; yield its name, or None for an error after the last."""
    rest = list(specs)
    while rest:
        feed = _Feed(rest)
        try:
            model.load_weights(iter(feed))
            return
        except LOADER_ERRORS as error:
            yield (None if feed.is_done else rest[feed.taken - 1].name), error
        rest = [] if feed.is_done else rest[feed.taken :]


class _Feed:
    """Iterates over tensors without data, and records a loader's progress."""

    def __init__(self, specs: Sequence[WeightSpec]) -> None:
        self._specs = specs
        self.taken = 0
        self.is_done = False
        """Whether the loader has consumed all tensors."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for spec in self._specs:
            self.taken += 1
            source = torch.empty(spec.shape, device="meta")
            yield spec.name, TracedTensor(spec.name, source, dtype=getattr(torch, spec.dtype))
        self.is_done = True
