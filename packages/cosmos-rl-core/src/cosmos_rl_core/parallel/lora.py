"""Low-rank adapters as peft puts them into a module: their names, first values, scales, and how they are merged.

y = W x + (alpha / rank) B A x, where A and B are trained and W stays as it is.

    <layer>.weight  ->  <layer>.base_layer.weight        [out, in]    frozen
                        <layer>.lora_A.default.weight    [rank, in]   A, random
                        <layer>.lora_B.default.weight    [out, rank]  B, zero: training starts at the base

Whether adapters count is a matter of scales, never of peft's own switches: those also stop gradients, which fully
sharded modules would remember. Adapters travel, and are written, under the names that peft gives them in its files.
Source: Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Policy, Reference
from cosmos_rl_core.types import Microbatch, PolicyOutputs

if TYPE_CHECKING:
    from peft import LoraConfig

_PREFIX = "base_model.model."
"""Before every name in peft's files."""
_PARAMETER = re.compile(r"(?P<layer>.+)\.(?P<matrix>lora_[AB])\.default\.weight")
_FILED = re.compile(rf"{re.escape(_PREFIX)}(?P<layer>.+)\.(?P<matrix>lora_[AB])\.weight")


def peft_config(*, rank: int, alpha: float, target_modules: Sequence[str], package: str, **further: Any) -> LoraConfig:
    """Return what peft makes adapters by; `further` are keys of its LoraConfig.

    Raises UserError without peft, with the line that installs it beside `package`.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError(f"[model.lora] needs peft ({error}); pip install '{package}[lora]'") from error
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  # peft divides it by the rank
        lora_dropout=0.0,
        bias="none",
        target_modules=list(target_modules),
        **further,
    )


def initial_adapter(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Return the first value of an adapter's parameter, float32: uniform within 1 / sqrt(in) for A, zero for B."""
    found = _PARAMETER.fullmatch(name)
    assert found is not None, f"{name} is no adapter"
    if found["matrix"] == "lora_B":
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def fill_adapters(module: nn.Module, *, seed: int) -> None:
    """Give all adapters their first values, which depend on the seed and their names alone; not those on meta."""
    for name, parameter in module.named_parameters():
        if base_name(name) is None and parameter.device.type != "meta":
            parameter.copy_(initial_adapter(name, tuple(parameter.shape), seed=seed))


def adapter_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return live adapters under their names in peft's files; nothing for a module without."""
    return {
        f"{_PREFIX}{found['layer']}.{found['matrix']}.weight": parameter.detach()
        for name, parameter in module.named_parameters()
        if (found := _PARAMETER.fullmatch(name))
    }


def adapter_layers(module: nn.Module) -> list[nn.Module]:
    """Return the linear layers that hold A and B."""
    return [layer for name, layer in module.named_modules() if _PARAMETER.fullmatch(f"{name}.weight")]


def base_name(parameter: str) -> str | None:
    """Return the name in the base's checkpoint of a parameter beside adapters; None for an adapter's own."""
    return None if _PARAMETER.fullmatch(parameter) else parameter.replace(".base_layer.", ".")


def merge(
    weights: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], *, scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base's `weights` with W + scaling * B A where there is an adapter, in the type of W.

    Args:
        weights: name and tensor of the base's checkpoint.
        adapters: by their names in peft's files.
        scaling: alpha / rank.

    Raises UserError when adapters are left over: they belong to another model.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapters.items():
        found = _FILED.fullmatch(name)
        if found is None:
            raise UserError(f"{name} is no weight of a LoRA adapter")
        pairs.setdefault(f"{found['layer']}.weight", {})[found["matrix"]] = tensor
    for name, weight in weights:
        pair = pairs.pop(name, None)
        yield name, weight if pair is None else _merged(weight, pair["lora_A"], pair["lora_B"], scaling)
    if pairs:
        raise UserError(f"the base model has no weight {min(pairs)} for an adapter: another model?")


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Run `module` as its base."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    assert layers, "the module has no adapters"
    for layer in layers:
        layer.set_scale("default", 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale("default", 1.0)


def reference_of(policy: Policy) -> Reference | None:
    """The model under a policy's adapters, as the reference of a KL term; None for a policy without adapters."""
    return BaseOfAdapters(policy) if adapter_layers(policy.module) else None


class BaseOfAdapters:
    """A policy with its adapters switched off for each forward pass: no copy of the model is needed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs:
        """As the policy's, without the adapters."""
        with without_adapters(self._policy.module):
            return self._policy.forward(microbatch, with_entropy=with_entropy)


def _merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W [out, in], A [rank, in], B [out, rank] -> W + scaling * B A, computed in float32."""
    if weight.shape != (b.shape[0], a.shape[1]):
        raise UserError(f"an adapter of {b.shape[0]} x {a.shape[1]} does not fit a weight of {list(weight.shape)}")
    return (weight.float() + scaling * (b.float() @ a.float())).to(weight.dtype)
