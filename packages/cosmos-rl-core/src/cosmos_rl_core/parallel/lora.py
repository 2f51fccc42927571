"""Low-rank adapters (LoRA) as peft puts them into a module: layers, names, first values, scales, merging.

y = W x + (alpha / rank) B A x, where A and B are trained and W stays as it is.

    <layer>.weight  ->  <layer>.base_layer.weight        [out, in]    frozen
                        <layer>.lora_A.default.weight    [rank, in]   A, random
                        <layer>.lora_B.default.weight    [out, rank]  B, zero: training starts at the base

Adapters are switched off by their scales, never by peft's own switches: those also stop gradients, which fully sharded
modules would remember. Adapters are sent and saved under their names in peft's files.
Source: Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.interfaces import Policy, Reference
from cosmos_rl_core.parallel.config import LoraSection, ends_in
from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_core.parallel.dtensor import fill_own_part, local_part
from cosmos_rl_core.parallel.dtensor import whole as gathered
from cosmos_rl_core.types import Microbatch, PolicyOutputs

ADAPTER = "default"
"""peft's name of a model's one adapter; it is part of the parameters' names and not of the files'."""
_PREFIX = "base_model.model."
"""Prefix of every name in peft's files."""
_PARAMETER = re.compile(r"(?P<layer>.+)\.(?P<matrix>lora_[AB])\.default\.weight")
_FILED = re.compile(rf"{re.escape(_PREFIX)}(?P<layer>.+)\.(?P<matrix>lora_[AB])\.weight")


def pick_layers(
    module: nn.Module,
    targets: Literal["all-linear"] | Sequence[str],
    *,
    leave_out: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """Return the full names of the linear layers to adapt, with or without adapters on them already.

    Args:
        targets: ends of their names, each in whole parts.
        leave_out: whether the layer of this full name never gets one.

    Raises UserError for ends that no layer has.
    """
    names = {
        name.removesuffix(".base_layer")
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and ".lora_" not in name
    }
    linear = sorted(name for name in names if not leave_out(name))
    if targets == "all-linear" and linear:
        return linear
    ends = () if targets == "all-linear" else targets
    unknown = sorted(end for end in ends if not any(ends_in(name, [end]) for name in linear))
    if unknown or not ends:
        choices = sorted({re.sub(r"^.*\.\d+\.(?=.*[a-z])", "", name) for name in linear})
        raise UserError(
            f"[model.lora] target_modules: {type(module).__name__} has no linear layer whose name ends in "
            f"{', '.join(unknown) or 'anything'}; it has {', '.join(choices) or 'none'}"
        )
    return [name for name in linear if ends_in(name, ends)]


def add_adapters(
    module: nn.Module,
    section: LoraSection,
    *,
    layers: Sequence[str],
    package: str,
    base: str = "",
    task_type: str | None = None,
    seed: int = 0,
    whole: Sequence[str] = (),
) -> None:
    """Add adapters to `layers` of `module`, in place, and freeze the rest but `whole`.

    Args:
        layers: their full names, see `pick_layers`.
        package: the one whose extra "lora" installs peft.
        base: path or id of the model, for programs that load the adapters later.
        task_type: peft's name of the model's kind.
        seed: of the values of A, which depend on nothing but the seed and the layer's name.
        whole: full names of parameters that are trained themselves; none of an adapted layer.

    Raises UserError without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"[model.lora] needs peft ({error}); {pip_install(package + '[lora]')}") from error
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # pyright: ignore[reportArgumentType]  # peft divides it by the rank
        rank_pattern={name: rank for name in layers if (rank := section.rank_of(name)) != section.rank},
        alpha_pattern={name: alpha for name in layers if (alpha := section.alpha_of(name)) != section.alpha},  # pyright: ignore[reportArgumentType]  # as above
        lora_dropout=0.0,
        bias="none",
        target_modules=list(layers),
        task_type=task_type,
        base_model_name_or_path=base,
    )
    with forked_rng(seed=seed):  # peft samples values of its own
        inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    fill_adapters(module, seed=seed)
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in whole}) or None
    for name in whole:
        module.get_parameter(name).requires_grad_(True)


def write_adapter_config(module: nn.Module, directory: Path) -> None:
    """Write the adapter_config.json that peft reads beside adapter_model.safetensors."""
    config = copy(cast(Any, module).peft_config[ADAPTER])  # peft keeps it there
    owners = config.modules_to_save or []
    outer = [name for name in owners if not any(name.startswith(f"{owner}.") for owner in owners)]
    config.modules_to_save = outer or None  # peft takes what is inside of them too
    config.save_pretrained(str(directory))


def initial_adapter(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Return the first value of an adapter's parameter, float32: uniform within 1 / sqrt(in) for A, zero for B."""
    match = _PARAMETER.fullmatch(name)
    assert match is not None, f"{name} is no adapter"
    if match["matrix"] == "lora_B":
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def fill_adapters(module: nn.Module, *, seed: int) -> None:
    """Initialise all adapters but those on meta, or this rank's shards of them.

    The values depend on the seed and their names alone.
    """
    for name, parameter in module.named_parameters():
        if base_name(name) is None and parameter.device.type != "meta":
            fill_own_part(parameter, initial_adapter(name, tuple(parameter.shape), seed=seed).__getitem__)


def adapter_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return live adapters under their names in peft's files; nothing for a module without."""
    return {
        f"{_PREFIX}{match['layer']}.{match['matrix']}.weight": parameter.detach()
        for name, parameter in module.named_parameters()
        if (match := _PARAMETER.fullmatch(name))
    }


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the live weights that are trained in full beside adapters, under their names in peft's files."""
    config = getattr(module, "peft_config", {}).get(ADAPTER)
    owners = set() if config is None else {*(config.modules_to_save or ())}
    return {
        f"{_PREFIX}{name}": parameter.detach()
        for name, parameter in module.named_parameters()
        if name.rpartition(".")[0] in owners
    }


def adapter_layers(module: nn.Module) -> list[nn.Module]:
    """Return the linear layers that hold A and B."""
    return [layer for name, layer in module.named_modules() if _PARAMETER.fullmatch(f"{name}.weight")]


def ranks_of(module: nn.Module) -> dict[str, int]:
    """Return the rank of each adapted layer, by its full name."""
    matches = ((_PARAMETER.fullmatch(name), parameter) for name, parameter in module.named_parameters())
    return {match["layer"]: parameter.shape[0] for match, parameter in matches if match and match["matrix"] == "lora_A"}


def base_name(parameter: str) -> str | None:
    """Return the name in the base's checkpoint of a parameter beside adapters; None for an adapter's own."""
    return None if _PARAMETER.fullmatch(parameter) else parameter.replace(".base_layer.", ".")


def renamed(adapter: str, weight_name: Callable[[str], str]) -> str:
    """Return a name in peft's files after the weight of its layer was renamed; other names as they are."""
    match = _FILED.fullmatch(adapter)
    if match is None:
        name = adapter.removeprefix(_PREFIX)
        return adapter if name == adapter else f"{_PREFIX}{weight_name(name)}"
    layer = weight_name(f"{match['layer']}.weight").removesuffix(".weight")
    return f"{_PREFIX}{layer}.{match['matrix']}.weight"


def merge(
    weights: Iterable[tuple[str, Tensor]],
    trained: Iterable[tuple[str, Tensor]],
    *,
    scaling: Callable[[str], float],
    public_name: Callable[[str], str] = str,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base's `weights` with W + scaling * B A where there is an adapter, in the type of W, by public name.

    Args:
        weights: name and tensor of the base's checkpoint.
        trained: adapters and whole weights of the base by their names in peft's files; whole weights by public name.
            Whole ones replace the base's.
        scaling: full name of a layer of the adapters -> alpha / rank.
        public_name: name of a weight of the base -> that in the result.

    Raises UserError when adapters are left over: they belong to another model.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in trained:
        if not name.startswith(_PREFIX):
            plain[name] = tensor
        elif (match := _FILED.fullmatch(name)) is not None:
            pairs.setdefault(f"{match['layer']}.weight", {})[match["matrix"]] = tensor
        else:
            replaced[name.removeprefix(_PREFIX)] = tensor
    for name, weight in weights:
        pair = pairs.pop(name, None)
        weight = replaced.pop(name, weight).to(weight.dtype)
        if (public := public_name(name)) not in plain:
            scale = scaling(name.removesuffix(".weight"))
            yield public, weight if pair is None else _merged(weight, pair["lora_A"], pair["lora_B"], scale)
    if left := [*pairs, *replaced]:
        raise UserError(f"the base model has no weight {min(left)} for an adapter: is it of another model?")
    yield from plain.items()


class MergedWeights:
    """W + alpha / rank B A of each adapted layer, in host memory, for engines that take whole weights.

    The layers keep W and their adapters: merging in bfloat16 rounds, and would add up over the steps.
    """

    def __init__(self, module: nn.Module) -> None:
        """module: has its adapters already, and over ranks its shards."""
        self._module = module

    @cached_property
    def _merged(self) -> dict[str, Tensor]:
        """By name of the layer, with this rank's part of W. Made at first use, with memory for the parameters there."""
        merged = {layer: _on_host(weight) for layer, weight, *_ in self._layers()}
        self._merge_into(merged)
        return merged

    def merge(self) -> None:
        """Merge again after a step. All ranks call it together: A and B are gathered."""
        self._merge_into(self._merged)

    def weights(self) -> dict[str, Tensor]:
        """Return them by the base's names, with the live weights that are trained in full."""
        merged = {f"{layer}.weight": tensor for layer, tensor in self._merged.items()}
        return merged | {name.removeprefix(_PREFIX): tensor for name, tensor in whole_weights(self._module).items()}

    @torch.no_grad()
    def _merge_into(self, merged: Mapping[str, Tensor]) -> None:
        for layer, weight, a, b, scaling in self._layers():
            update = scaling * (gathered(b).float() @ gathered(a).float())
            own = local_part(weight)
            fill_own_part(merged[layer], lambda box, own=own, update=update: own.float() + update[box])

    def _layers(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor, float]]:
        """Yield name, W, A, B and alpha / rank."""
        from peft.tuners.lora import LoraLayer

        for name, layer in self._module.named_modules():
            if isinstance(layer, LoraLayer):
                adapted = cast(Any, layer)  # peft's modules have no types
                a, b = adapted.lora_A[ADAPTER].weight, adapted.lora_B[ADAPTER].weight
                yield name, adapted.get_base_layer().weight, a, b, adapted.scaling[ADAPTER]


class ScaledAdapters(MergedWeights):
    """A, and alpha / rank B in host memory, for engines that multiply by no scale of their own."""

    def weights(self) -> dict[str, Tensor]:
        """Return the adapters by their names in peft's files, and weights trained in full by the base's names."""
        scaled = {f"{_PREFIX}{layer}.lora_B.weight": tensor for layer, tensor in self._merged.items()}
        in_full = {name.removeprefix(_PREFIX): tensor for name, tensor in whole_weights(self._module).items()}
        return adapter_weights(self._module) | scaled | in_full

    @torch.no_grad()
    def _merge_into(self, merged: Mapping[str, Tensor]) -> None:
        for layer, b, _, _, scaling in self._layers():
            own = scaling * local_part(b).float()
            fill_own_part(merged[layer], lambda box, own=own: own)

    def _layers(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor, float]]:
        for layer, _, a, b, scaling in super()._layers():
            yield layer, b, a, b, scaling


def _on_host(tensor: Tensor) -> Tensor:
    """Return memory on the host for this rank's part of a tensor."""
    local = local_part(tensor)
    host = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
    return DTensor(host, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else host


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Run `module` without its adapters inside."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    assert layers, "the module has no adapters"
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def reference_of(policy: Policy) -> Reference | None:
    """The model under a policy's adapters, as the reference of a KL term; None for a policy without adapters."""
    return BaseOfAdapters(policy) if adapter_layers(policy.module) else None


class BaseOfAdapters(Reference):
    """A policy with its adapters switched off for each forward pass: no copy of the model is needed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs:
        """Return the policy's outputs without the adapters."""
        with without_adapters(self._policy.module):
            return self._policy.forward(microbatch, with_entropy=with_entropy)


def _merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W [out, in], A [rank, in], B [out, rank] -> W + scaling * B A, computed in float32."""
    if weight.shape != (b.shape[0], a.shape[1]):
        raise UserError(f"an adapter of {b.shape[0]} x {a.shape[1]} does not fit a weight of {list(weight.shape)}")
    return (weight.float() + scaling * (b.float() @ a.float())).to(weight.dtype)
