"""A checkpoint as a directory that other programs load: Hugging Face safetensors, whole tensors, one after another.

The checkpoint is read tensor by tensor: no ranks are built, and memory holds one file of the result.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.checkpoint.manifest import MANIFEST, check_base, list_steps, read_origin, train_state, verify
from cosmos_rl_core.checkpoint.resume import checkpoint_root
from cosmos_rl_core.checkpoint.weights_name import ADAPTER_CONFIG, CONFIG, MERGED, PIPELINE_CONFIG, weights_name
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.recipe.model_card import model_card
from cosmos_rl_core.storage.folder import Folder

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_core.domain_base import DomainBase

DTYPES = ("float32", "bfloat16", "float16")
SHARD_BYTES = 5 * 10**9
"""Largest file of an export, as is usual on the Hugging Face hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export."""

    checkpoint: str
    directory: Path
    num_tensors: int
    num_bytes: int


def export(
    source: str,
    directory: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    merge_adapters: bool = True,
    averaged: bool = True,
    format: str | None = None,
) -> Exported:
    """Write the model of a checkpoint into `directory`, which must be new or empty.

    `source` is a run's directory (its newest checkpoint, or that of `step`), a folder of checkpoints, or a checkpoint.
    `averaged` takes the average of the weights, where the checkpoint holds one; `dtype` casts floating-point weights.
    With `merge_adapters` the parts that were not trained are written too, where the domain's models have any.
    `format` is one of the domain's formats for other programs; its weights are one file.
    Raises UserError for a damaged checkpoint, and for options that do not apply.
    """
    directory = Path(os.path.abspath(directory))
    folder = find_checkpoint(source, step=step)
    verify(folder)
    if merge_adapters:
        check_base(folder)
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists already; give a new or empty directory")
    origin = _origin(folder)
    writer = _writer(origin.domain, format, merge_adapters=merge_adapters) if format else None
    policy = folder / "policy"
    configs = {name: policy.read(name) for name in (ADAPTER_CONFIG, CONFIG, PIPELINE_CONFIG) if policy.has(name)}
    name = weights_name(configs, merged=merge_adapters)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _copy_files(policy, partial, dtype=dtype, without=ADAPTER_CONFIG if merge_adapters else MERGED)
        tensors = _weights(folder, origin, merge_adapters=merge_adapters, averaged=averaged)
        if writer is not None and format is not None:
            data = origin.domain.Data.model_validate(origin.recipe["data"])
            tensors = writer.export_as(format, partial, tensors, model=origin.model, data=data)
            max_shard_bytes = sys.maxsize
        library = None if format else _library(origin.domain.name, configs, merged=merge_adapters)
        (partial / "README.md").write_text(model_card(origin.recipe, step=origin.step, library=library))
        sizes = write_sharded(partial, _cast(tensors, dtype), name=name, max_shard_bytes=max_shard_bytes)
        origin.domain.complete_export(origin.model, partial, merged=merge_adapters)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(checkpoint=str(folder), directory=directory, num_tensors=len(sizes), num_bytes=sum(sizes.values()))


def find_checkpoint(source: str, *, step: int | None) -> Folder:
    """Return the checkpoint that `source` names. Raises UserError with the steps that exist."""
    place = Folder.at(source)
    if place.has(MANIFEST):
        if step is not None and place.name != f"step_{step}":
            raise UserError(
                f"--step {step}: {source} is one checkpoint, and not of that step; leave out one of the two"
            )
        return place
    root = _root_of_run(place) or place
    steps = list_steps(root)
    if not steps:
        raise UserError(f"{source}: no checkpoint there; give a run's directory, or a checkpoint's")
    if step is not None and step not in steps:
        raise UserError(f"{source} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return root / f"step_{steps[-1] if step is None else step}"


def write_sharded(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], *, name: str, max_shard_bytes: int
) -> dict[str, int]:
    """Write NAME.safetensors, or NAME-00001-of-00003.safetensors and so on with an index. Returns bytes by tensor.

    NAME may begin with a folder in `directory`.
    """
    from cosmos_rl_core.checkpoint.safetensors_file import write_tensors

    directory, name = (directory / name).parent, Path(name).name
    directory.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    shards: list[list[str]] = []
    folder = Folder.at(directory)
    for shard in _shards(tensors, max_bytes=max_shard_bytes):
        sizes |= {key: tensor.nbytes for key, tensor in shard.items()}
        shards.append(list(shard))
        write_tensors(folder, f"{len(shards)}.part", shard)
    if len(shards) == 1:
        (directory / "1.part").rename(directory / f"{name}.safetensors")
        return sizes
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        file = f"{name}-{number:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{number}.part").rename(directory / file)
        weight_map |= dict.fromkeys(keys, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (directory / f"{name}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return sizes


def _root_of_run(place: Folder) -> Folder | None:
    """The checkpoint folder of a run's directory; None for another folder."""
    if not place.is_local or not place.has("resolved.toml"):
        return None
    from cosmos_rl_core.recipe.load import load_config

    return checkpoint_root(load_config(place.path / "resolved.toml"), place.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """The recipe and domain that made the checkpoint."""

    step: int
    recipe: Mapping[str, Any]
    domain: DomainBase
    model: Any
    """Its [model] section."""


def _library(domain: str, configs: Mapping[str, bytes], *, merged: bool) -> str | None:
    """The library that loads an export, as the Hugging Face hub spells it; None for a model of our own."""
    if ADAPTER_CONFIG in configs and not merged:
        return "peft"
    if PIPELINE_CONFIG in configs:
        return "diffusers"
    return "transformers" if domain == "llm" else None


def _origin(folder: Folder) -> _Origin:
    recipe = read_origin(folder).recipe
    domain = load_domain(recipe["run"]["domain"])
    return _Origin(
        step=train_state(folder).step, recipe=recipe, domain=domain, model=domain.Model.model_validate(recipe["model"])
    )


def _writer(domain: DomainBase, format: str, *, merge_adapters: bool) -> DomainBase:
    if not domain.export_formats:
        raise UserError(
            f"--format {format}: the models of domain {domain.name} are written in one format; leave it out"
        )
    if format not in domain.export_formats:
        raise UserError(f"--format {format}: choose one of {', '.join(domain.export_formats)}")
    if not merge_adapters:
        raise UserError(f"--format {format} holds whole weights: leave out --keep-adapters")
    return domain


def _weights(folder: Folder, origin: _Origin, *, merge_adapters: bool, averaged: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights as the domain exports them."""
    from cosmos_rl_core.checkpoint.reader import CheckpointReader

    with CheckpointReader(folder) as reader:
        saved = reader.weights(averaged=averaged)
        yield from origin.domain.export_weights(origin.model, saved, merge_adapters=merge_adapters)


def _cast(tensors: Iterable[tuple[str, Tensor]], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    import torch

    for name, tensor in tensors:
        yield name, tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor


def _shards(tensors: Iterable[tuple[str, Tensor]], *, max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Fill one file after another; a tensor above the limit has one of its own."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    if shard:
        yield shard


def _copy_files(policy: Folder, directory: Path, *, dtype: str | None, without: str) -> None:
    """Copy the files beside the weights; config.json gets the dtype they are cast to.

    without: the beginning of names that are left out. Files of the merged model are moved beside its weights.
    """
    for source in policy.walk():
        if source.endswith(".safetensors") or source.startswith(without):
            continue
        data, name = policy.read(source), source.removeprefix(MERGED)
        if name == CONFIG and dtype is not None:
            data = (json.dumps({**json.loads(data), "dtype": dtype}, indent=2) + "\n").encode()
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
