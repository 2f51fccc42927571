"""Configuration of an OpenVLA model. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cosmos_rl_vla.config import CriticSection

OURS = "cosmos_rl"
"""Key of config.json with what the public format lacks, and name of the dataset whose statistics we write."""
Family = Literal["openvla", "openvla_oft"]
TowerKind = Literal["dinov2", "siglip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSize:
    """Sizes of a vision transformer, as timm defines them."""

    kind: TowerKind
    """dinov2: class and register tokens before the patches, layer scales. siglip: patches alone."""
    image_size: int
    """Side in pixels; images are resized to it without keeping their aspect ratio."""
    patch_size: int
    width: int
    depth: int
    """Blocks of the published tower. Features are taken from the last but one; the last block is not built."""
    mlp: int
    heads: int
    timm_id: str = ""
    """Name in timm, which public checkpoints refer to."""


TOWERS: Mapping[str, TowerSize] = {
    size.timm_id: size
    for size in (
        TowerSize(
            kind="dinov2",
            image_size=224,
            patch_size=14,
            width=1024,
            depth=24,
            mlp=4096,
            heads=16,
            timm_id="vit_large_patch14_reg4_dinov2.lvd142m",
        ),
        TowerSize(
            kind="siglip",
            image_size=224,
            patch_size=14,
            width=1152,
            depth=27,
            mlp=4304,
            heads=16,
            timm_id="vit_so400m_patch14_siglip_224",
        ),
    )
}
"""Vision towers of the public checkpoints ("dinosiglip-vit-so-224px")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVLAConfig:
    """Configuration of one OpenVLA model."""

    family: Family
    """openvla: action tokens are decoded autoregressively. openvla_oft: all of a chunk in one pass with bidirectional
    attention."""
    prompt: Literal["words", "openvla"]
    """Prompt template of an instruction; see `instructions`."""
    towers: tuple[TowerSize, TowerSize]
    """Both encode every image; their features are concatenated."""
    language: Mapping[str, Any]
    """Arguments of transformers' LlamaConfig; `vocab_size` counts the padding."""
    vocab_padding: int
    """Rows at the vocabulary's end that are no tokens; the action tokens are the last `bins` before them."""
    bins: int = 256
    """Number of action tokens."""
    horizon: int
    """H: actions of a decision, all of them executed."""
    action_dim: int
    """D: dimensions of an action."""
    state_dim: int = 0
    """Dimensions of proprioception; 0: not an input."""
    temperature: float = 1.0
    """Temperature of the distribution over action tokens, in rollouts and in training."""
    image_crop: float = 1.0
    """Area fraction of the centre crop of an image."""
    critic: CriticSection = field(default_factory=lambda: CriticSection(pool="mean", hidden=(512, 128)))
    """The value head, on the hidden state from which the first action token is sampled."""

    @property
    def value_dim(self) -> int:
        """V: values per decision."""
        return self.critic.num_values(self.horizon)

    @property
    def first_token(self) -> int:
        """Id of the first action token."""
        return self.language["vocab_size"] - self.vocab_padding - self.bins

    def check(self) -> None:
        """Raise ValueError for sizes that do not fit together, naming the key."""
        if self.first_token < 1:
            raise ValueError(
                f"a vocabulary of {self.language['vocab_size']} has no room for {self.bins} action tokens and "
                f"{self.vocab_padding} rows of padding"
            )
        patches = {tower.image_size // tower.patch_size for tower in self.towers}
        if len(patches) != 1:
            raise ValueError(
                f"the towers have {sorted(patches)} patches a side; make them equal, to concatenate features"
            )
        for tower in self.towers:
            if tower.image_size % tower.patch_size:
                raise ValueError(f"image_size {tower.image_size} is not a multiple of patch_size {tower.patch_size}")


def tiny(family: Family, *, num_words: int, horizon: int, action_dim: int, state_dim: int) -> OpenVLAConfig:
    """Return a model of about 0.3 million parameters that trains on a CPU: 32-pixel images, a vocabulary of words."""
    tower = TowerSize(kind="dinov2", image_size=32, patch_size=8, width=48, depth=3, mlp=192, heads=3)
    bins, padding = 256, 64
    return OpenVLAConfig(
        family=family,
        prompt="words",
        towers=(tower, TowerSize(kind="siglip", image_size=32, patch_size=8, width=48, depth=3, mlp=128, heads=3)),
        language={
            "vocab_size": num_words + bins + padding,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        vocab_padding=padding,
        bins=bins,
        horizon=horizon,
        action_dim=action_dim,
        state_dim=state_dim,
        critic=CriticSection(pool="mean"),
    )
