"""The sizes of a recipe's model, read off its configuration. No torch: the controller asks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosmos_rl_core.parallel.shape import ModelShape
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.models.config import FamilyName, WFMModelConfig
from cosmos_rl_wfm.parallel.shape import model_shape, num_tokens

CLASSES: Mapping[str, FamilyName] = {
    "WanTransformer3DModel": "wan",
    "CosmosTransformer3DModel": "cosmos",
    "SD3Transformer2DModel": "sd3",
    "SanaTransformer2DModel": "sana",
    "SanaVideoTransformer3DModel": "sana_video",
}
"""Family by class of diffusers."""
COMPRESSION: Mapping[FamilyName, tuple[int, int]] = {"wan": (4, 8), "cosmos": (4, 8), "sd3": (1, 8)}
"""Frames and pixels, along a side, that one place of the latents of a family's autoencoder stands for."""
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""Layers that get adapters, unless the recipe says which."""


def read_shape(model: WFMModelConfig, data: WFMDataConfig) -> ModelShape | None:
    """Return the shape of a model; None where it is not known before it is built."""
    config = _network(model)
    family = None if config is None else CLASSES.get(str(config.get("_class_name")))
    if config is None or family is None or (model.codec == "vae" and family not in COMPRESSION):
        return None
    lora = model.lora
    targets = () if lora is None or isinstance(lora.target_modules, str) else lora.target_modules
    found = model_shape(
        config,
        dtype=model.dtype,
        lora_rank=0 if lora is None else lora.rank,
        lora_targets=targets or ATTENTION,
    )
    if found is None:
        return None
    frames, pixels = (1, 1) if model.codec == "pixels" else COMPRESSION[family]
    size = data.size
    latents = (1, (size.frames - 1) // frames + 1, size.height // pixels, size.width // pixels)
    return replace(found, tokens_per_term=num_tokens(config, latents), axes=frozenset({"cp"}))


def _network(model: WFMModelConfig) -> dict[str, Any] | None:
    """The network's configuration, if it is at hand."""
    if not model.path:
        names = {family: name for name, family in CLASSES.items()}
        known = model.network and not model.tiny and model.family in names
        return {"_class_name": names[model.family], **model.network} if known else None  # pyright: ignore[reportArgumentType]
    folder = Path(model.path).expanduser()
    for path in (folder / "transformer" / "config.json", folder / "config.json"):
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
    return None
