"""Codecs between video and latents: the autoencoders of diffusers, and plain pixels.

uint8 [B, F, H, W, 3] -> float [B, 3, F, H, W] in [-1, 1] -- encode --> normalised latents [B, C, f, h, w]
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import to_device

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLWan, ModelMixin


PIXELS_AT_ONCE = 2**19
"""Pixels, over all frames, of the clips that an autoencoder takes together: one by one, small clips fill no processor,
and a batch of large ones does not fit into memory."""


class Codec(ABC):
    """clips float32 [B, 3, F, H, W] in [-1, 1] <-> normalised latents float32 [B, C, f, h, w]."""

    modules: Sequence[nn.Module] = ()
    """Networks of the codec."""

    @abstractmethod
    def encode(self, clips: Tensor) -> Tensor:
        """[B, 3, F, H, W] -> [B, C, f, h, w]."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """[B, C, f, h, w] -> [B, 3, F, H, W]."""


def fingerprint(codec: Codec) -> str:
    """Return a hash of what determines the latents: classes, configurations, weights, and the libraries' versions."""
    total = sha256(json.dumps([type(codec).__name__, *map(version, ("diffusers", "torch"))]).encode())
    for module in codec.modules:
        network = cast(Any, module)
        config = {name: value for name, value in network.config.items() if not name.startswith("_")}
        total.update(json.dumps([type(network).__name__, config, network.use_tiling], sort_keys=True).encode())
        for name, tensor in network.state_dict().items():
            total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            total.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def clips_at_once(pixels: int) -> int:
    """Return how many clips of so many pixels, over all frames, an autoencoder takes together."""
    return max(1, PIXELS_AT_ONCE // pixels)


def to_clips(video: Tensor) -> Tensor:
    """uint8 [B, F, H, W, 3] -> float32 [B, 3, F, H, W] in [-1, 1]."""
    assert video.dtype == torch.uint8 and video.ndim == 5 and video.shape[-1] == 3, "video is uint8 [B, F, H, W, 3]"
    return video.permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0


def to_video(clips: Tensor) -> Tensor:
    """Float [B, 3, F, H, W] -> uint8 [B, F, H, W, 3]; values outside [-1, 1] are clamped."""
    pixels = ((clips.float() + 1.0) * 127.5).round().clamp(0.0, 255.0)
    return pixels.to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


class PixelCodec(Codec):
    """Latents are the pixels, in colour or grey."""

    def __init__(self, *, channels: int) -> None:
        """Raises UserError for other than 3 (colour) or 1 (grey) channels."""
        if channels not in (1, 3):
            raise UserError(f'codec = "pixels" needs a network of 3 or 1 (grey) channels; this one has {channels}')
        self._channels = channels

    def encode(self, clips: Tensor) -> Tensor:
        return clips if self._channels == 3 else clips.mean(dim=1, keepdim=True)

    def decode(self, latents: Tensor) -> Tensor:
        return latents if self._channels == 3 else latents.expand(-1, 3, -1, -1, -1)


class VideoVae(Codec):
    """AutoencoderKLWan, whose latents are normalised channel by channel: (z - mean) / std."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self._vae: Any = vae
        self.modules = (self._vae,)
        shape = (1, -1, 1, 1, 1)
        self._mean = torch.tensor(vae.config["latents_mean"]).view(shape)
        self._std = torch.tensor(vae.config["latents_std"]).view(shape)

    def encode(self, clips: Tensor) -> Tensor:
        """Encode to the posterior's mode, which is deterministic, so that latents can be cached."""
        latents = self._vae.encode(_onto(clips, self._vae), return_dict=False)[0].mode().float()
        mean, std = to_device((self._mean, self._std), latents.device)
        return (latents - mean) / std

    def decode(self, latents: Tensor) -> Tensor:
        latents = latents.float()
        mean, std = to_device((self._mean, self._std), latents.device)
        scaled = latents * std + mean
        return self._vae.decode(_onto(scaled, self._vae), return_dict=False)[0].float().to(latents.device)


class ImageVae(Codec):
    """AutoencoderKL and AutoencoderDC, whose latents are shifted and scaled as a whole; one frame."""

    def __init__(self, vae: AutoencoderKL | AutoencoderDC) -> None:
        self._vae: Any = vae
        self.modules = (self._vae,)
        self._scale = vae.config["scaling_factor"] or 1.0
        self._shift = vae.config.get("shift_factor") or 0.0

    def encode(self, clips: Tensor) -> Tensor:
        encoded = self._vae.encode(_onto(_one_frame(clips), self._vae), return_dict=False)[0]
        latents = encoded if isinstance(encoded, Tensor) else encoded.mode()
        return (latents.float() - self._shift)[:, :, None] * self._scale

    def decode(self, latents: Tensor) -> Tensor:
        scaled = _one_frame(latents).float() / self._scale + self._shift
        return self._vae.decode(_onto(scaled, self._vae), return_dict=False)[0].float()[:, :, None].to(latents.device)


def make_codec(vae: Any, *, tiling: bool = False) -> Codec:
    """Return the codec of an autoencoder of diffusers, frozen. tiling: large frames are taken in tiles."""
    from diffusers import AutoencoderKLWan

    vae.requires_grad_(False).eval()
    vae.use_tiling = tiling
    return VideoVae(vae) if isinstance(vae, AutoencoderKLWan) else ImageVae(vae)


def _one_frame(clips: Tensor) -> Tensor:
    assert clips.shape[2] == 1, f"an image autoencoder takes one frame, not {clips.shape[2]}"
    return clips[:, :, 0]


def _onto(tensor: Tensor, vae: ModelMixin) -> Tensor:
    return tensor.to(device=vae.device, dtype=vae.dtype)
