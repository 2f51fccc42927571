"""Cosmos-Predict2.5: text, image and video to world by given frames. Times go in as 0 .. 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.config import Guidance
from cosmos_rl_wfm.models.networks.family import (
    Family,
    frame_mask,
    parameter_dtype,
    projected_once,
    put_given,
    straight_on_given,
)

GIVEN_TIME = 1e-4
"""Time of given frames."""


class Cosmos(Family):
    """CosmosTransformer3DModel: given frames replace noise, and a mask channel marks them."""

    guidance: Guidance = "beyond_conditional"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.channels = self._value("out_channels")
        first, second, third = self._value("patch_size")
        self.patch = (first, second, third)
        self._projects_text = config.get("use_crossattn_projection", False)
        self.text_width = self._value("crossattn_proj_in_channels" if self._projects_text else "text_embed_dim")
        frames, rows, columns = self._value("max_size")
        self.largest = (frames, rows, columns)
        self._has_mask = self._value("in_channels") == self.channels + 1
        if not self._has_mask and self._value("in_channels") != self.channels:
            raise UserError(
                f"model: a CosmosTransformer3DModel with in_channels = {config['in_channels']} is not supported; "
                f"Predict2.5 has out_channels + 1 = {self.channels + 1}"
            )
        if config.get("img_context_dim_in") or config.get("controlnet_block_every_n"):
            raise UserError("model: Cosmos-Transfer networks are not supported; give one of Predict2.5")
        _stand_in_for_torchvision()

    def negative_prompt(self) -> str:
        from diffusers.pipelines.cosmos.pipeline_cosmos2_5_predict import DEFAULT_NEGATIVE_PROMPT

        return DEFAULT_NEGATIVE_PROMPT

    def velocity(self, network: nn.Module, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        dtype = parameter_dtype(network)
        inputs = put_given(condition, latents).to(dtype)
        mask = frame_mask(condition, latents)
        timestep = times
        if condition.given is not None:
            if not self._has_mask:
                raise UserError("given frames need a network with a mask channel: in_channels = out_channels + 1")
            timestep = torch.where(mask, GIVEN_TIME, times[:, None, None, None, None])
        condition = condition if self._projects_text else condition.gathered()
        with projected_once(network, "crossattn_proj", condition):
            v = network(
                hidden_states=inputs,
                timestep=timestep,
                encoder_hidden_states=condition.text.to(dtype),
                condition_mask=mask.to(dtype).expand(-1, -1, -1, *latents.shape[3:]) if self._has_mask else None,
                padding_mask=inputs.new_zeros(1, 1, *latents.shape[3:]),  # nothing is padding
                return_dict=False,
            )[0]
        return straight_on_given(v, condition, latents, times)


def _stand_in_for_torchvision() -> None:
    """Give diffusers' network the one function of torchvision that it calls, where torchvision is not installed.

    It resizes the padding mask to the latents. CPU builds of torchvision are not on PyPI, and nothing else needs it.
    """
    from diffusers.models.transformers import transformer_cosmos
    from diffusers.utils import is_torchvision_available

    if not is_torchvision_available():
        functional, modes = SimpleNamespace(resize=_resize), SimpleNamespace(NEAREST=_NEAREST)
        transforms = SimpleNamespace(functional=functional, InterpolationMode=modes)
        module: Any = transformer_cosmos
        module.transforms = transforms


_NEAREST = "nearest"


def _resize(image: Tensor, size: Sequence[int], interpolation: str) -> Tensor:
    """[..., C, H, W] -> [..., C, *size] by the nearest pixel, the only mode that Cosmos uses."""
    assert interpolation == _NEAREST
    return F.interpolate(image, size=tuple(size), mode=interpolation)
