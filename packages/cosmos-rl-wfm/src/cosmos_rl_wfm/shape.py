"""The sizes of a recipe's model, read from its configuration. No torch: the controller calls this."""

from __future__ import annotations

from dataclasses import replace

from cosmos_rl_core.parallel.shape import ModelShape
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.models.classes import ATTENTION, compression, network_class
from cosmos_rl_wfm.models.config import WFMLoraSection, WFMModelConfig
from cosmos_rl_wfm.models.source import is_here, network_of, open_source, vae_of
from cosmos_rl_wfm.parallel.shape import model_shape, num_tokens


def read_shape(model: WFMModelConfig, data: WFMDataConfig) -> ModelShape | None:
    """Return the shape of a model; None if it is not known before the model is built.

    Raises UserError for a model on this machine that is not supported.
    """
    if not is_here(model):
        return None
    folder = open_source(model)
    class_name, config = network_of(model, folder)
    found = model_shape(
        {**config, "_class_name": class_name},
        dtype=model.dtype,
        lora_rank=0 if model.lora is None else model.lora.rank,
        lora_targets=_lora_targets(model.lora, class_name),
    )
    if found is None:
        return None
    _, frames, pixels = (1, 1, 1) if model.codec == "pixels" else compression(*vae_of(model, folder))
    size = data.size
    latents = (1, (size.frames - 1) // frames + 1, size.height // pixels, size.width // pixels)
    return replace(found, tokens_per_term=num_tokens(config, latents), axes=frozenset({"cp"}))


def _lora_targets(lora: WFMLoraSection | None, class_name: str) -> tuple[str, ...] | None:
    """Name suffixes of adapted layers; None for all linear layers."""
    row = network_class(class_name)
    family = ATTENTION if row is None else row.lora_targets
    wanted = family if lora is None else lora.targets(family)
    return None if wanted == "all-linear" else wanted
