"""A model of diffusers: the velocity network of a family, a codec, an encoder of captions.

    model.check(size)                                   once, with the size of the recipe
    latents = model.encode(video)                       once per clip, then cached
    condition = model.encode_text(captions)             once per caption, then cached
    v = model.velocity(x, times, condition)             many times, with gradient in training
    video = model.decode(latents)

`models/base.py` explains the letters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cosmos_rl_core.parallel.lora import adapter_weights, write_adapter_config
from cosmos_rl_core.parallel.offload.swap import tensors_of
from cosmos_rl_wfm.models.base import ClipSize, Condition, Grid
from cosmos_rl_wfm.models.captions import CaptionEncoder, ImageEncoder, pad_text
from cosmos_rl_wfm.models.codec import Codec, clips_at_once, fingerprint, to_clips, to_video
from cosmos_rl_wfm.models.config import Guidance
from cosmos_rl_wfm.models.folder import NETWORK, ModelFolder
from cosmos_rl_wfm.models.networks.family import Family, parameter_dtype
from cosmos_rl_wfm.models.weights import named_weights

if TYPE_CHECKING:
    from diffusers import ModelMixin


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of a model that samplers, objectives and collation need."""

    shift: float
    """Timestep shift s, t -> s t / (1 + (s - 1) t)."""
    guidance: Guidance
    """Convention that combines the velocities with and without the caption."""
    text_length: int
    """Tokens of every embedded caption."""
    negative_prompt: str = ""
    """Caption of guidance's unconditional pass."""


class DiffusersModel:
    """Made by `build.build_model`. `network` holds the trained part, with its adapters, and no other part."""

    def __init__(
        self,
        network: ModelMixin,
        *,
        family: Family,
        grid: Grid,
        traits: Traits,
        source: ModelFolder | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """Wrap `network`, whose parameters may be sharded afterwards.

        Args:
            source: the folder that the model comes from; None: made from scratch.
            compute_dtype: dtype of matrix products, by autocast, where the parameters have another.
        """
        self.network = network
        self.family, self.grid, self.traits = family, grid, traits
        self.codec: Codec | None = None
        """None in a trainer of cached latents."""
        self.captions: CaptionEncoder | None = None
        """Often as large as the network: None where no caption is embedded any more."""
        self.images: ImageEncoder | None = None
        self._source = source
        self._compute_dtype = compute_dtype

    @property
    def unguided(self) -> float:
        """The guidance scale without guidance, at which the unconditional pass is skipped."""
        return 1.0 if self.traits.guidance == "from_unconditional" else 0.0

    def check(self, size: ClipSize) -> None:
        """Raise UserError for a size that codec or network does not support, with the nearest supported one."""
        self.grid.check(size)

    def latent_shape(self, size: ClipSize) -> tuple[int, int, int, int]:
        """Return (C, f, h, w) of a clip."""
        return self.grid.latent_shape(size)

    def codec_fingerprint(self) -> str:
        """Return a hash of what determines the latents that `encode` computes of a clip."""
        assert self.codec is not None, "the model was built without its codec"
        return fingerprint(self.codec)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """uint8 [B, F, H, W, 3] -> float32 [B, C, f, h, w], normalised for the network."""
        assert self.codec is not None, "the model was built without its codec"
        parts = video.split(clips_at_once(video[0, ..., 0].numel()))
        return torch.cat([self.codec.encode(to_clips(part)).to(video.device) for part in parts])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, f, h, w] -> uint8 [B, F, H, W, 3]."""
        assert self.codec is not None, "the model was built without its codec"
        pixels = latents[0, 0].numel() * self.grid.temporal * self.grid.spatial**2
        # The autoencoder takes whole clips, as many as stay below a number of pixels; with `codec_tiling` it cuts
        # frames itself.
        # In parts: eight clips of 93 frames at 704 x 1280 are 8 GB in float32, and conversions keep three of them.
        return torch.cat([to_video(self.codec.decode(part)) for part in latents.split(clips_at_once(pixels))])

    def encode_text(self, captions: Sequence[str]) -> Condition:
        """Embed captions, on the encoder's device. No gradient."""
        assert self.captions is not None, "the model was built without its text encoder"
        return self.captions(captions)

    def cached_text(self, embeddings: Sequence[Tensor], *, where: Sequence[str] = ()) -> Condition:
        """Embeddings [l, E] of the data -> Condition. Raises UserError for one of another width."""
        width = self.family.text_width
        return pad_text(embeddings, length=self.traits.text_length, width=width, where=where)

    @torch.no_grad()
    def with_given(self, condition: Condition, video: Tensor, *, counts: Tensor) -> Condition:
        """Return `condition` with the first `counts` [B] int64 latent frames of `video` uint8 [B, F, H, W, 3] given.

        For image to video networks of Wan, the latents are those of a clip that is grey after the given frames.
        """
        assert self.codec is not None, "the model was built without its codec"
        clips = to_clips(video)
        latent_of = (torch.arange(video.shape[1], device=video.device) + self.grid.temporal - 1) // self.grid.temporal
        if self.family.blank_frames():
            clips = clips * (latent_of[None] < counts[:, None])[:, None, :, None, None]
        given = self.codec.encode(clips).to(video.device)
        mask = torch.arange(given.shape[2], device=video.device)[None] < counts[:, None]
        image = None if self.images is None else self.images(video[:, 0])
        return replace(condition, given=given, given_mask=mask, image=image)

    def velocity(self, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """Return v, float32 [B, C, f, h, w], at noisy `latents` of that shape and `times` [B] in [0, 1].

        The given frames replace those of `latents` before the network runs. There the result is noise - x_0 of
        `latents`, so that sampling ends at the given frames and their loss is 0.
        """
        assert latents.shape[1] == self.family.channels and times.shape == latents.shape[:1], "latents [B, C, f, h, w]"
        mixed = self._compute_dtype is not None and parameter_dtype(self.network) != self._compute_dtype
        with torch.autocast(latents.device.type, dtype=self._compute_dtype) if mixed else nullcontext():
            v = self.family.velocity(self.network, latents.float(), times.float(), condition)
        return v.float()

    def tensors(self) -> Iterator[Tensor]:
        """Yield parameters and buffers of all parts: network, codec, encoders of captions and images."""
        yield from tensors_of(self.network)
        for part in (self.codec, self.captions, self.images):
            if part is not None:
                yield from tensors_of(*part.modules)

    def weights(self) -> dict[str, Tensor]:
        """Live tensors by checkpoint name, tied tensors once; with adapters only those."""
        return named_weights(self.network)

    def save(self, directory: Path) -> None:
        """Write the files for loading beside the weights: configurations, scheduler, tokenizers, adapter settings."""
        if self._source is not None and self._source.is_pipeline:
            self._source.copy_others(directory, weights=False)
            self.network.save_config(directory / NETWORK)
        else:
            self.network.save_config(directory)
        if adapter_weights(self.network):
            write_adapter_config(self.network, directory)
