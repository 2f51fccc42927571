"""Builds OpenVLA and OpenVLA-OFT from a [model] section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.models.config import VLAModelConfig
from cosmos_rl_vla.models.instructions import Instructions, word_instructions
from cosmos_rl_vla.models.loaded import Loaded, nothing_to_fill
from cosmos_rl_vla.models.openvla.checkpoint import OpenVLANames
from cosmos_rl_vla.models.openvla.config import Critic, Family, OpenVLAConfig, tiny
from cosmos_rl_vla.models.openvla.folder import (
    empty_openvla,
    fill_openvla,
    random_openvla,
    read_config,
    save_config,
)

MAX_TOKENS = {"words": 24, "openvla": 128}
"""Maximum prompt tokens by template."""


def make_openvla(config: VLAModelConfig, *, stats: ActionStats | None, words: Sequence[str]) -> Loaded:
    """Build a directory's model, or a small random one. Raises UserError for sizes that do not fit."""
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
        model = empty_openvla(sizes, seed=config.seed)
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
    return Loaded(
        model=model,
        stats=stats,
        instructions=instructions,
        public_name=OpenVLANames(sizes.towers).public_name,
        write_config=partial(save_config, sizes, stats),
        fill=partial(fill_openvla, model, directory) if config.path else nothing_to_fill,
        blocks=tuple(model.blocks()),
        exact=() if model.value_head is None else ((model.value_head,),),
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
    names = ("horizon", "action_dim", "temperature", "image_crop")
    changes: dict[str, object] = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if (critic := config.critic) is not None:
        per = "none" if critic.place == "none" else critic.per
        changes["critic"] = Critic(per=per, hidden=critic.hidden, detach=critic.detach)
    chosen = replace(sizes, **changes)
    try:
        chosen.check()
    except ValueError as error:
        raise UserError(f"[model] {error}") from error
    return chosen


def _check_stats(stats: ActionStats, sizes: OpenVLAConfig) -> None:
    held = len(stats.state) if stats.state is not None else sizes.state_dim
    stats.check(action_dim=sizes.action_dim, state_dim=sizes.state_dim or held)
