"""Sizes and choices of an OpenVLA model. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal["openvla", "openvla_oft"]
TowerKind = Literal["dinov2", "siglip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSize:
    """Sizes of a vision transformer, counted as timm counts them."""

    kind: TowerKind
    """dinov2: class and register tokens before the patches, layer scales. siglip: patches alone."""
    image_size: int
    """Pixels of a side; pictures are stretched to it."""
    patch_size: int
    width: int
    depth: int
    """Blocks of the published tower. Its features leave the last but one, so that the last is not kept."""
    mlp: int
    heads: int
    timm_id: str = ""
    """Name in timm, by which public checkpoints know it."""


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
"""Those of the public checkpoints ("dinosiglip-vit-so-224px")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The head that reads values off the hidden state from which the first action token is drawn."""

    per: Literal["chunk", "action", "none"] = "chunk"
    """One value a decision, one for each action, or no critic."""
    hidden: tuple[int, ...] = (512, 128)
    """Widths of its layers."""
    detach: bool = True
    """Keep its gradient from the language model: a trunk that it moves moves the policy too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVLAConfig:
    """A model of the family."""

    family: Family
    """openvla: action tokens one after the other, each seeing those before it. openvla_oft: all of a chunk in one
    pass, in which everyone sees everyone."""
    prompt: Literal["words", "openvla"]
    """How an instruction is written before it is cut into tokens; see `instructions`."""
    towers: tuple[TowerSize, TowerSize]
    """Both see every picture; their features lie beside one another."""
    language: Mapping[str, Any]
    """Arguments of transformers' LlamaConfig; `vocab_size` counts the padding."""
    vocab_padding: int
    """Rows at the vocabulary's end that are no tokens; the action tokens are the last ones before them."""
    bins: int = 256
    """Action tokens."""
    horizon: int
    """H: actions of a decision, all of them executed."""
    action_dim: int
    """D."""
    state_dim: int = 0
    """Numbers of proprioception that are read; 0: none."""
    temperature: float = 1.0
    """Of the distribution over action tokens, in rollouts and in training."""
    image_crop: float = 1.0
    """Area of a picture's middle that is looked at."""
    critic: Critic = field(default_factory=Critic)

    @property
    def value_dim(self) -> int:
        """V: values of a decision."""
        return {"none": 0, "chunk": 1, "action": self.horizon}[self.critic.per]

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
            raise ValueError(f"the towers see {sorted(patches)} patches a side: their features lie side by side")
        for tower in self.towers:
            if tower.image_size % tower.patch_size:
                raise ValueError(f"image_size {tower.image_size} is no multiple of patch_size {tower.patch_size}")


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
        critic=Critic(hidden=(128,)),
    )
