"""Loads weights from safetensors whose names and fused tensors differ from the module's.

    names.owners("...attn.qkv.weight") == (Owner("...q_proj.weight", 0, 3), Owner("...k_proj.weight", 1, 3), ...)
    names.public_name("...q_proj.weight") == "...attn.q.weight"

A family has its `WeightNames`; loading and errors are common to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_core.parallel.dtensor import Index, fill_own_part, parameters_on_meta
from cosmos_rl_core.parallel.lora import base_name
from cosmos_rl_core.storage import safetensors_header as storage
from cosmos_rl_vla.models.base import ActionModel, Owner, WeightNames

_MODEL, _PROJECTOR = "*model*.safetensors", "proprio_projector*.safetensors"
"""Files with weights; others hold statistics."""


HEADS = ("value_head.", "aux_head.", "denoiser.noise_head.")
"""Prefixes of heads that reinforcement learning and auxiliary targets add; random where a file lacks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Location of a parameter's value in the files."""

    file: safe_open
    name: str
    owner: Owner

    @property
    def shape(self) -> list[int]:
        shape = self.file.get_slice(self.name).get_shape()
        return shape if self.owner.parts == 1 else [shape[0] // self.owner.parts, *shape[1:]]

    def read(self, index: Index = ...) -> Tensor:
        """Return the value, or the box `index` of it."""
        if self.owner.parts == 1:
            return self.file.get_slice(self.name)[index]
        rows, *others = [slice(0, size) for size in self.shape] if index is ... else index
        begin = self.owner.part * self.shape[0]
        return self.file.get_slice(self.name)[(slice(begin + rows.start, begin + rows.stop), *others)]


M = TypeVar("M", bound="ActionModel")
C = TypeVar("C")


def empty(kind: Callable[[C], M], config: C, *, seed: int, on_meta: bool = False) -> M:
    """Build a model with uninitialised parameters, except for its heads, initialised by `seed`.

    Computed buffers such as rotary frequencies are initialised. `on_meta`: the uninitialised parameters are on meta.
    """
    with forked_rng(seed=seed):
        from transformers.initialization import no_init_weights  # not thread-safe: it patches a global

        with no_init_weights(), parameters_on_meta() if on_meta else nullcontext():
            model = kind(config)
        model.init_heads()
    return model


@torch.no_grad()
def fill(module: ActionModel, files: Sequence[Path]) -> list[str]:
    """Fill this rank's shard of each parameter from safetensors, in the parameter's dtype.

    Heads may be missing or of another shape: they keep their values, as adapters do. Tensors of a head that the module
    lacks are ignored.

    Returns the names that keep their values. Raises UserError for any other weight that is missing, unknown or of
    another shape.
    """
    names, hint = module.names, module.hint
    with ExitStack() as opened:
        sources, unknown = _sources(files, names=names, opened=opened)
        base_names = {name: base_name(name) for name in module.state_dict()}
        known = set(base_names.values())
        sources = _without_others(sources, module)
        unknown += [source.name for ours, source in sources.items() if ours not in known]
        absent = sorted(name for name in known if name is not None and name not in sources)
        missing = [name for name in absent if not name.startswith(HEADS)]
        if missing or unknown:
            lacking = [names.public_name(name) for name in missing]
            raise UserError(_mismatch(files[0].parent, missing=lacking, unknown=unknown, hint=hint))
        for name, tensor in module.state_dict(keep_vars=True).items():
            own = base_names[name]
            if own is not None and own in sources:
                _fill(tensor, sources[own], hint=hint)
    return absent


def read(files: Sequence[Path], *, names: WeightNames) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of the files by the module's name, one in memory at a time. Raises UserError."""
    with ExitStack() as opened:
        sources, unknown = _sources(files, names=names, opened=opened)
        if unknown:
            raise UserError(_mismatch(files[0].parent, missing=[], unknown=unknown, hint=""))
        for name, source in sources.items():
            yield name, source.read()


def shapes_in(files: Sequence[Path]) -> dict[str, list[int]]:
    """Return the shapes of all tensors by name. Raises UserError for a file that is not safetensors."""
    with ExitStack() as opened:
        handles = [_open(path, opened) for path in files]
        return {name: file.get_slice(name).get_shape() for file in handles for name in file.keys()}  # noqa: SIM118


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model's directory. Raises UserError without any."""
    candidates = storage.weight_files(directory, _MODEL) + sorted(directory.glob(_PROJECTOR))
    files = [path for path in candidates if not path.name.startswith("adapter_")]
    if not files:
        raise UserError(f"model.path: {directory} has no model.safetensors")
    return files


def _sources(files: Sequence[Path], *, names: WeightNames, opened: ExitStack) -> tuple[dict[str, _Source], list[str]]:
    """Return sources of values by the module's names, and the unknown names."""
    sources: dict[str, _Source] = {}
    unknown = []
    for path in files:
        file = _open(path, opened)
        for name in file.keys():  # noqa: SIM118
            try:
                sources |= {owner.name: _Source(file=file, name=name, owner=owner) for owner in names.owners(name)}
            except KeyError:
                unknown.append(name)
    return sources, unknown


def _without_others(sources: dict[str, _Source], module: ActionModel) -> dict[str, _Source]:
    """Remove heads that the module lacks, or has in other sizes."""
    shapes = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    differ = [name for name, source in sources.items() if name.startswith(HEADS) and source.shape != shapes.get(name)]
    others = tuple(head for head in HEADS if any(name.startswith(head) for name in differ))
    return {name: source for name, source in sources.items() if not name.startswith(others)}


def _open(path: Path, opened: ExitStack) -> safe_open:
    try:
        return opened.enter_context(safe_open(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"model.path: {path} is not a safetensors file ({error})") from error


def _mismatch(directory: Path, *, missing: list[str], unknown: list[str], hint: str) -> str:
    parts = [
        f"{verb} {len(names)} weights ({', '.join(sorted(names)[:5])}{', ...' if len(names) > 5 else ''})"
        for verb, names in (("lacks", missing), ("has unknown", unknown))
        if names
    ]
    return f"model.path: {directory} {' and '.join(parts)}{hint and f'; {hint}'}"


def _fill(tensor: Tensor, source: _Source, *, hint: str) -> None:
    if list(tensor.shape) != source.shape:
        raise UserError(
            f"model.path: {source.name} is {source.shape} in the safetensors and {list(tensor.shape)} by config.json"
            f"{hint and f'; {hint}'}"
        )
    fill_own_part(tensor, source.read)
