"""The memory of a vision tower's passes, from vision_config. No torch.

A token that shows a picture stands for several patches, so that a row of n tokens has at most n x patches_per_token of
them. With h the tower's width, i that of its feed-forward layers and c the bytes of a number, a layer keeps for its
backward pass, for each patch:

    norms         4 c h                  the input of both, and what they return
    attention     7 c h                  queries, keys and values in one, rotated queries and keys, the output twice
    feed-forward  2 c i, gated 4 c i     before and after the activation

Its backward pass adds gradients: c h of its output, and of the feed-forward's inner numbers c i, gated 2 c i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl_core.plan.layer_bytes import BYTES
from cosmos_rl_core.plan.needs import STEP, MemoryPart
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_llm.config import LLMModelConfig

ACTIVATIONS, PIXELS = "activations of the vision tower", "pixels"
SEEN = "pictures pass the tower"
_GATED = {"qwen2_5_vl"}
"""Families whose towers have gated feed-forward layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSizes:
    """The sizes of a tower that decide the memory of its passes."""

    layers: int
    hidden: int
    """h."""
    intermediate: int
    """i."""
    gated: bool
    patch: int
    """Numbers of a patch's pixels."""
    patches_per_token: float
    merged: int
    """Numbers that the projectors take and keep for a patch."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TowerSizes | None:
        """Read config.json; None for a family with other keys."""
        tower, kind = config.get("vision_config"), config.get("model_type", "")
        if not isinstance(tower, Mapping) or (per_token := _patches_per_token(config, tower)) is None:
            return None
        hidden = tower.get("embed_dim") or tower.get("hidden_size")
        layers = tower.get("depth") or tower.get("num_hidden_layers")
        side = tower.get("patch_size")
        side = side[0] if isinstance(side, list) else side
        if not (hidden and layers and side):
            return None
        mergers = 1 + len(tower.get("deepstack_visual_indexes") or ())
        return cls(
            layers=layers,
            hidden=hidden,
            intermediate=tower.get("intermediate_size") or int(hidden * tower.get("mlp_ratio", 4)),
            gated=kind in _GATED,
            patch=3 * tower.get("temporal_patch_size", 1) * side**2,
            patches_per_token=per_token,
            merged=mergers * 4 * hidden,
        )

    def kept(self, *, dtype: str, recomputed: bool) -> float:
        """Bytes a patch from the forward to the backward pass. recomputed: a layer keeps its input alone."""
        size = BYTES[dtype]
        return self.layers * (size * self.hidden if recomputed else self.layer(dtype=dtype))

    def projected(self, *, dtype: str) -> float:
        """Bytes a patch that the projectors keep."""
        return BYTES[dtype] * self.merged

    def layer(self, *, dtype: str) -> float:
        """Bytes a patch of one layer, in training."""
        return BYTES[dtype] * (11 * self.hidden + (4 if self.gated else 2) * self.intermediate)

    def gradients(self, *, dtype: str) -> float:
        """Bytes a patch that the backward pass of one layer adds, at most."""
        return BYTES[dtype] * (self.hidden + (2 if self.gated else 1) * self.intermediate)

    def passing(self, *, dtype: str) -> float:
        """Bytes a patch of a pass without gradients, at its widest layer."""
        return BYTES[dtype] * max(8 * self.hidden, 2 * self.hidden + 2 * self.intermediate)

    @property
    def pixels(self) -> int:
        """Bytes of a patch's pixels."""
        return BYTES["float32"] * self.patch


def policy_parts(directory: Path, config: RunConfig) -> tuple[MemoryPart, ...]:
    """Return the memory of a policy rank's pictures: at most a microbatch of them alone; none of text."""
    model_config = read_json_object(directory / "config.json", hint="see model.path")
    if "vision_config" not in model_config:
        return ()
    sizes, policy, model = TowerSizes.of(model_config), config.policy, config.model
    if sizes is None:
        return (MemoryPart(name=ACTIVATIONS, bytes=None),)
    patches = round(policy.microbatch_terms * sizes.patches_per_token)
    in_flight = policy.parallel.pp * patches
    recomputed = policy.memory.activation_checkpointing != "none"
    if "tower" in model.freeze:  # it keeps nothing for the decoder's passes
        entries = [MemoryPart(name=ACTIVATIONS, bytes=round(patches * sizes.passing(dtype=model.dtype)), at=(SEEN,))]
    else:
        kept = in_flight * sizes.kept(dtype=model.dtype, recomputed=recomputed)
        entries = [MemoryPart(name=ACTIVATIONS, bytes=round(kept), at=(STEP, SEEN))]
        gradients = round(patches * sizes.gradients(dtype=model.dtype))
        entries.append(MemoryPart(name="gradients in the vision tower", bytes=gradients, at=(SEEN,)))
        if recomputed:  # after the decoder's backward pass
            layer = round(patches * sizes.layer(dtype=model.dtype))
            entries.append(MemoryPart(name="a layer of the vision tower, computed again", bytes=layer, at=(SEEN,)))
    if {"tower", "projector"} - set(model.freeze):
        projected = round(in_flight * sizes.projected(dtype=model.dtype))
        entries.append(MemoryPart(name="activations of the projector", bytes=projected, at=(STEP, SEEN)))
    return *entries, MemoryPart(name=PIXELS, bytes=in_flight * sizes.pixels)


def engine_parts(directory: Path, model: LLMModelConfig, *, prompt_tokens: int, at: str) -> tuple[MemoryPart, ...]:
    """Return the memory of pictures in the torch engine while prompts of so many tokens are read."""
    model_config = read_json_object(directory / "config.json", hint="see model.path")
    if "vision_config" not in model_config:
        return ()
    sizes = TowerSizes.of(model_config)
    if sizes is None:
        return (MemoryPart(name=ACTIVATIONS, bytes=None),)
    patches = round(prompt_tokens * sizes.patches_per_token)
    passing = round(patches * sizes.passing(dtype=model.dtype))
    return (
        MemoryPart(name=ACTIVATIONS, bytes=passing, at=(at,)),
        MemoryPart(name=PIXELS, bytes=patches * sizes.pixels),
    )


def _patches_per_token(config: Mapping[str, Any], tower: Mapping[str, Any]) -> float | None:
    """Patches that become one token of the decoder."""
    if merge := tower.get("spatial_merge_size"):
        return merge**2
    if scale := config.get("scale_factor"):  # Idefics3, SmolVLM
        return scale**2
    if ratio := config.get("downsample_ratio"):  # InternVL
        return 1 / ratio**2
    if tokens := config.get("mm_tokens_per_image"):  # Gemma 3
        return (tower["image_size"] // tower["patch_size"]) ** 2 / tokens
    return 1 if config.get("model_type") == "llava" else None
