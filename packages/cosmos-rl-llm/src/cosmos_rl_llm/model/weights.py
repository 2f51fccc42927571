"""Reads a model's weights from safetensors by boxes, so that a rank reads and holds only its own shards.

    checkpoint                               model                         box
      model.norm.weight                        model.norm.weight             a slice of the file
      experts.{0..E-1}.gate_proj.weight   \\
      experts.{0..E-1}.up_proj.weight     /    experts.gate_up_proj          slices of each expert, stacked and joined

transformers' conversion mapping says which weights of a checkpoint make up one of the model. Its other operations
(transposed, permuted or split weights) need whole tensors: `find_weights` returns None, and the caller loads the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from cosmos_rl_core.parallel.dtensor import Index
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_core.storage.safetensors_header import weight_files
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.model.causal_lm import empty_model, named_weights
from cosmos_rl_llm.model.checkpoint import read_specs, resolve

Shape = tuple[int, ...]
Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the model, made of one or more of the checkpoint."""

    names: tuple[tuple[str, ...], ...]
    """Names in the checkpoint: the pieces to join, each a name alone, or the experts to stack."""
    stacked: bool
    dim: int
    """Pieces are joined along it."""
    pieces: tuple[Shape, ...]
    """Shapes of the pieces."""

    @property
    def shape(self) -> Shape:
        first = list(self.pieces[0])
        first[self.dim] = sum(piece[self.dim] for piece in self.pieces)
        return tuple(first)


def find_weights(model: PreTrainedModel, source: str) -> Mapping[str, Weight] | None:
    """Return the weights of a model without adapters, which may be on meta, by name.

    None if `source` is not a local directory, or its safetensors do not have all weights with the model's shapes, are
    quantised, or need other operations than stacking and joining.
    """
    directory = Path(resolve(source))
    if not directory.is_dir():
        return None
    if "quantization_config" in read_json_object(directory / "config.json", hint="see model.path"):
        return None
    tensors = model.state_dict(keep_vars=True)
    shapes = {spec.name: spec.shape for spec in read_specs(directory)}
    weights: dict[str, Weight] = {}
    for name, (converter, sources) in _sources(model, shapes, tensors).items():
        weight = _weight(converter, sources, shapes)
        if weight is None or weight.shape != tuple(tensors[name].shape):
            return None
        weights[name] = weight
    by_id = {id(tensors[name]): weight for name, weight in weights.items()}  # tied weights may be there under one name
    if any(id(tensor) not in by_id for tensor in tensors.values()):
        return None
    return {name: by_id[id(tensor)] for name, tensor in tensors.items()}


Sources = tuple[WeightConverter | None, dict[str, list[str]]]
"""A conversion, and for each of its source patterns the names in the checkpoint."""


def _sources(model: PreTrainedModel, names: Mapping[str, Shape], tensors: Mapping[str, Tensor]) -> dict[str, Sources]:
    """Names in the checkpoint of each of the model's weights, by the rules of transformers' own loading."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, metas = model.base_model_prefix, dict(tensors)
    sources: dict[str, Sources] = {}
    for key in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, metas)
        if name not in tensors and key in tensors:
            name, pattern = rename_source_key(key, [], [], prefix, metas)
        if name in tensors:
            converter = None if pattern is None else by_pattern[pattern]
            sources.setdefault(name, (converter, {}))[1].setdefault(pattern or key, []).append(key)
    return sources


def _weight(
    converter: WeightConverter | None, sources: Mapping[str, list[str]], shapes: Mapping[str, Shape]
) -> Weight | None:
    """Describe a weight; None for operations other than stacking along dim 0 and joining."""
    operations = [] if converter is None else list(converter.operations)
    stacked = bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
    joins = [each for each in operations[int(stacked) :] if isinstance(each, Concatenate)]
    patterns = list(sources) if converter is None else converter.source_patterns
    if converter is not None and (len(converter.target_patterns) > 1 or set(patterns) != set(sources)):
        return None
    if len(joins) > 1 or len(joins) + stacked != len(operations) or any(join.num_shards_attribute for join in joins):
        return None
    names = tuple(tuple(sources[pattern]) for pattern in patterns)
    if len(names) > 1 and not joins:
        return None
    if any(len({shapes[name] for name in piece}) > 1 or (len(piece) > 1 and not stacked) for piece in names):
        return None
    pieces = tuple((len(piece), *shapes[piece[0]]) if stacked else shapes[piece[0]] for piece in names)
    return Weight(names, stacked=stacked, dim=joins[0].dim if joins else 0, pieces=pieces)


def specs_of_config(directory: Path) -> list[WeightSpec]:
    """Return the weights by config.json alone, as float32. Raises UserError if there is no such model."""
    weights = named_weights(empty_model(directory, dtype=torch.float32))
    return [WeightSpec(name=name, shape=tuple(weights[name].shape), dtype="float32") for name in sorted(weights)]


@contextmanager
def open_weights(source: str) -> Iterator[Callable[[Weight], Callable[[Index], Tensor]]]:
    """Open the safetensors of the directory `source`: weight -> reader of its boxes, in the dtype of the checkpoint."""
    with ExitStack() as files:
        sources: dict[str, safe_open] = {}
        for path in weight_files(Path(resolve(source))):
            file = files.enter_context(safe_open(path, framework="pt"))
            sources |= dict.fromkeys(file.keys(), file)

        def read(name: str, box: Slices) -> Tensor:
            return sources[name].get_slice(name)[box or ...]

        yield lambda weight: lambda index: _read(weight, index, read)


def _read(weight: Weight, index: Index, read: Callable[[str, Slices], Tensor]) -> Tensor:
    box = index if isinstance(index, tuple) else tuple(slice(0, size) for size in weight.shape)
    pieces, start = [], 0
    for names, shape in zip(weight.names, weight.pieces, strict=True):
        own = _within(box, weight.dim, start=start, size=shape[weight.dim]) if shape else box
        start += shape[weight.dim] if shape else 0
        if own is not None:
            pieces.append(_stack(names, own, read) if weight.stacked else read(names[0], own))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=weight.dim)


def _within(box: Slices, dim: int, *, start: int, size: int) -> Slices | None:
    """The part of a box inside of a piece at `start` along `dim`, relative to it; None if there is none."""
    low, high = max(box[dim].start, start), min(box[dim].stop, start + size)
    return (*box[:dim], slice(low - start, high - start), *box[dim + 1 :]) if low < high else None


def _stack(names: Sequence[str], box: Slices, read: Callable[[str, Slices], Tensor]) -> Tensor:
    return torch.stack([read(name, box[1:]) for name in names[box[0]]])
