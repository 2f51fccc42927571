"""Maps weight names of pi models between public checkpoints (openpi's PyTorch port, lerobot) and the module.

    paligemma_with_expert.paligemma.model.language_model.layers.0.mlp.up_proj.weight    theirs
    backbone.paligemma.language_model.layers.0.mlp.up_proj.weight                       ours

Their spelling varies with the version of transformers that saved them; we write the newest.
"""

from __future__ import annotations

from collections.abc import Iterable

from cosmos_rl_vla.models.checkpoint import Owner, WeightNames
from cosmos_rl_vla.models.pi.config import Family

_VLM = "paligemma_with_expert.paligemma."
_EXPERT = "paligemma_with_expert.gemma_expert."
_PREFIXES = (
    (f"{_VLM}lm_head.", "backbone.paligemma.language_model.embed_tokens."),  # tied: stored once
    (f"{_VLM}model.vision_tower.vision_model.", "backbone.paligemma.vision_tower."),
    (f"{_VLM}model.multi_modal_projector.", "backbone.paligemma.multi_modal_projector."),
    (f"{_VLM}model.language_model.", "backbone.paligemma.language_model."),
    (f"{_EXPERT}model.", "denoiser.expert."),
    *((f"{name}.", f"denoiser.{name}.") for name in ("action_in_proj", "action_out_proj", "state_proj")),
    *((f"{name}.", f"denoiser.{name}.") for name in ("time_mlp_in", "time_mlp_out")),
    *((f"{name}.", f"denoiser.{name}.") for name in ("action_time_mlp_in", "action_time_mlp_out")),
    # ours alone
    ("state_in.", "backbone.state_in."),
    ("noise_head.", "denoiser.noise_head."),
    ("value_head.", "value_head."),
    ("aux_head.", "aux_head."),
)
OURS_ALONE = ("state_in.", "noise_head.", "value_head.", "aux_head.")
"""Prefixes of public names that only our checkpoints have."""
LANGUAGE_OUTPUT = f"{_VLM}lm_head.weight"
"""[vocabulary, width]: also the embedding of tokens."""
EXPERT_OUTPUT = f"{_EXPERT}lm_head.weight"
"""[vocabulary, width of the expert]: in every public checkpoint, unused."""
_SPELLINGS = (
    (f"{_VLM}language_model.model.", f"{_VLM}model.language_model."),
    (f"{_VLM}language_model.lm_head.", f"{_VLM}lm_head."),
    (f"{_VLM}vision_tower.", f"{_VLM}model.vision_tower."),
    (f"{_VLM}multi_modal_projector.", f"{_VLM}model.multi_modal_projector."),
)
_UNUSED = (f"{_EXPERT}lm_head.", f"{_EXPERT}model.embed_tokens.", "normalize_", "unnormalize_")
"""The expert outputs no text; old lerobot files have statistics among the weights."""
_TOWER = f"{_VLM}model.vision_tower."
HINT = (
    "check that its config.json is of these weights (pi0 or pi05, sizes, input of the state; model_action_dim, "
    "max_state_dim, horizon)"
)


class PiNames(WeightNames):
    """Both directions of the map, for a family."""

    def __init__(self, family: Family) -> None:
        self._family: Family = family

    def public_name(self, name: str) -> str:
        """Return the public name of a weight."""
        for theirs, ours in _PREFIXES:
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        raise AssertionError(name)

    def owners(self, name: str) -> tuple[Owner, ...]:
        """Return the parameter of a public weight; none for an unused one. Raises KeyError for an unknown name."""
        name = name.removeprefix("model.")
        for old, new in _SPELLINGS:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        if name.startswith(_TOWER) and not name.startswith(f"{_TOWER}vision_model."):
            name = f"{_TOWER}vision_model.{name.removeprefix(_TOWER)}"
        if name.startswith(_UNUSED) or (self._family == "pi05" and name.startswith("state_proj.")):
            return ()
        if self._family == "pi05":
            name = name.removeprefix("action_") if name.startswith("action_time_mlp_") else name
        elif name.startswith("time_mlp_"):
            name = f"action_{name}"
        for theirs, ours in _PREFIXES:
            if name.startswith(theirs):
                return (Owner(ours + name.removeprefix(theirs)),)
        raise KeyError(name)


def family_of(names: Iterable[str]) -> Family:
    """Return the family of a checkpoint from its weight names: pi0.5 has adaptive norms."""
    return "pi05" if any(name.endswith("input_layernorm.dense.weight") for name in names) else "pi0"
