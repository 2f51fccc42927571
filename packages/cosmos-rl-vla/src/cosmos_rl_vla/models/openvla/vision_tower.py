"""One vision transformer of a fused backbone: timm's embedding, then transformers' DINOv2 or SigLIP blocks.

timm has position embeddings for patches alone, transformers' DINOv2 for the class token too; the embedding's
parameters have timm's names. The tower ends at the last block but one, without a norm, as in prismatic models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cosmos_rl_vla.models.openvla.config import TowerSize

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
