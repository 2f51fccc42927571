"""The backbone of a pi model: SigLIP and Gemma of transformers' PaliGemma, run once per decision.

    images -- SigLIP, projector --> tokens of each camera  \
    instruction -- embedding --> tokens                     >-- Gemma, bidirectional --> Prefix
    state -- linear --> one token (state = "prefix")       /
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosmos_rl_core.rollout.kv_cache import cache_argument
from cosmos_rl_vla.models.base import Inputs
from cosmos_rl_vla.models.pi.config import PiConfig
from cosmos_rl_vla.models.pi.expert import Prefix, pad_last

if TYPE_CHECKING:
    from transformers import PaliGemmaConfig


class Backbone(nn.Module):
    """PaliGemma without its output head."""

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        from transformers import PaliGemmaModel

        self.paligemma: Any = PaliGemmaModel(_paligemma_config(config))
        # SigLIP's initial position embedding, 1 / sqrt(width), is small beside the pixels': a small model would not
        # learn positions
        nn.init.normal_(self.paligemma.vision_tower.embeddings.position_embedding.weight, std=0.5)
        self.image_size = config.vision.image_size
        self.max_state_dim = config.max_state_dim
        self.state_in = nn.Linear(config.max_state_dim, config.language.width) if config.state == "prefix" else None

    def forward(self, inputs: Inputs) -> Prefix:
        """Return keys, values and outputs at the P tokens of each observation."""
        embedded, mask = self._embed(inputs)
        kept = _KeptKeys()
        model = self.paligemma.language_model
        outputs = model(
            inputs_embeds=embedded,
            attention_mask=mask[:, None, None].expand(-1, 1, mask.shape[1], -1),
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            **{cache_argument(model): kept},
        )
        return Prefix(
            keys=tuple(kept.keys.values()),
            values=tuple(kept.values.values()),
            hidden=outputs.last_hidden_state,
            mask=mask,
        )

    def _embed(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        # Gemma's embedding scales text tokens by sqrt(width); tokens of images and state are not scaled
        words = self.paligemma.language_model.embed_tokens(inputs.tokens)
        parts, masks = [words], [inputs.token_mask]
        batch, cameras = inputs.images.shape[:2]
        if cameras:
            pixels = to_pixels(inputs.images.flatten(0, 1), size=self.image_size).to(words.dtype)
            images = (
                self.paligemma.get_image_features(pixels).pooler_output.unflatten(0, (batch, cameras)).flatten(1, 2)
            )
            parts.insert(0, images)
            masks.insert(0, inputs.token_mask.new_ones(images.shape[:2]))
        if self.state_in is not None:
            state = pad_last(inputs.state, self.max_state_dim)
            parts.append(self.state_in(state.to(self.state_in.weight.dtype))[:, None].to(words.dtype))
            masks.append(inputs.token_mask.new_ones(batch, 1))
        return torch.cat(parts, dim=1), torch.cat(masks, dim=1)


class _KeptKeys:
    """A minimal cache for Gemma: stores each layer's keys and values.

    A layer recomputed in the backward pass (activation checkpointing) overwrites its own with the same values.
    """

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store those of a layer and return them."""
        self.keys[layer], self.values[layer] = keys, values
        return keys, values


def to_pixels(images: Tensor, *, size: int) -> Tensor:
    """uint8 [N, height, width, 3] -> float32 [N, 3, size, size] in [-1, 1], letterboxed with black."""
    pixels = images.permute(0, 3, 1, 2).to(torch.float32)
    height, width = pixels.shape[2:]
    if (height, width) != (size, size):
        ratio = max(height, width) / size
        inner = (max(1, int(height / ratio)), max(1, int(width / ratio)))
        pixels = F.interpolate(pixels, size=inner, mode="bilinear", align_corners=False)
        top, left = (size - inner[0]) // 2, (size - inner[1]) // 2
        pixels = F.pad(pixels, (left, size - inner[1] - left, top, size - inner[0] - top))
    return pixels / 127.5 - 1


def _paligemma_config(config: PiConfig) -> PaliGemmaConfig:
    from transformers import PaliGemmaConfig

    vision, language = config.vision, config.language
    return PaliGemmaConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "hidden_size": vision.width,
            "num_hidden_layers": vision.depth,
            "intermediate_size": vision.mlp,
            "num_attention_heads": vision.heads,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "gemma",
            "vocab_size": config.vocab_size,
            "hidden_size": language.width,
            "num_hidden_layers": language.depth,
            "intermediate_size": language.mlp,
            "num_attention_heads": language.heads,
            "num_key_value_heads": language.kv_heads,
            "head_dim": language.head_dim,
        },
        projection_dim=language.width,
        hidden_size=language.width,
        vocab_size=config.vocab_size,
        image_token_index=config.vocab_size,
    )
