"""The network's weights: created empty, initialised at random, read from safetensors, named for the engines.

network = empty_network(name, config)     parameters are uninitialised memory; within `parameters_on_meta`, none
... shard, materialise                    each rank has memory for its shards
fill(network, files)                      reads those shards, by name
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_core.parallel.dtensor import fill_own_part
from cosmos_rl_core.parallel.lora import adapter_weights, base_name
from cosmos_rl_wfm.models.folder import NETWORK

if TYPE_CHECKING:
    from diffusers import ModelMixin

_INITIALISERS = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.uniform_}
_INITIALISERS |= {nn.init.kaiming_uniform_, nn.init.xavier_uniform_}


class _KeepParameters(TorchFunctionMode):
    """Skips the random initialisation of parameters in constructors of modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _INITIALISERS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def empty_network(class_name: str, config: Mapping[str, Any], *, dtype: torch.dtype) -> ModelMixin:
    """Make a model of diffusers with uninitialised parameters; tensors that it computes itself have values.

    Raises UserError for an unknown class, or arguments that it does not have.
    """
    with _KeepParameters():
        network = _build(class_name, config)
    hold(network, dtype)
    return network


def random_network(class_name: str, config: Mapping[str, Any], *, dtype: torch.dtype, seed: int) -> ModelMixin:
    """Make a model of diffusers with random values that depend only on the seed. The caller's random state stays.

    Raises UserError as `empty_network`.
    """
    with forked_rng(seed=seed):
        network = _build(class_name, config)
    hold(network, dtype)
    return network


def with_defaults(class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the defaults of its class in diffusers for missing keys."""
    import diffusers

    kind = getattr(diffusers, class_name, None)
    parameters = {} if kind is None else inspect.signature(kind.__init__).parameters
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    return {**defaults, **config}


def hold(network: ModelMixin, dtype: torch.dtype) -> None:
    """Cast parameters and persistent buffers in place; in bfloat16, parameters that the class keeps in float32 stay."""
    kept = (getattr(network, "_keep_in_fp32_modules", None) or []) if dtype != torch.float32 else []
    for name, tensor in network.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not set(kept) & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)


@torch.no_grad()
def fill(network: nn.Module, files: Sequence[Path]) -> None:
    """Fill this rank's shard of each parameter and persistent buffer from safetensors, in the tensor's dtype.

    Adapters keep the values they have. Raises UserError for weights that are missing or of another shape.
    """
    with ExitStack() as opened:
        sources: dict[str, safe_open] = {}
        for path in files:
            try:
                file = opened.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"model.path: {path} is not a safetensors file ({error})") from error
            sources |= dict.fromkeys(file.keys(), file)
        base_names = {name: base_name(name) for name in network.state_dict()}
        missing = sorted(name for name in base_names.values() if name is not None and name not in sources)
        if missing:
            raise UserError(
                f"model.path: {files[0].parent} lacks {len(missing)} weights of {type(network).__name__} "
                f"({', '.join(missing[:5])}); check that config.json and the weights belong together"
            )
        for name, tensor in network.state_dict(keep_vars=True).items():
            if (source := base_names[name]) is not None:
                _fill(tensor, source, sources[source])


def named_weights(network: nn.Module) -> dict[str, Tensor]:
    """Live parameters and persistent buffers by checkpoint name; tied tensors once, under their first name.

    For a network with adapters only these: nothing else changes.
    """
    if adapters := adapter_weights(network):
        return adapters
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def write_diffusers_adapters(directory: Path) -> None:
    """Write peft's adapters in `directory` in the file of diffusers too, which `load_lora_weights` reads.

    It names the part of the pipeline, and has alpha in its header: without it diffusers takes alpha = rank.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    adapters = load_file(directory / "adapter_model.safetensors")
    named = {f"{NETWORK}.{name.removeprefix('base_model.model.')}": tensor for name, tensor in adapters.items()}
    settings = {f"{NETWORK}.{name}": value for name, value in config.items()}
    header = {"format": "pt", "lora_adapter_metadata": json.dumps(settings, sort_keys=True)}
    save_file(named, directory / "pytorch_lora_weights.safetensors", metadata=header)


def _build(class_name: str, config: Mapping[str, Any]) -> ModelMixin:
    import diffusers

    model_class = getattr(diffusers, class_name, None)
    if not isinstance(model_class, type) or not issubclass(model_class, diffusers.ModelMixin):
        raise UserError(f"model: diffusers {diffusers.__version__} has no model class {class_name!r}")
    values = {key: value for key, value in config.items() if not key.startswith("_")}
    unknown = sorted(set(values) - set(inspect.signature(model_class.__init__).parameters))
    if unknown:
        known = ", ".join(sorted(set(inspect.signature(model_class.__init__).parameters) - {"self"}))
        raise UserError(f"model: {class_name} has no argument {', '.join(unknown)}; it has {known}")
    try:
        return cast(Any, model_class).from_config(dict(config)).eval()
    except (TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise UserError(f"model: {class_name} cannot be made from this configuration: {error}") from error


def _fill(tensor: Tensor, name: str, source: safe_open) -> None:
    stored = source.get_slice(name)
    if list(tensor.shape) != stored.get_shape():
        raise UserError(
            f"model.path: {name} is {stored.get_shape()} in the safetensors and {list(tensor.shape)} by config.json; "
            "check that they belong together"
        )
    fill_own_part(tensor, stored.__getitem__)
