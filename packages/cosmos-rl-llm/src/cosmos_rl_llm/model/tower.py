"""Towers of Qwen-VL on a GPU: sizes of pictures stay in host memory, so that no layer waits for the GPU to read them.

    grids [items, 3] on the host -> places of patches, windows      one copy to the GPU
                                 -> ends of frames and windows      on the host, where each layer splits by them

transformers computes all of these from the grids, where they are, and reads the ends back in each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from cosmos_rl_core.parallel.device import to_device

GRIDS = ("image_grid_thw", "video_grid_thw")
"""Keywords of a forward pass that stay in host memory."""


def media_to_device(media: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the keywords of a forward pass with pictures on `device`, their sizes on the host."""
    moved = to_device({name: tensor for name, tensor in media.items() if name not in GRIDS}, device)
    return {name: moved.get(name, tensor) for name, tensor in media.items()}


def read_grids_on_host(model: PreTrainedModel) -> None:
    """Let the tower of a Qwen-VL `model` compute places and ends on the host. Other towers take no grids."""
    if model.config.model_type in _FAMILIES:
        cast(Any, model.base_model).visual.register_forward_pre_hook(_with_places, with_kwargs=True)


_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def _with_places(tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add what the tower's forward pass would compute from its grids, under the keywords from which it takes it."""
    grids = given["grid_thw"]
    if "cu_seqlens" in given:  # of another hook on the same model
        return args, given
    merge = tower.spatial_merge_size
    ends = {"cu_seqlens": get_vision_cu_seqlens(grids)}
    places = {"position_ids": get_vision_position_ids(grids, merge)}
    kind = tower.config.model_type.removesuffix("_vision")
    if kind == "qwen2_5_vl":
        index, ends["cu_window_seqlens"] = get_vision_window_index(
            grids, spatial_merge_size=merge, window_size=tower.window_size, patch_size=tower.patch_size
        )
        places["window_index"] = index
    elif kind.startswith("qwen3_vl"):
        places["interp_indices"], places["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
    return args, {**given, **to_device(places, args[0].device), **ends}
