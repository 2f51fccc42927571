"""Wan2.1: text to video, and image to video by extra channels. Times go in as 0 .. 1000."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.networks.family import (
    Family,
    frame_mask,
    parameter_dtype,
    projected_once,
    put_given,
    straight_on_given,
)


class Wan(Family):
    """WanTransformer3DModel.

    Image to video networks (in_channels = 2 C + frames per latent frame) take the noisy latents, a mask, and the
    latents of a clip that is grey after the given frames; they denoise given frames like all others. In text to video
    networks given frames replace noise and have time 0; each token has its own time, as in Wan2.2 5B.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.channels = self._value("out_channels") or self._value("in_channels")
        first, second, third = self._value("patch_size")
        self.patch = (first, second, third)
        self.text_width = self._value("text_dim")
        reach = config.get("rope_max_seq_len", 1024)
        self.largest = (first * reach, second * reach, third * reach)
        self._mask_channels = self._value("in_channels") - 2 * self.channels
        if self._value("in_channels") != self.channels and self._mask_channels < 1:
            raise UserError(
                f"model: a WanTransformer3DModel with in_channels = {config['in_channels']} and out_channels = "
                f"{self.channels} is neither text to video (equal) nor image to video (2 x out_channels + 4)"
            )

    def blank_frames(self) -> bool:
        return self._mask_channels > 0

    def velocity(self, network: nn.Module, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        dtype = parameter_dtype(network)
        if self.config.get("image_dim") and condition.image is None:
            raise UserError(
                "this network of Wan takes an embedded image beside the text: give the folder of its whole pipeline, "
                "which has the image_encoder, and set model.given min_frames to 1 or more"
            )
        image = None if condition.image is None else condition.image.to(dtype)
        text = (condition.text * condition.text_mask[..., None]).to(dtype)  # the pipeline's padding is zero

        def call(inputs: Tensor, timestep: Tensor) -> Tensor:
            with projected_once(network, "condition_embedder.text_embedder", condition):
                return network(
                    hidden_states=inputs.to(dtype),
                    timestep=timestep,
                    encoder_hidden_states=text,
                    encoder_hidden_states_image=image,
                    return_dict=False,
                )[0]

        if self.blank_frames():
            return call(self._with_channels(latents, condition), times * 1000.0)
        if condition.given is None:
            return call(latents, times * 1000.0)
        v = call(put_given(condition, latents), self._token_times(latents, times, condition))
        return straight_on_given(v, condition, latents, times)

    def _with_channels(self, latents: Tensor, condition: Condition) -> Tensor:
        """[B, C + mask + C, f, h, w]: noisy latents, mask of given frames, latents of the clip with a grey end."""
        if condition.given is None:
            raise UserError(
                "an image to video network of Wan needs given frames: set model.given min_frames and max_frames to 1 "
                "or more, and give rows a video"
            )
        mask = frame_mask(condition, latents).to(latents.dtype).expand(-1, self._mask_channels, -1, *latents.shape[3:])
        return torch.cat([latents, mask, condition.given.to(latents.dtype)], dim=1)

    def _token_times(self, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """[B, tokens]: 0 on given frames."""
        if self.patch[0] != 1:
            raise UserError("given frames need a network whose patches span one latent frame: patch_size[0] = 1")
        rows, columns = latents.shape[3] // self.patch[1], latents.shape[4] // self.patch[2]
        of_frames = torch.where(frame_mask(condition, latents)[:, 0, :, 0, 0], 0.0, times[:, None] * 1000.0)
        return of_frames.repeat_interleave(rows * columns, dim=1)
