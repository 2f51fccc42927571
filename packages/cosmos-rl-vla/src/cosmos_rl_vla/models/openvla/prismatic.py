"""Vision input of a prismatic model (arXiv:2402.07865): two towers, and a projector to the language model.

    images --+-- DINOv2 --+
             +-- SigLIP --+-- concatenated -- projector --> tokens

Parameters have the names of the public checkpoints, except for the parts of `VisionTower` from transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosmos_rl_vla.models.openvla.config import OpenVLAConfig, TowerKind
from cosmos_rl_vla.models.openvla.vision_tower import VisionTower

_HALF = (0.5, 0.5, 0.5)
_NORMS: Mapping[TowerKind, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "dinov2": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "siglip": (_HALF, _HALF),
}
"""Mean and std of red, green and blue in a tower's training data: ImageNet's, and SigLIP's."""


class VisionBackbone(nn.Module):
    """Images of several cameras -> patch features, one camera after the other."""

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        self.featurizer, self.fused_featurizer = (VisionTower(size) for size in config.towers)
        self._sizes, self._crop = config.towers, config.image_crop
        self.width = sum(size.width for size in config.towers)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [B, cameras, height, width, 3] -> [B, cameras * patches, width]."""
        flat, features = images.flatten(0, 1), []
        for tower, size in zip((self.featurizer, self.fused_featurizer), self._sizes, strict=True):
            mean, std = (torch.tensor(x, device=images.device)[:, None, None] for x in _NORMS[size.kind])
            pixels = (stretched(flat, size=size.image_size, crop=self._crop) - mean) / std
            features.append(tower(pixels.to(tower.pos_embed.dtype)))
        return torch.cat(features, dim=-1).unflatten(0, images.shape[:2]).flatten(1, 2)


class Projector(nn.Module):
    """Patch features -> the language model's width."""

    def __init__(self, width: int, language_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, language_width)
        self.fc3 = nn.Linear(language_width, language_width)

    def forward(self, features: Tensor) -> Tensor:
        """[..., width] -> [..., language width]."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(features)))))


class ProprioProjector(nn.Module):
    """Proprioception -> one token of the language model (OpenVLA-OFT, arXiv:2502.19645)."""

    def __init__(self, state_dim: int, language_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, language_width)
        self.fc2 = nn.Linear(language_width, language_width)

    def forward(self, state: Tensor) -> Tensor:
        """[B, n], normalised, clipped to [-1, 1] -> [B, 1, language width]."""
        return self.fc2(F.gelu(self.fc1(state.clamp(-1, 1).to(self.fc1.weight.dtype))))[:, None]


def stretched(images: Tensor, *, size: int, crop: float) -> Tensor:
    """uint8 [N, height, width, 3] -> [N, 3, size, size] in [0, 1]: a centre crop, `crop` of the area, resized."""
    pixels = images.permute(0, 3, 1, 2)
    height, width = (round(side * crop**0.5) for side in pixels.shape[2:])
    top, left = (pixels.shape[2] - height) // 2, (pixels.shape[3] - width) // 2
    pixels = pixels[:, :, top : top + height, left : left + width].float()
    if (height, width) != (size, size):
        pixels = F.interpolate(pixels, size=(size, size), mode="bicubic", align_corners=False, antialias=True)
        pixels = pixels.round().clamp(0, 255)
    return pixels / 255
