"""Low-rank adapters through peft: y = W x + (alpha / rank) B A x, where A and B are trained and W stays as it is.

    <layer>.weight  ->  <layer>.base_layer.weight        [out, in]    frozen
                        <layer>.lora_A.default.weight    [rank, in]   A, random
                        <layer>.lora_B.default.weight    [out, rank]  B, zero: training starts at the base model

Adapters travel, and are written, under the names that peft gives them in its files.
Source: Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Policy, Reference
from cosmos_rl_core.types import Microbatch, PolicyOutputs
from cosmos_rl_llm.config import LoraSection

if TYPE_CHECKING:
    from peft import LoraConfig

MERGED = "merged"
"""Folder, in a directory of adapters, with the files of the merged model that are not those of the adapters."""

_ADAPTER = "default"
"""peft's name of a model's one adapter; it is part of the parameters' names and not of the files'."""
_PREFIX = "base_model.model."
"""Before every name in peft's files."""
_NAMES_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Linear layers that are left out beside stacked experts: peft would adapt the experts and the router instead."""
_PARAMETER = re.compile(rf"(?P<layer>.+)\.(?P<matrix>lora_[AB])\.{_ADAPTER}\.weight")
_FILED = re.compile(rf"{re.escape(_PREFIX)}(?P<layer>.+)\.(?P<matrix>lora_[AB])\.weight")


def add_adapters(model: PreTrainedModel, section: LoraSection, *, base: str, seed: int = 0) -> None:
    """Put adapters on the linear layers of `model`, in place, and freeze the rest.

    Args:
        base: the model's path or id, for those who load the adapters later.
        seed: of the values of A, which depend on nothing else but the layer's name.

    Raises UserError for layers that the model does not have, and where peft is not installed.
    """
    config = _peft_config(model, section)
    with torch.random.fork_rng(devices=[]):  # peft draws values of its own
        model.add_adapter(config, _ADAPTER)
    path = Path(base).expanduser()
    config.base_model_name_or_path = str(path.resolve()) if path.is_dir() else base
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if base_name(name) is None and parameter.device.type != "meta":
                parameter.copy_(initial_adapter(name, tuple(parameter.shape), seed=seed))


def initial_adapter(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Return the first value of an adapter's parameter, float32: uniform within 1 / sqrt(in) for A, zero for B."""
    found = _PARAMETER.fullmatch(name)
    assert found is not None, f"{name} is no adapter"
    if found["matrix"] == "lora_B":
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the live adapters under their names in peft's files; nothing for a model without."""
    return {
        f"{_PREFIX}{found['layer']}.{found['matrix']}.weight": parameter.detach()
        for name, parameter in model.named_parameters()
        if (found := _PARAMETER.fullmatch(name))
    }


def adapter_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers that hold A and B."""
    return [module for name, module in model.named_modules() if _PARAMETER.fullmatch(f"{name}.weight")]


def base_name(parameter: str) -> str | None:
    """Return the name in the base model's checkpoint of a parameter beside adapters; None for an adapter's own."""
    return None if _PARAMETER.fullmatch(parameter) else parameter.replace(".base_layer.", ".")


def with_adapters(plan: Mapping[str, str]) -> dict[str, str]:
    """Extend a tensor-parallel plan (layer -> "colwise", "rowwise", ...) to the parts of adapted layers.

    In columns W and B are cut along out and A is whole; in rows W and A are cut along in and B is whole.
    """
    matrix = {"colwise": "lora_B", "rowwise": "lora_A"}
    extended = dict(plan)
    for layer, style in plan.items():
        if style in matrix:
            extended |= {f"{layer}.base_layer": style, f"{layer}.{matrix[style]}.{_ADAPTER}": style}
    return extended


def write_config(model: PreTrainedModel, directory: Path, *, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write what loads a model beside its weights: configuration, with adapters theirs, and the tokenizer if any.

    adapter_config.json sends transformers to the base model, which a config.json beside it would not; that of the
    merged model therefore lies in merged/.
    """
    if adapter_weights(model):
        model.peft_config[_ADAPTER].save_pretrained(str(directory))
        model.config.save_pretrained(directory / MERGED)
    else:
        model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's safetensors, one in memory at a time."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # a file, no mapping
                yield name, file.get_tensor(name)


def merge(
    weights: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], *, scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base model's `weights` with W + scaling * B A where there is an adapter, in the type of W.

    Args:
        weights: name and tensor of the base model's checkpoint.
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


def _merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W [out, in], A [rank, in], B [out, rank] -> W + scaling * B A, computed in float32."""
    if weight.shape != (b.shape[0], a.shape[1]):
        raise UserError(f"an adapter of {b.shape[0]} x {a.shape[1]} does not fit a weight of {list(weight.shape)}")
    return (weight.float() + scaling * (b.float() @ a.float())).to(weight.dtype)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Run `model` as its base: every adapter's scale is 0 inside.

    peft's own switch also stops gradients of the adapters, which fully sharded modules would remember.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.set_scale(_ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(_ADAPTER, 1.0)


def reference_of(policy: Policy) -> Reference | None:
    """The model under a policy's adapters, as the reference of a KL term; None for a policy without adapters."""
    return BaseOfAdapters(policy) if adapter_layers(policy.module) else None


class BaseOfAdapters:
    """A policy with its adapters switched off for each forward pass: no copy of the model is needed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs:
        """As the policy's, without the adapters."""
        with adapters_off(self._policy.module):
            return self._policy.forward(microbatch, with_entropy=with_entropy)


def _peft_config(model: PreTrainedModel, section: LoraSection) -> LoraConfig:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError(f"[model.lora] needs peft ({error}); pip install 'cosmos-rl-llm[lora]'") from error
    targets, excluded = _targets(model, section.target_modules)
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # pyright: ignore[reportArgumentType]  # peft divides it by the rank
        lora_dropout=0.0,
        bias="none",
        target_modules=targets,
        exclude_modules=excluded or None,
        task_type="CAUSAL_LM",
    )


def _targets(model: PreTrainedModel, wanted: str | tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Last names of the linear layers to adapt, and full names of other modules that are called the same."""
    head = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if name}
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head}
    if any(parameter.ndim == 3 for parameter in model.parameters()):
        linear = {name for name in linear if _last(name) not in _NAMES_OF_EXPERTS}
    known = sorted({_last(name) for name in linear})
    targets = known if isinstance(wanted, str) else list(wanted)
    unknown = sorted(set(targets) - set(known))
    if unknown or not targets:
        raise UserError(
            f"[model.lora] target_modules: {type(model).__name__} has no linear layer called "
            f"{', '.join(unknown) or 'anything'}; it has {', '.join(known) or 'none'}"
        )
    return targets, [name for name in modules if _last(name) in targets and name not in linear]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
