"""The name of a file of weights that loaders of the configurations beside it expect."""

from __future__ import annotations

import json
from collections.abc import Mapping

ADAPTER_CONFIG, CONFIG = "adapter_config.json", "config.json"
PIPELINE_CONFIG = f"transformer/{CONFIG}"
MERGED = "merged/"
"""Folder of files of a checkpoint with adapters that belong to the merged model alone."""
_DIFFUSERS = "diffusion_pytorch_model"


def weights_name(beside: Mapping[str, bytes], *, merged: bool = False) -> str:
    """Return the name without ".safetensors", with its folder.

    adapter_model                        peft's, beside its settings; not for adapters that are `merged`
    transformer/diffusion_pytorch_model  a pipeline of diffusers
    diffusion_pytorch_model              one of its networks
    model                                transformers', and all others
    """
    if ADAPTER_CONFIG in beside and not merged:
        return "adapter_model"
    if PIPELINE_CONFIG in beside:
        return f"transformer/{_DIFFUSERS}"
    if "_diffusers_version" in json.loads(beside.get(CONFIG, b"{}")):
        return _DIFFUSERS
    return "model"
