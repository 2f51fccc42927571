"""Builds OpenVLA and OpenVLA-OFT from a [model] section, and reads and writes their directories.

A directory has config.json and safetensors in OpenVLA's format, tokenizer.json and action_stats.json. Fields that the
public format lacks (family, chunks, sizes of small towers, critic) are in the key "cosmos_rl" of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_core.storage.json_files import check_fields, read_json_object
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.checkpoint import empty, shapes_in, weight_files
from cosmos_rl_vla.models.instructions import Instructions, word_instructions
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.models.openvla.checkpoint import OpenVLANames
from cosmos_rl_vla.models.openvla.config import OURS, TOWERS, Family, OpenVLAConfig, TowerSize, tiny
from cosmos_rl_vla.models.openvla.model import OpenVLAModel

OFT_HORIZON = 8
"""Actions of a chunk of OpenVLA-OFT in LIBERO."""
_LEFT_OUT = ("torch_dtype", "dtype")
"""Ignored keys of text_config: the recipe sets the dtype."""
_USED = (
    "model_type",
    "text_config",
    "timm_model_ids",
    "image_sizes",
    "pad_to_multiple_of",
    "n_action_bins",
    "norm_stats",
)
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "arch_specifier": ("no-align+fused-gelu-mlp",),
    "image_resize_strategy": ("resize-naive",),
    "output_projector_states": (False,),
    "timm_override_act_layers": ([None, None],),
    "use_fused_vision_backbone": (True,),
}
_WITHOUT_EFFECT = (
    *("architectures", "auto_map", "transformers_version", "_name_or_path", *_LEFT_OUT),
    # names of what timm_model_ids and text_config describe; prompts have a maximum of their own, and no padding token
    *("vision_backbone_id", "llm_backbone_id", "hf_llm_id", "llm_max_length", "pad_token_id"),
)
_FIXED_OF_LANGUAGE: Mapping[str, tuple[Any, ...]] = {"attention_dropout": (0, None)}
_OLD_OF_LANGUAGE = ("rope_theta", "rope_scaling")
"""Fields that transformers converts."""
_PROPRIO = "proprio_projector.fc1.weight"


def random_openvla(config: OpenVLAConfig, *, seed: int) -> OpenVLAModel:
    """Build a randomly initialised model, determined by the seed."""
    with forked_rng(seed=seed):
        return OpenVLAModel(config)


def read_config(directory: Path, *, family: Family | None, action_dim: int) -> OpenVLAConfig:
    """Read config.json, ours or a public one.

    Args:
        family: of a public directory, whose config.json does not contain it.
        action_dim: of its statistics.

    Raises UserError that names the key.
    """
    path = directory / "config.json"
    stored = read_json_object(path)
    if OURS not in stored:
        return _from_public(stored, directory, family=family, action_dim=action_dim)
    check_fields(stored[OURS], used=[each.name for each in fields(OpenVLAConfig)], where=f"{path}, {OURS}")
    critic = stored[OURS].get("critic", {})
    if critic.get("per") == "none":  # as the first versions wrote it
        stored[OURS]["critic"] = {**critic, "place": "none", "per": "chunk"}
    try:
        config = msgspec.convert(stored[OURS], OpenVLAConfig, dec_hook=lambda kind, value: kind.model_validate(value))
    except msgspec.ValidationError as error:
        raise UserError(f"{path}, {OURS}: {error}") from None
    if family not in (None, config.family):
        raise UserError(f"[model] family: {path} is of {config.family}, not of {family}; remove the key")
    return config


def names_of(directory: Path) -> OpenVLANames:
    """Return the name mapping of a directory's weights. Raises UserError."""
    config = read_json_object(directory / "config.json")
    if OURS in config:
        return OpenVLANames(read_config(directory, family=None, action_dim=1).towers)
    return OpenVLANames(_public_towers(config, directory))


def _from_public(
    config: Mapping[str, Any], directory: Path, *, family: Family | None, action_dim: int
) -> OpenVLAConfig:
    path = directory / "config.json"
    if family is None:
        raise UserError(
            f"{path} does not contain whether actions are decoded one by one or at once: set [model] family to "
            '"openvla" or "openvla_oft"'
        )
    check_fields(config, used=_USED, fixed=_FIXED, without_effect=_WITHOUT_EFFECT, where=str(path))
    language = {"vocab_size": 32_064, **config.get("text_config", {})}
    kind = language.pop("model_type", "llama")
    if kind != "llama":
        raise UserError(f"{path}: a language model of type {kind!r}; supported is llama")
    from transformers import LlamaConfig

    known = (*LlamaConfig().to_dict(), *_OLD_OF_LANGUAGE)
    where = f"{path}, text_config"
    check_fields(language, used=known, fixed=_FIXED_OF_LANGUAGE, without_effect=_LEFT_OUT, where=where)
    return OpenVLAConfig(
        family=family,
        prompt="openvla",
        towers=_public_towers(config, directory),
        language={name: value for name, value in language.items() if name not in _LEFT_OUT},
        vocab_padding=config.get("pad_to_multiple_of", 64),
        bins=config.get("n_action_bins", 256),
        horizon=OFT_HORIZON if family == "openvla_oft" else 1,
        action_dim=action_dim,
        state_dim=_state_dim(directory),
    )


def _public_towers(config: Mapping[str, Any], directory: Path) -> tuple[TowerSize, TowerSize]:
    ids = config.get("timm_model_ids") or []
    if len(ids) != 2 or any(timm_id not in TOWERS for timm_id in ids):
        named = " with ".join(map(str, ids)) or "none"
        raise UserError(
            f"{directory / 'config.json'}, timm_model_ids: vision towers {named}; supported are {' with '.join(TOWERS)}"
        )
    towers = TOWERS[ids[0]], TOWERS[ids[1]]
    sizes = [tower.image_size for tower in towers]
    if config.get("image_sizes", sizes) != sizes:
        raise UserError(
            f"{directory / 'config.json'}: image_sizes = {config['image_sizes']}; these towers have {sizes}"
        )
    return towers


def _state_dim(directory: Path) -> int:
    """Return the weights' dimensions of proprioception; 0 without a projector for it."""
    shapes = shapes_in(weight_files(directory))
    return shapes[_PROPRIO][1] if _PROPRIO in shapes else 0


MAX_TOKENS = {"words": 24, "openvla": 128}
"""Maximum prompt tokens by template."""


def make_openvla(
    config: VLAModelConfig, *, stats: ActionStats | None, words: Sequence[str], on_meta: bool = False
) -> LoadedPolicy:
    """Build a directory's model (see `make`), or a small random one. Raises UserError for sizes that do not fit."""
    _refuse(config)
    if stats is None:
        raise UserError(
            "[model] has no action statistics, which scale its tokens to the robot's units. Set [model] stats to an "
            "action_stats.json or dataset_statistics.json, or train on demonstrations first, which measures them"
        )
    family: Family | None = config.family if config.family in ("openvla", "openvla_oft") else None
    directory = Path(config.path).expanduser()
    if config.path:
        sizes = _chosen(read_config(directory, family=family, action_dim=len(stats.action)), config)
        instructions = Instructions.load(directory, format=sizes.prompt, max_length=MAX_TOKENS[sizes.prompt])
        model = empty(OpenVLAModel, sizes, seed=config.seed, on_meta=on_meta)
    else:
        assert family is not None and config.action_dim is not None and config.state_dim is not None
        instructions = word_instructions(words, max_length=MAX_TOKENS["words"])
        horizon = config.horizon or (5 if family == "openvla_oft" else 1)
        base = tiny(
            family,
            num_words=instructions.vocab_size,
            horizon=horizon,
            action_dim=config.action_dim,
            state_dim=config.state_dim,
        )
        sizes = _chosen(base, config)
        model = random_openvla(sizes, seed=config.seed)
    _check_stats(stats, sizes)
    return LoadedPolicy(
        model=model,
        stats=stats,
        instructions=instructions,
        directory=directory if config.path else None,
    )


def _refuse(config: VLAModelConfig) -> None:
    """Raise UserError for keys of other families."""
    given = [name for name in ("num_steps", "noise", "aux_dim") if getattr(config, name)]
    if given:
        raise UserError(f"[model] {', '.join(given)}: OpenVLA samples tokens and does not have it; remove the key")
    if config.train == "expert":
        raise UserError('[model] train = "expert": OpenVLA has no expert; train all, or adapters ([model.lora])')
    if config.critic is not None and config.critic.place == "expert":
        raise UserError(
            '[model.critic] place = "expert": OpenVLA has no expert; its critic reads the output from which the first '
            "action token is sampled. Remove place"
        )


def _chosen(sizes: OpenVLAConfig, config: VLAModelConfig) -> OpenVLAConfig:
    """Return the sizes with the recipe's overrides."""
    names = ("horizon", "action_dim", "temperature", "image_crop", "critic")
    given = {name: getattr(config, name) for name in names}
    chosen = replace(sizes, **{name: value for name, value in given.items() if value is not None})
    try:
        chosen.check()
    except ValueError as error:
        raise UserError(f"[model] {error}") from error
    return chosen


def _check_stats(stats: ActionStats, sizes: OpenVLAConfig) -> None:
    state_dim = len(stats.state) if stats.state is not None else sizes.state_dim
    stats.check(action_dim=sizes.action_dim, state_dim=sizes.state_dim or state_dim)
