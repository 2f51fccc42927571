"""The sizes of a recipe's network: for `cosmos-rl plan` and checks of [policy.parallel].

Parameters are those in the headers of the folder's safetensors. Only where there are none, for a config.json alone and
for a network from scratch, diffusers builds the network on meta; torch is imported then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from cosmos_rl_core.plan.shape import ModelShape
from cosmos_rl_core.storage.safetensors_header import read_header
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.models.classes import ATTENTION, compression, network_class
from cosmos_rl_wfm.models.config import WFMLoraSection, WFMModelConfig
from cosmos_rl_wfm.models.folder import NETWORK, ModelFolder, is_here, network_of, open_source, vae_of


def read_shape(model: WFMModelConfig, data: WFMDataConfig) -> ModelShape | None:
    """Return the shape of a model; None if it is not known before the model is built.

    Raises UserError for a model on this machine that is not supported.
    """
    if not is_here(model):
        return None
    folder = open_source(model)
    class_name, config = network_of(model, folder)
    config = {**config, "_class_name": class_name}
    shape = model_shape(
        config,
        files=network_files(folder),
        dtype=model.dtype,
        lora_rank=0 if model.lora is None else model.lora.rank,
        lora_targets=_lora_targets(model.lora, class_name),
    )
    if shape is None:
        return None
    _, frames, pixels = (1, 1, 1) if model.codec == "pixels" else compression(*vae_of(model, folder))
    size = data.size
    latents = (1, (size.frames - 1) // frames + 1, size.height // pixels, size.width // pixels)
    return replace(
        shape,
        tokens_per_term=num_tokens(_complete(config), latents),
        axes=frozenset({"cp"}),
    )


def _lora_targets(lora: WFMLoraSection | None, class_name: str) -> tuple[str, ...] | None:
    """Name suffixes of adapted layers; None for all linear layers."""
    row = network_class(class_name)
    family = ATTENTION if row is None else row.lora_targets
    targets = family if lora is None else lora.targets(family)
    return None if targets == "all-linear" else targets


_SEPARATE, _JOINT = ("CosmosTransformer3DModel", "WanTransformer3DModel"), ("SD3Transformer2DModel",)
"""Classes whose activations were measured: with cross-attention to text, and those that attend to text and video at
once."""
_NEEDED = ("num_attention_heads", "attention_head_dim", "num_layers", "patch_size")
_BUFFERS = ("pos_embed.pos_embed",)
"""Ends of the names of tensors in files that are no parameters."""
_FEED_FORWARD_COPIES = 2
"""Tensors of a feed-forward's width that its backward pass needs: before and after the activation; no gate. The second
is the input of a linear layer: it is not needed if that is frozen without an adapter."""


def model_shape(
    config: Mapping[str, Any],
    *,
    files: Sequence[Path] = (),
    dtype: Literal["float32", "bfloat16"] = "float32",
    lora_rank: int = 0,
    lora_targets: Sequence[str] | None = (),
) -> ModelShape | None:
    """Return the shape of the network of a diffusers config.json; None for a class that was not measured.

    `vocabulary` is the number of outputs for each token. Activations of cross-attention and of a block's gates
    count as `latent`, which fits measured activations. With adapters all other parameters are frozen.

    Args:
        files: its weights; without any, it is built on meta.
        dtype: dtype of matrix products.
        lora_rank: rank of adapters; 0 for none.
        lora_targets: ends of the names of the linear layers that have them, such as "to_q" or "to_out.0"; None: all.
    """
    class_name = config["_class_name"]
    if class_name not in (*_SEPARATE, *_JOINT):
        return None
    shapes = parameter_shapes(class_name, config, files)
    config, joint = _complete(config), class_name in _JOINT
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    hidden = heads * head_dim
    return ModelShape(
        num_layers=config["num_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        intermediate=_inner(shapes),
        vocabulary=shapes["proj_out.weight"][0],
        compute_dtype=dtype,
        reference_dtype=dtype,
        weights=tuple(WeightSpec(name=name, shape=shape, dtype="float32") for name, shape in sorted(shapes.items())),
        adapter_parameters=_adapter_parameters(shapes, rank=lora_rank, targets=lora_targets),
        stream_norms=2 if joint else 3,
        head_norms=any(name.endswith("norm_q.weight") for name in shapes),
        gate_copies=_FEED_FORWARD_COPIES - _is_frozen(shapes, "net.2", rank=lora_rank, targets=lora_targets),
        unread_inputs=_unread_inputs(shapes, hidden, rank=lora_rank, targets=lora_targets),
        latent=3 * hidden // 4 if joint else 2 * hidden,
        exchanges=0 if joint else 2,
    )


def num_tokens(config: Mapping[str, Any], latents: Sequence[int]) -> int:
    """Return the number of tokens of a clip, which cp shards: patches of its latents (C, f, h, w).

    In an estimate of memory one term, a denoising step, counts as this number of tokens.
    """
    patch = config["patch_size"]
    sizes = (1, patch, patch) if isinstance(patch, int) else tuple(patch)
    return math.prod(-(-length // size) for length, size in zip(latents[1:], sizes))


def _inner(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return next(
        shape[0] for name, shape in shapes.items() if name.endswith(("ff.net.0.proj.weight", "ffn.net.0.proj.weight"))
    )


def _is_frozen(shapes: Mapping[str, Any], layer: str, *, rank: int, targets: Iterable[str] | None) -> bool:
    """Whether linear layers whose names end with `layer` are neither trained nor adapted."""
    if not rank or targets is None:
        return False
    ends = tuple(f".{target}" for target in targets)
    return not any(f".{name.removesuffix('.weight')}".endswith(ends) for name in shapes if f"{layer}.weight" in name)


def _unread_inputs(shapes: Mapping[str, Any], hidden: int, *, rank: int, targets: Iterable[str] | None) -> int:
    """Numbers a token that a block with adapters does not keep: the inputs of its feed-forward and of its two gates."""
    return hidden * (_is_frozen(shapes, "net.0.proj", rank=rank, targets=targets) + (2 if rank else 0))


def _adapter_parameters(shapes: Mapping[str, tuple[int, ...]], *, rank: int, targets: Iterable[str] | None) -> int:
    """Numbers in the low-rank updates: rank x (inputs + outputs) of each adapted layer."""
    ends = ".weight" if targets is None else tuple(f".{target}.weight" for target in targets)
    adapted = (shape for name, shape in shapes.items() if f".{name}".endswith(ends))
    return rank * sum(sum(shape) for shape in adapted if len(shape) == 2)


def network_files(folder: ModelFolder | None) -> list[Path]:
    """Return the files of the network's weights; none from scratch, and for a folder with a config.json alone."""
    return [] if folder is None else folder.weights(NETWORK, missing_ok=True)


def parameter_shapes(
    class_name: str, config: Mapping[str, Any], files: Sequence[Path] = ()
) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every parameter of a network by checkpoint name: in `files`, or else as diffusers builds it.

    Raises UserError for a damaged file, and for a class or a configuration that diffusers does not have.
    """
    if not files:
        return _built_shapes(class_name, json.dumps(dict(config), sort_keys=True))
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with path.open("rb") as file:
            header = read_header(file, name=f"model.path: {path}")
        shapes |= {name: place.shape for name, place in header.items() if not name.endswith(_BUFFERS)}
    return shapes


@cache
def _built_shapes(class_name: str, config: str) -> Mapping[str, tuple[int, ...]]:
    import torch

    from cosmos_rl_core.parallel.dtensor import parameters_on_meta
    from cosmos_rl_wfm.models.build import quiet
    from cosmos_rl_wfm.models.weights import empty_network

    quiet()
    with parameters_on_meta():
        network = empty_network(class_name, json.loads(config), dtype=torch.float32)
    return {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with the keys that are read here; those it leaves out are as in diffusers."""
    if all(key in config for key in _NEEDED):
        return config
    from cosmos_rl_wfm.models.weights import with_defaults

    return with_defaults(config["_class_name"], config)
