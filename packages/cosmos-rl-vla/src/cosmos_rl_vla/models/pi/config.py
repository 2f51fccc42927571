"""Configuration of a pi0 or pi0.5 model, as saved in its config.json. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from pydantic import BaseModel

from cosmos_rl_vla.config import ActionNoiseSection, CriticSection

MODEL_TYPE = "cosmos_rl_pi"
Family = Literal["pi0", "pi05"]

MAX_TOKENS = {"words": 24, "pi0": 48, "pi05": 200}
"""Maximum prompt tokens by template, as in openpi."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaSize:
    """Sizes of a Gemma network."""

    width: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSize:
    """Sizes of a SigLIP tower."""

    image_size: int
    """Side in pixels; images are resized into it with their aspect ratio."""
    patch_size: int
    width: int
    depth: int
    mlp: int
    heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PiConfig:
    """Configuration of one pi0 or pi0.5 model."""

    family: Family
    """pi05: time reaches the expert through adaptive norms. pi0: it is mixed into the action tokens."""
    state: Literal["text", "prefix", "suffix", "none"]
    """Input of proprioception: as text in the prompt (pi0.5), as one projected token beside the images, as the
    expert's first token (pi0), or none."""
    prompt: Literal["words", "pi0", "pi05"]
    """Prompt template of an instruction; see `instructions`."""
    vocab_size: int
    vision: VisionSize
    language: GemmaSize
    expert: GemmaSize
    """Its depth, kv_heads and head_dim equal the language model's: the two share attention."""
    horizon: int
    """H: actions executed per decision."""
    action_dim: int
    """D: dimensions of the simulator's actions."""
    model_horizon: int
    """Actions that the network predicts, >= H."""
    model_action_dim: int
    """Action dimensions of the network, >= D; those above D are zero in demonstrations."""
    max_state_dim: int
    """Maximum dimensions of proprioception."""
    num_steps: int
    """K: denoising steps per decision."""
    noise: ActionNoiseSection = field(default_factory=ActionNoiseSection)
    value: CriticSection = field(default_factory=CriticSection)
    aux_dim: int = 0
    """Dimensions of the auxiliary target predicted from the prefix in supervised training; 0: none."""
    prompt_tokens: int | None = None
    """Maximum prompt tokens; None: those of the template."""

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum prompt tokens."""
        return self.prompt_tokens or MAX_TOKENS[self.prompt]

    @property
    def value_dim(self) -> int:
        """V: values per decision."""
        return self.value.num_values(self.horizon)

    def save(self, directory: Path) -> None:
        """Write config.json."""
        written = {"model_type": MODEL_TYPE, **msgspec.to_builtins(self, enc_hook=BaseModel.model_dump)}
        (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n")

    def check(self) -> None:
        """Raise ValueError for sizes that do not fit together, naming the key."""
        self.noise.check(self.num_steps)
        shared = ("depth", "kv_heads", "head_dim")
        differing = [name for name in shared if getattr(self.language, name) != getattr(self.expert, name)]
        if differing:
            raise ValueError(
                f"expert and language differ in {', '.join(differing)}: they share attention, make them equal"
            )
        if self.model_horizon < self.horizon:
            raise ValueError(
                f"horizon {self.horizon}: the model predicts {self.model_horizon} actions; set at most that"
            )
        if self.model_action_dim < self.action_dim:
            raise ValueError(
                f"action_dim {self.action_dim}: the model has {self.model_action_dim} dimensions; "
                "use a model made for this simulator"
            )
        if self.vision.image_size % self.vision.patch_size:
            raise ValueError(
                f"image_size {self.vision.image_size} is not a multiple of patch_size {self.vision.patch_size}"
            )


def tiny(
    *, vocab_size: int, horizon: int = 5, action_dim: int = 4, max_state_dim: int = 8, aux_dim: int = 0
) -> PiConfig:
    """Return a pi0.5 of about 0.65 million parameters that trains on a CPU: 64-pixel images, a vocabulary of words."""
    size = GemmaSize(width=96, depth=2, mlp=128, heads=4, kv_heads=1, head_dim=24)
    return PiConfig(
        family="pi05",
        state="prefix",
        prompt="words",
        vocab_size=vocab_size,
        vision=VisionSize(image_size=64, patch_size=16, width=96, depth=2, mlp=128, heads=4),
        language=size,
        expert=size,
        horizon=horizon,
        action_dim=action_dim,
        model_horizon=horizon,
        model_action_dim=action_dim,
        max_state_dim=max_state_dim,
        num_steps=4,
        aux_dim=aux_dim,
    )


def full(family: Family, *, horizon: int, action_dim: int, model_horizon: int = 50) -> PiConfig:
    """Return the size of the public checkpoints: PaliGemma 3B with an expert of 300 million parameters."""
    return PiConfig(
        family=family,
        state="text" if family == "pi05" else "suffix",
        prompt=family,
        vocab_size=257_152,
        vision=VisionSize(image_size=224, patch_size=14, width=1152, depth=27, mlp=4304, heads=16),
        language=GemmaSize(width=2048, depth=18, mlp=16_384, heads=8, kv_heads=1, head_dim=256),
        expert=GemmaSize(width=1024, depth=18, mlp=4096, heads=8, kv_heads=1, head_dim=256),
        horizon=horizon,
        action_dim=action_dim,
        model_horizon=model_horizon,
        model_action_dim=32,
        max_state_dim=32,
        num_steps=5,
        noise=ActionNoiseSection(kind="sde", level=0.5, steps="random"),
        value=CriticSection(place="prefix" if family == "pi05" else "expert", pool="mean", hidden=(1024, 512, 256)),
    )
