"""Builds pi0 and pi0.5 from a [model] section."""

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
from cosmos_rl_vla.models.noise import Noise
from cosmos_rl_vla.models.pi.checkpoint import public_name
from cosmos_rl_vla.models.pi.config import PiConfig, ValueSize, tiny
from cosmos_rl_vla.models.pi.folder import empty_pi, fill_pi, random_pi, read_config, save_config

MAX_TOKENS = {"words": 24, "pi0": 48, "pi05": 200}
"""Maximum prompt tokens by template, as in openpi."""


def make_pi(config: VLAModelConfig, *, stats: ActionStats | None, words: Sequence[str]) -> Loaded:
    """Build a directory's model, or a small random one. Raises UserError for sizes that do not fit."""
    directory = Path(config.path).expanduser()
    if config.path:
        sizes = _chosen(read_config(directory), config)
        instructions = Instructions.load(directory, format=sizes.prompt, max_length=MAX_TOKENS[sizes.prompt])
        model = empty_pi(sizes, seed=config.seed)
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
    return Loaded(
        model=model,
        stats=stats,
        instructions=instructions,
        public_name=public_name,
        write_config=partial(save_config, sizes),
        fill=partial(fill_pi, model, directory) if config.path else nothing_to_fill,
        aux_dim=sizes.aux_dim,
        blocks=tuple(model.blocks()),
        root_blocks=(model.backbone.paligemma.language_model.layers[-1],),
        exact=tuple(map(tuple, model.exact())),
    )


def _chosen(sizes: PiConfig, config: VLAModelConfig) -> PiConfig:
    """Return the sizes with the recipe's overrides."""
    changes: dict[str, object] = {}
    for name in ("horizon", "num_steps", "action_dim"):
        if getattr(config, name) is not None:
            changes[name] = getattr(config, name)
    if config.aux_dim:
        changes["aux_dim"] = config.aux_dim
    if config.noise is not None:
        changes["noise"] = Noise(**config.noise.model_dump())
    if config.critic is not None:
        changes["value"] = ValueSize(**config.critic.model_dump())
    chosen = replace(sizes, **changes)
    try:
        chosen.check()
    except ValueError as error:
        raise UserError(f"[model] {error}") from error
    return chosen
