"""The layers of a vLLM model that take a checkpoint tensor, by the model's own name maps.

checkpoint name -> hf_to_vllm_mapper        renames, and shard ids of fused parameters
                -> packed_modules_mapping   fused parameters of models whose mapper has no shards
                -> RoutedExperts            experts, every copy of each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Shard = str | int | tuple[int, ...]
"""vLLM's shard id: "q", 0, (0, 1); "w1", "w2", "w3" of an expert."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter that takes a checkpoint tensor, or a part of it."""

    layer: nn.Module
    path: str
    """Qualified name of the layer; "" is the model."""
    attribute: str
    """Name of the parameter in the layer."""
    shard: Shard | None = None
    expert: int | None = None
    """Physical expert, counted over all ranks."""

    @property
    def parameter(self) -> str:
        """Qualified name of the parameter."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute

    @property
    def tensor(self) -> Tensor:
        """The parameter, without gradient."""
        return self.layer.get_parameter(self.attribute).detach()


class VllmNames:
    """The name maps of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._parameters = {name for name, _ in model.named_parameters()}
        self._elsewhere = tuple(
            f"{path}." for path, layer in self._modules.items() if is_a(layer, "PPMissingLayer")
        )  # on other pipeline stages
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        self._packed = {part: (fused, i) for fused, parts in packed.items() for i, part in enumerate(parts)}
        self._experts = {path: _experts(layer) for path, layer in self._modules.items() if is_a(layer, "RoutedExperts")}

    def __call__(self, name: str) -> list[Target] | None:
        """Return the parameters that take the tensor, an empty list if there are none on this rank, None if unknown."""
        targets: list[Target] = []
        for mapped, shard in self._mapped(name):
            matches = self._find(mapped, shard)
            if matches is None:
                return None
            targets += matches
        return targets

    def _mapped(self, name: str) -> Iterator[tuple[str, Shard | None]]:
        if self._mapper is None:
            yield name, None
            return
        for mapped, tensor in self._mapper.apply([(name, torch.empty(0, device="meta"))]):
            yield mapped, vars(tensor).get("shard_id")

    def _find(self, name: str, shard: Shard | None) -> list[Target] | None:
        if name.startswith(self._elsewhere):
            return []
        path, _, attribute = name.rpartition(".")
        if (direct := self._direct(path, attribute, shard)) is not None:
            return direct
        if ".experts." in name:
            return self._find_expert(name)
        parent, _, part = path.rpartition(".")
        if shard is None and part in self._packed:
            fused, index = self._packed[part]
            path = f"{parent}.{fused}" if parent else fused
            is_qkv = path in self._modules and is_a(self._modules[path], "QKVParallelLinear")
            return self._direct(path, attribute, "qkv"[index] if is_qkv else index)
        return None

    def _direct(self, path: str, attribute: str, shard: Shard | None) -> list[Target] | None:
        layer = self._modules.get(path)
        if layer is None or attribute not in dict(layer.named_parameters(recurse=False)):
            return None
        target = Target(layer, path, attribute, shard)
        return [target] if target.parameter in self._parameters else []  # an alias is loaded under its first name

    def _find_expert(self, name: str) -> list[Target] | None:
        prefix, _, rest = name.partition(".experts.")
        path = f"{prefix}.experts.routed_experts"
        if path not in self._experts:
            return None
        layer = self._modules[path]
        if rest in dict(layer.named_parameters(recurse=False)):
            return [Target(layer, path, rest)]  # all experts in one tensor
        number, _, rest = rest.partition(".")
        part, _, suffix = rest.partition(".")
        entries = self._experts[path].get(f"experts.{number}.{part}.", [])
        targets = [Target(layer, path, stem + suffix, shard, expert) for stem, expert, shard in entries]
        known = dict(layer.named_parameters(recurse=False))
        return targets if targets and all(target.attribute in known for target in targets) else None


def _experts(layer: Any) -> dict[str, list[tuple[str, int, str]]]:
    """Return (stem of the parameter, physical expert, shard) by "experts.3.gate_proj.", every copy of an expert."""
    entries: dict[str, list[tuple[str, int, str]]] = {}
    for stem, part, expert, shard in layer.get_expert_mapping():
        entries.setdefault(part, []).append((stem.removeprefix("experts."), expert, shard))
    return entries


def is_a(value: object, name: str) -> bool:
    """Whether `value` is an instance of a class of this name: vLLM's layers, without importing them."""
    return any(kind.__name__ == name for kind in type(value).__mro__)
