"""Vision input of a prismatic model (arXiv:2402.07865): two towers, and a projector to the language model.

    images --+-- DINOv2 --+
             +-- SigLIP --+-- concatenated -- projector --> tokens

Parameters have the names of the public checkpoints, except for the blocks of `VisionTower`, which are transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_vla.models.openvla.config import OpenVLAConfig, TowerKind, TowerSize

REGISTERS = 4
"""Number of register tokens of timm's "reg4" models."""


class VisionTower(nn.Module):
    """Pixels -> patch features."""

    def __init__(self, size: TowerSize) -> None:
        super().__init__()
        side = size.image_size // size.patch_size
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv2d(3, size.width, kernel_size=size.patch_size, stride=size.patch_size)}
        )
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, side * side, size.width))
        summary = size.kind == "dinov2"
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, size.width)) if summary else None
        self.reg_token = nn.Parameter(0.02 * torch.randn(1, REGISTERS, size.width)) if summary else None
        self.encoder = _dinov2_encoder(size) if summary else _siglip_encoder(size)

    def blocks(self) -> nn.ModuleList:
        """Return the blocks in the order they run."""
        layers = self.encoder.layers if self.cls_token is None else self.encoder.layer
        assert isinstance(layers, nn.ModuleList)
        return layers

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, side, side], normalised -> [N, patches, width]."""
        patches = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2) + self.pos_embed
        if self.cls_token is None or self.reg_token is None:
            return self.encoder(patches).last_hidden_state
        summary = torch.cat([self.cls_token, self.reg_token], dim=1).expand(len(patches), -1, -1)
        encoded = self.encoder(torch.cat([summary, patches], dim=1)).last_hidden_state
        return encoded[:, summary.shape[1] :]


def _dinov2_encoder(size: TowerSize) -> nn.Module:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    config = Dinov2WithRegistersConfig(
        hidden_size=size.width,
        num_hidden_layers=size.depth - 1,
        num_attention_heads=size.heads,
        mlp_ratio=size.mlp // size.width,
        image_size=size.image_size,
        patch_size=size.patch_size,
        num_register_tokens=REGISTERS,
    )
    return Dinov2WithRegistersModel(config).encoder


def _siglip_encoder(size: TowerSize) -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=size.width,
        num_hidden_layers=size.depth - 1,
        num_attention_heads=size.heads,
        intermediate_size=size.mlp,
        image_size=size.image_size,
        patch_size=size.patch_size,
        hidden_act="gelu",  # exact, as in timm, which trained these towers; transformers' SigLIP approximates it
    )
    return SiglipVisionModel(config).encoder


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
            mean, std = to_device([torch.tensor(x)[:, None, None] for x in _NORMS[size.kind]], images.device)
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
