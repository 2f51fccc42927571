"""Weights out of safetensors, where names and cuts there differ from those of a module here.

    names.owners("...attn.qkv.weight") == (Owner("...q_proj.weight", 0, 3), Owner("...k_proj.weight", 1, 3), ...)
    names.public_name("...q_proj.weight") == "...attn.q.weight"

A family has its `Names`; filling, and what is said about a file that does not fit, are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_core.parallel.dtensor import Index, fill_own_part
from cosmos_rl_core.parallel.lora import base_name


@dataclass(frozen=True, slots=True)
class Owner:
    """A parameter that a tensor of a file, or a part of it, is the value of."""

    name: str
    part: int = 0
    """Which of `parts`."""
    parts: int = 1
    """Equal pieces that the tensor is cut into along its first dimension."""


_FILES = ("*model*.safetensors", "proprio_projector*.safetensors")
"""Those of weights; others hold statistics."""


class Names(Protocol):
    """What a family's weights are called in its public checkpoints, and here."""

    def public_name(self, name: str) -> str:
        """Return the name in a public checkpoint of a parameter here."""
        ...

    def owners(self, name: str) -> Sequence[Owner]:
        """Return the parameters here that a tensor of a public checkpoint is the value of; none for one never used.

        Raises KeyError for an unknown name.
        """
        ...


class SameNames:
    """Those of a family whose files we write alone."""

    def public_name(self, name: str) -> str:
        """Return the name as it is."""
        return name

    def owners(self, name: str) -> tuple[Owner, ...]:
        """Return the parameter of that name."""
        return (Owner(name),)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where the value of a parameter lies."""

    file: safe_open
    name: str
    owner: Owner

    @property
    def shape(self) -> list[int]:
        whole = self.file.get_slice(self.name).get_shape()
        return whole if self.owner.parts == 1 else [whole[0] // self.owner.parts, *whole[1:]]

    def read(self, index: Index = ...) -> Tensor:
        """Return it, or the box `index` of it."""
        if self.owner.parts == 1:
            return self.file.get_slice(self.name)[index]
        rows, *others = [slice(0, size) for size in self.shape] if index is ... else index
        begin = self.owner.part * self.shape[0]
        return self.file.get_slice(self.name)[(slice(begin + rows.start, begin + rows.stop), *others)]


class WithHeads(Protocol):
    """A model with parts that public checkpoints lack."""

    def draw_heads(self) -> None:
        """Make them anew, with values drawn at random."""
        ...


M = TypeVar("M", bound=WithHeads)


def empty(make: Callable[[], M], *, seed: int) -> M:
    """Make a model whose parameters are memory that nobody has touched yet, but for its heads, drawn by `seed`.

    What the model computes itself is there, such as rotary frequencies.
    """
    with forked_rng(seed=seed):
        from transformers.initialization import no_init_weights  # not in two threads at once: it replaces itself

        with no_init_weights():
            model = make()
        model.draw_heads()
    return model


@torch.no_grad()
def fill(module: nn.Module, files: Sequence[Path], *, names: Names, may_lack: tuple[str, ...], hint: str) -> list[str]:
    """Fill this rank's part of each parameter from safetensors, in the type it is held in.

    Args:
        may_lack: beginnings of names, of parts that may be missing, or of another shape: they keep their values, as
            adapters do. What the files have of a part that the module is without is left out.
        hint: what to check where names or shapes do not fit.

    Returns the names that keep their values. Raises UserError for any other weight that is missing, of another shape or
    unknown.
    """
    with ExitStack() as opened:
        sources, unknown = _sources(files, names=names, opened=opened)
        wanted = {name: base_name(name) for name in module.state_dict()}
        known = set(wanted.values())
        sources = _without_others(sources, module, parts=may_lack)
        unknown += [source.name for ours, source in sources.items() if ours not in known]
        absent = sorted(name for name in known if name is not None and name not in sources)
        missing = [name for name in absent if not name.startswith(may_lack)]
        if missing or unknown:
            lacking = [names.public_name(name) for name in missing]
            raise UserError(_mismatch(files[0].parent, missing=lacking, unknown=unknown, hint=hint))
        for name, tensor in module.state_dict(keep_vars=True).items():
            own = wanted[name]
            if own is not None and own in sources:
                _fill(tensor, sources[own], hint=hint)
    return absent


def read(files: Sequence[Path], *, names: Names) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter that files hold by its name here, one in memory at a time. Raises UserError."""
    with ExitStack() as opened:
        sources, unknown = _sources(files, names=names, opened=opened)
        if unknown:
            raise UserError(_mismatch(files[0].parent, missing=[], unknown=unknown, hint=""))
        for name, source in sources.items():
            yield name, source.read()


def shapes_in(files: Sequence[Path]) -> dict[str, list[int]]:
    """Return the shapes of all tensors by name. Raises UserError for a file that is no safetensors."""
    with ExitStack() as opened:
        handles = [_open(path, opened) for path in files]
        return {name: file.get_slice(name).get_shape() for file in handles for name in file.keys()}  # noqa: SIM118


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors of a model's directory. Raises UserError where there is none."""
    found = (path for pattern in _FILES for path in sorted(directory.glob(pattern)))
    files = [path for path in found if not path.name.startswith("adapter_")]
    if not files:
        raise UserError(f"model.path: {directory} has no model.safetensors")
    return files


def _sources(files: Sequence[Path], *, names: Names, opened: ExitStack) -> tuple[dict[str, _Source], list[str]]:
    """Our names -> where their values lie; and the names that mean nothing here."""
    found: dict[str, _Source] = {}
    unknown = []
    for path in files:
        file = _open(path, opened)
        for name in file.keys():  # noqa: SIM118
            try:
                found |= {owner.name: _Source(file=file, name=name, owner=owner) for owner in names.owners(name)}
            except KeyError:
                unknown.append(name)
    return found, unknown


def _without_others(sources: dict[str, _Source], module: nn.Module, *, parts: tuple[str, ...]) -> dict[str, _Source]:
    """Leave out parts that the module is without, or has of other sizes."""
    shapes = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    differ = [name for name, source in sources.items() if name.startswith(parts) and source.shape != shapes.get(name)]
    others = tuple(part for part in parts if any(name.startswith(part) for name in differ))
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
