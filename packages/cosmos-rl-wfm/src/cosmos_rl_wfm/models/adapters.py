"""Low-rank adapters through peft: y = W x + (alpha / rank) B A x, where A and B are trained and W stays as it is.

    <layer>.weight  ->  <layer>.base_layer.weight        [out, in]    frozen
                        <layer>.lora_A.default.weight    [rank, in]   A, random
                        <layer>.lora_B.default.weight    [out, rank]  B, zero: training starts at the base network
                        <layer>.lora_{A,B}.old.weight    a second, frozen pair, for DiffusionNFT

Which pair counts is a matter of scales, never of peft's own switches: those also stop gradients, which fully sharded
modules would remember. Adapters travel, and are written, under the names that peft gives them in its files.
Source: Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

import math
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.config import LoraSection
from cosmos_rl_wfm.models.random_state import lent_random_state

if TYPE_CHECKING:
    from diffusers.loaders import PeftAdapterMixin
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

Pair = Literal["default", "old", "none"]
"""The pair of adapters that counts; "none": the base network."""

_PREFIX = "base_model.model."
"""Before every name in peft's files."""
_PARAMETER = re.compile(r"(?P<layer>.+)\.(?P<matrix>lora_[AB])\.(?P<pair>default|old)\.weight")
_FILED = re.compile(rf"{re.escape(_PREFIX)}(?P<layer>.+)\.(?P<matrix>lora_[AB])\.weight")


def add_adapters(
    network: nn.Module, section: LoraSection, *, targets: Sequence[str], base: str = "", seed: int = 0
) -> None:
    """Put adapters on linear layers of `network`, in place, and freeze the rest.

    Args:
        targets: ends of the layers' names where the section says "family".
        base: path or id of the model, for those who load the adapters later.
        seed: of the values of A, which depend on nothing else but the layer's name.

    Raises UserError for layers that the network does not have, and where peft is not installed.
    """
    config = _peft_config(network, section, targets)
    with lent_random_state():  # peft draws values of its own
        _adapted(network).add_adapter(config, "default")
    config.base_model_name_or_path = base
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if base_name(name) is None:
                parameter.copy_(initial_adapter(name, tuple(parameter.shape), seed=seed))


def add_old(network: nn.Module) -> None:
    """Add the second pair, frozen and equal to the trained one, which goes on counting. Call it before sharding."""
    model = _adapted(network)
    with lent_random_state(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # a second pair is what is wanted
        model.add_adapter(_settings(network), "old")
    model.set_adapter(["default", "old"])
    for name, parameter in network.named_parameters():
        if _pair_of(name) == "old":
            parameter.requires_grad_(False)
    follow(network, decay=0.0)
    _scale(network, "default")


@torch.no_grad()
def follow(network: nn.Module, *, decay: float) -> None:
    """Move the old pair: old <- decay * old + (1 - decay) * default."""
    parameters = dict(network.named_parameters())
    for name, parameter in parameters.items():
        if _pair_of(name) == "old":
            current = parameters[name.replace(".old.", ".default.")]
            parameter.mul_(decay).add_(current, alpha=1.0 - decay) if decay else parameter.copy_(current)


@contextmanager
def counting(network: nn.Module, pair: Pair) -> Iterator[None]:
    """Run `network` with another pair of adapters inside, or as its base. Outside the trained one counts."""
    _scale(network, pair)
    try:
        yield
    finally:
        _scale(network, "default")


def initial_adapter(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Return the first value of an adapter's parameter, float32: uniform within 1 / sqrt(in) for A, zero for B."""
    found = _PARAMETER.fullmatch(name)
    assert found is not None, f"{name} is no adapter"
    if found["matrix"] == "lora_B":
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def adapter_weights(network: nn.Module, pair: Literal["default", "old"] = "default") -> dict[str, Tensor]:
    """Return a pair's live adapters under their names in peft's files; nothing for a network without."""
    return {
        f"{_PREFIX}{found['layer']}.{found['matrix']}.weight": parameter.detach()
        for name, parameter in network.named_parameters()
        if (found := _PARAMETER.fullmatch(name)) and found["pair"] == pair
    }


def base_name(parameter: str) -> str | None:
    """Return the name in the base network's checkpoint of a parameter beside adapters; None for an adapter's own."""
    return None if _PARAMETER.fullmatch(parameter) else parameter.replace(".base_layer.", ".")


def base_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the weights without the adapters, by checkpoint name."""
    held = network.state_dict().items()
    return {base: tensor for name, tensor in held if (base := base_name(name)) is not None}


def write_adapter_config(network: nn.Module, directory: Path) -> None:
    """Write the adapter_config.json that peft looks for beside adapter_model.safetensors."""
    _settings(network).save_pretrained(str(directory))


def merge(
    weights: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], *, scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base network's `weights` with W + scaling * B A where there is an adapter, in the type of W.

    Args:
        weights: name and tensor of the base network's checkpoint.
        adapters: by their names in peft's files.
        scaling: alpha / rank.

    Raises UserError when adapters are left over: they belong to another network.
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
        raise UserError(f"the base network has no weight {min(pairs)} for an adapter: another model?")


def _merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W [out, in], A [rank, in], B [out, rank] -> W + scaling * B A, computed in float32."""
    if weight.shape != (b.shape[0], a.shape[1]):
        raise UserError(f"an adapter of {b.shape[0]} x {a.shape[1]} does not fit a weight of {list(weight.shape)}")
    return (weight.float() + scaling * (b.float() @ a.float())).to(weight.dtype)


def _scale(network: nn.Module, pair: Pair) -> None:
    from peft.tuners.lora import LoraLayer

    layers: list[LoraLayer] = [module for module in network.modules() if isinstance(module, LoraLayer)]
    assert layers, "the network has no adapters"
    for layer in layers:
        for name in layer.scaling:
            layer.set_scale(name, float(name == pair))


def _pair_of(name: str) -> str | None:
    found = _PARAMETER.fullmatch(name)
    return None if found is None else found["pair"]


def _adapted(network: nn.Module) -> PeftAdapterMixin:
    from diffusers.loaders import PeftAdapterMixin

    if not isinstance(network, PeftAdapterMixin):
        raise UserError(f"[model.lora] {type(network).__name__} takes no adapters in diffusers; remove the section")
    return network


def _settings(network: nn.Module) -> LoraConfig:
    return cast(Any, network).peft_config["default"]  # peft puts it there


def _peft_config(network: nn.Module, section: LoraSection, family: Sequence[str]) -> LoraConfig:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError(f"[model.lora] needs peft ({error}); pip install 'cosmos-rl-wfm[lora]'") from error
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # pyright: ignore[reportArgumentType]  # peft divides it by the rank
        lora_dropout=0.0,
        bias="none",
        target_modules=_targets(network, section, family),
    )


def _targets(network: nn.Module, section: LoraSection, family: Sequence[str]) -> list[str]:
    """Full names of the layers to adapt."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if section.target_modules == "all-linear":
        return linear
    wanted = list(family if section.target_modules == "family" else section.target_modules)
    chosen = {end: [name for name in linear if f".{name}".endswith(f".{end}")] for end in wanted}
    unknown = sorted(end for end, names in chosen.items() if not names)
    if unknown or not wanted:
        ends = sorted({re.sub(r"^.*\.\d+\.(?=.*[a-z])", "", name) for name in linear})
        raise UserError(
            f"[model.lora] target_modules: {type(network).__name__} has no linear layer whose name ends in "
            f"{', '.join(unknown) or 'anything'}; it has {', '.join(ends)}"
        )
    return sorted({name for names in chosen.values() for name in names})
