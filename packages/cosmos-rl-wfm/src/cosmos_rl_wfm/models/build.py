"""Builds the model of a [model] section: from a diffusers folder by parts, or from scratch.

parts: network -> trainer of cached latents     codec -> encode, decode     text -> encode_text
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Literal

import torch
from torch import nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import quiet_torchao
from cosmos_rl_core.observe.startup import READING, phase
from cosmos_rl_core.parallel.device import own_device
from cosmos_rl_core.parallel.dtensor import materialise, parameters_on_meta
from cosmos_rl_core.parallel.lora import add_adapters, fill_adapters, pick_layers
from cosmos_rl_wfm.models.base import Grid
from cosmos_rl_wfm.models.captions import (
    CachedCaptions,
    CaptionEncoder,
    ImageEncoder,
    OffloadedCaptions,
    WordEncoder,
    load_captions,
)
from cosmos_rl_wfm.models.classes import ATTENTION, compression, network_class
from cosmos_rl_wfm.models.codec import Codec, PixelCodec, make_codec
from cosmos_rl_wfm.models.config import WFMLoraSection, WFMModelConfig
from cosmos_rl_wfm.models.dry_run import try_forward
from cosmos_rl_wfm.models.folder import NETWORK, ModelFolder, network_of, open_source, vae_of
from cosmos_rl_wfm.models.model import DiffusersModel, Traits
from cosmos_rl_wfm.models.networks.families import make_family
from cosmos_rl_wfm.models.networks.family import Family
from cosmos_rl_wfm.models.weights import empty_network, fill, random_network

Part = Literal["network", "codec", "text"]

WORDS = 16
"""Tokens of a caption of text.encoder = "words"."""


def build_model(
    config: WFMModelConfig,
    *,
    parts: Collection[Part] = ("network",),
    seed: int = 0,
    parameter_dtype: torch.dtype | None = None,
    filled: bool = True,
    device: torch.device | None = None,
) -> DiffusersModel:
    """Build the requested `parts`; the network is always built.

    Args:
        seed: of random weights, and of adapters' first values.
        parameter_dtype: of the network; None: the `dtype` that it computes in.
        filled: False leaves the parameters of a model with a path on meta, for a network that is sharded first;
            `fill_network` then allocates and reads this rank's shards.
        device: of all parts; None: this process's own.

    Raises UserError for a model that does not exist, or whose parts are not supported.
    """
    quiet()
    phase(READING)
    device = device or own_device()
    dtype = getattr(torch, config.dtype)
    folder = _open(config, parts)
    class_name, values = network_of(config, folder)
    row = network_class(class_name)
    if row is None:
        try_forward(class_name, values)
    network_dtype = parameter_dtype or dtype
    if folder is None:
        network = random_network(class_name, values, dtype=network_dtype, seed=seed)
    elif filled:
        network = empty_network(class_name, values, dtype=network_dtype)
        fill(network, folder.weights(NETWORK))
    else:
        with parameters_on_meta():
            network = empty_network(class_name, values, dtype=network_dtype)
    family = make_family(class_name, network.config)
    if config.lora is not None:
        family_targets = ATTENTION if row is None else row.lora_targets
        _add_adapters(network, config.lora, family=family_targets, base=config.path, seed=seed)
    if folder is None or filled:
        torch.nn.Module.to(network, device)
    model = DiffusersModel(
        network,
        family=family,
        grid=_grid(config, family, folder),
        traits=_traits(config, family, folder),
        source=folder,
        compute_dtype=None if network_dtype == dtype else dtype,
    )
    _add_parts(model, config, folder, parts, seed=seed, device=device)
    return model


def _add_adapters(
    network: nn.Module, section: WFMLoraSection, *, family: tuple[str, ...], base: str, seed: int
) -> None:
    """Put adapters on the network. Raises UserError for missing layers, and without peft."""
    from diffusers.loaders import PeftAdapterMixin

    if not isinstance(network, PeftAdapterMixin):
        raise UserError(f"[model.lora] {type(network).__name__} takes no adapters in diffusers; remove the section")
    layers = pick_layers(network, section.targets(family))
    add_adapters(network, section, layers=layers, package="cosmos-rl-wfm", base=base, seed=seed)


def load_parts(
    model: DiffusersModel,
    config: WFMModelConfig,
    parts: Collection[Part],
    *,
    seed: int = 0,
    device: torch.device | None = None,
) -> None:
    """Load the codec or the text encoder of a model that was built without it. Existing parts stay.

    `device`: of these parts; None: this process's own.
    """
    quiet()
    _add_parts(model, config, _open(config, parts), parts, seed=seed, device=device or own_device())


def _add_parts(
    model: DiffusersModel,
    config: WFMModelConfig,
    folder: ModelFolder | None,
    parts: Collection[Part],
    *,
    seed: int,
    device: torch.device,
) -> None:
    if "codec" in parts and model.codec is None:
        model.codec = _codec(config, model.family, folder, seed=seed, device=device)
        model.images = _images(config, folder, device=device)
    if "text" in parts and model.captions is None:
        model.captions = _captions(config, model.family, folder, model.traits, device=device)


def fill_network(model: DiffusersModel, config: WFMModelConfig, *, device: torch.device, seed: int = 0) -> None:
    """Allocate and read the weights of a network built with `filled=False`: this rank's shards of a sharded one.

    Args:
        device: of the parameters.
        seed: of adapters' first values.
    """
    folder = _open(config, ("network",))
    assert folder is not None, "a model from scratch is filled when it is built"
    materialise(model.network, device=device)
    fill_adapters(model.network, seed=seed)
    fill(model.network, folder.weights(NETWORK))


def quiet() -> None:
    """Import diffusers without the log lines of diffusers and torchao about missing packages."""
    quiet_torchao()
    # diffusers replaces its own module while it is imported: an `import` in a second thread (policy and engine of an
    # inline run are built in threads) would go on with the replaced module
    import_module("diffusers")
    from diffusers.utils.logging import set_verbosity_error

    set_verbosity_error()


def _open(config: WFMModelConfig, parts: Collection[Part]) -> ModelFolder | None:
    names = [NETWORK, "scheduler", *(["vae", "image_encoder", "image_processor"] if "codec" in parts else [])]
    if "text" in parts and config.text.encoder == "model":
        names += [f"{kind}{number}" for kind in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")]
    return open_source(config, names)


def _grid(config: WFMModelConfig, family: Family, folder: ModelFolder | None) -> Grid:
    channels, temporal, spatial = family.channels, 1, 1
    if config.codec == "vae":
        name, values = vae_of(config, folder)
        channels, temporal, spatial = compression(name, values)
        if channels != family.channels:
            raise UserError(f"model: the network takes {family.channels} channels and its autoencoder makes {channels}")
    return Grid(
        channels=channels,
        temporal=temporal,
        spatial=spatial,
        patch=family.patch,
        largest=family.largest,
        only_images=family.only_images,
    )


def _codec(
    config: WFMModelConfig, family: Family, folder: ModelFolder | None, *, seed: int, device: torch.device
) -> Codec:
    if config.codec == "pixels":
        return PixelCodec(channels=family.channels)
    dtype = getattr(torch, config.codec_dtype)
    name, values = vae_of(config, folder)
    if folder is None:
        vae = random_network(name, values, dtype=dtype, seed=seed)
    else:
        vae = empty_network(name, values, dtype=dtype)
        fill(vae, folder.weights("vae"))
    return make_codec(torch.nn.Module.to(vae, device), tiling=config.codec_tiling)


def _captions(
    config: WFMModelConfig, family: Family, folder: ModelFolder | None, traits: Traits, *, device: torch.device
) -> CaptionEncoder:
    widths = {"width": family.text_width, "pooled_width": family.pooled_width}
    if config.text.encoder == "words":
        return WordEncoder(**widths, length=traits.text_length, seed=config.text.seed)
    if config.text.encoder == "cached":
        return CachedCaptions(**widths, length=traits.text_length)
    assert folder is not None, "the config lets no model from scratch ask for an encoder"
    if not folder.has("text_encoder"):
        raise UserError(
            f"model.path = {config.path!r} has no text_encoder: give the folder of a whole pipeline, or set "
            'text.encoder = "words" or "cached"'
        )
    offload = config.text.offload
    encoder = load_captions(
        folder,
        dtype=getattr(torch, config.dtype),
        device=torch.device("cpu") if offload else device,
        length=traits.text_length,
        instruction=config.text.instruction,
        negative_prompt=traits.negative_prompt,
    )
    return OffloadedCaptions(encoder, device=device) if offload else encoder


def _images(config: WFMModelConfig, folder: ModelFolder | None, *, device: torch.device) -> ImageEncoder | None:
    if folder is None or not folder.has("image_encoder"):
        return None
    return ImageEncoder(folder, dtype=getattr(torch, config.dtype), device=device)


def _traits(config: WFMModelConfig, family: Family, folder: ModelFolder | None) -> Traits:
    scheduler = folder.config("scheduler") if folder is not None and folder.has("scheduler") else {}
    shift = config.shift or scheduler.get("flow_shift") or scheduler.get("shift") or 1.0
    length = config.text.length or (WORDS if config.text.encoder == "words" else family.text_length)
    return Traits(
        shift=float(shift),
        guidance=family.guidance if config.guidance == "auto" else config.guidance,
        text_length=length,
        negative_prompt=_negative_prompt(config, family),
    )


def _negative_prompt(config: WFMModelConfig, family: Family) -> str:
    if config.text.negative_prompt is not None:
        return config.text.negative_prompt
    return family.negative_prompt() if config.text.encoder == "model" else ""
