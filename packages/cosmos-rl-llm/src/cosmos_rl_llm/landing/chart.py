"""The places of all tensors of a checkpoint in a model, by the table, the trace or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.landing.names import Names
from cosmos_rl_llm.landing.place import Place
from cosmos_rl_llm.landing.table import place
from cosmos_rl_llm.landing.trace import trace
from cosmos_rl_transfer.layout.manifest import Box, TensorLayout, whole_box

How = Literal["table", "traced"]

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
    Without the refused."""
    refused: dict[str, str]
    """Why a tensor's landing cannot be said as a view of a parameter: it must be delivered whole."""
    strides: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Shape and strides of each parameter and buffer."""

    def box(self, name: str) -> Box | None:
        """Return the least box with all that this rank needs of a tensor; None if it needs nothing of it."""
        if name in self.refused:
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


def chart_of(model: nn.Module, specs: Sequence[WeightSpec], *, how: How = "table") -> Chart:
    """Find the places of all tensors in a `twin`, whose parameters nobody has processed.

    "table": by the rules, and by tracing where they do not know a layer; "traced": by tracing alone. Must run under
    the parallel state the model was built in. Raises ValueError for tensors that need scales the checkpoint lacks.
    """
    places: dict[str, tuple[Place, ...]] = {}
    names = Names(model)
    for spec in specs if how == "table" else ():
        found = place(names, spec.name, spec.shape)
        if found is not None:
            places[spec.name] = tuple(found)
    refused: dict[str, str] = {}
    if rest := [spec for spec in specs if spec.name not in places]:
        traced = trace(model, rest)
        places |= {name: tuple(found) for name, found in traced.places.items()}
        refused = traced.refused
    tensors = dict(model.named_buffers()) | dict(model.named_parameters())
    strides = {name: (tuple(t.shape), t.stride()) for name, t in tensors.items()}
    known = {spec.name: _landed(spec, places.get(spec.name, ()), tensors) for spec in specs}
    return Chart(known, places, refused, strides)


def _landed(spec: WeightSpec, places: Sequence[Place], tensors: dict[str, Tensor]) -> WeightSpec:
    """Return the spec with the dtype of the parameter the tensor lands in."""
    if not places:
        return spec
    dtype = str(tensors[places[0].parameter].dtype).removeprefix("torch.")
    if dtype != spec.dtype and not (dtype in _FLOATS and spec.dtype in _FLOATS):
        raise ValueError(
            f"{spec.name} is {spec.dtype} at the trainer and {dtype} in the engine: publish quantised weights with "
            "their scales (cosmos_rl_transfer.content.quantize), or let the engine quantise a checkpoint that is not"
        )
    return WeightSpec(name=spec.name, shape=spec.shape, dtype=dtype)
