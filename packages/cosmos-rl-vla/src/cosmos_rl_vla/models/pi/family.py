"""Builds pi0 and pi0.5 from a [model] section, and reads and writes their directories.

A directory has config.json, model.safetensors, tokenizer.json and action_stats.json. Directories saved by lerobot
(policies pi0 and pi05) and by openpi's conversion to PyTorch are read too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.settings.problems import validated
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.config import VLAModelConfig
from cosmos_rl_vla.models.checkpoint import empty
from cosmos_rl_vla.models.instructions import Instructions, word_instructions
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.models.pi.config import MAX_TOKENS, MODEL_TYPE, PiConfig, tiny
from cosmos_rl_vla.models.pi.model import PiModel
from cosmos_rl_vla.models.pi.public_config import from_lerobot, from_openpi


def random_pi(config: PiConfig, *, seed: int) -> PiModel:
    """Build a randomly initialised model, determined by the seed."""
    with forked_rng(seed=seed):
        return PiModel(config)


def read_config(directory: Path) -> PiConfig:
    """Read config.json, ours, lerobot's or openpi's. Raises UserError that names the key."""
    path = directory / "config.json"
    stored = read_json_object(path, hint="a model's directory holds config.json and model.safetensors")
    if stored.get("type") in ("pi0", "pi05"):
        return from_lerobot(stored, path)
    if "action_horizon" in stored:
        return from_openpi(stored, directory)
    return _from_ours(stored, path)


def _from_ours(stored: dict[str, Any], path: Path) -> PiConfig:
    stored.pop("dtype", None)  # of the weights, written by `cosmos-rl export --dtype`
    if stored.pop("model_type", None) != MODEL_TYPE:
        raise UserError(f'{path} is not of a pi model: needs "type": "pi0" or "pi05", or a config.json written by SFT')
    try:
        config = msgspec.convert(stored, PiConfig, dec_hook=_section)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}") from None
    if unknown := _unknown(stored, msgspec.to_builtins(config, enc_hook=BaseModel.model_dump)):
        raise UserError(f"{path}: unknown {', '.join(unknown)}")
    return config


def _section(kind: type[Strict], value: Mapping[str, Any]) -> Strict:
    """Return a section of config.json; `_unknown` names keys that it does not have."""
    return validated(kind, {name: each for name, each in value.items() if name in kind.model_fields})


def _unknown(stored: Mapping[str, Any], known: Mapping[str, Any], at: str = "") -> list[str]:
    extra = [f"{at}{name}" for name in stored if name not in known]
    inside = [(name, value) for name, value in stored.items() if isinstance(value, dict) and name in known]
    return [*extra, *(name for key, value in inside for name in _unknown(value, known[key], f"{at}{key}."))]


def make_pi(
    config: VLAModelConfig, *, stats: ActionStats | None, words: Sequence[str], on_meta: bool = False
) -> LoadedPolicy:
    """Build a directory's model (see `make`), or a small random one. Raises UserError for sizes that do not fit."""
    directory = Path(config.path).expanduser()
    if config.path:
        sizes = _chosen(read_config(directory), config)
        instructions = Instructions.load(directory, format=sizes.prompt, max_length=sizes.max_prompt_tokens)
        model = empty(PiModel, sizes, seed=config.seed, on_meta=on_meta)
    else:
        instructions = word_instructions(words, max_length=MAX_TOKENS["words"])
        assert config.action_dim is not None and config.state_dim is not None
        base = tiny(
            vocab_size=instructions.vocab_size,
            horizon=config.horizon or 5,
            action_dim=config.action_dim,
            max_state_dim=max(config.state_dim, 1),
            aux_dim=config.aux_dim,
        )
        sizes = _chosen(base, config)
        model = random_pi(sizes, seed=config.seed)
    if stats is None:
        raise UserError(
            "[model] has no action statistics, which scale its outputs to the robot's units. Train on demonstrations "
            "first, which measures them, or set [model] stats to an action_stats.json"
        )
    stats.check(action_dim=sizes.action_dim, state_dim=config.state_dim or len(stats.state or stats.action))
    return LoadedPolicy(
        model=model,
        stats=stats,
        instructions=instructions,
        directory=directory if config.path else None,
    )


def _chosen(sizes: PiConfig, config: VLAModelConfig) -> PiConfig:
    """Return the sizes with the recipe's overrides."""
    given = {name: getattr(config, name) for name in ("horizon", "num_steps", "action_dim", "noise")}
    given |= {"value": config.critic, "aux_dim": config.aux_dim or None}
    chosen = replace(sizes, **{name: value for name, value in given.items() if value is not None})
    try:
        chosen.check()
    except ValueError as error:
        raise UserError(f"[model] {error}") from error
    return chosen
