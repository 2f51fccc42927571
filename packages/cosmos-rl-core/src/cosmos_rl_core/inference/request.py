"""What is asked of `cosmos-rl generate` and `eval` beside the recipe, and the weights that this means."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cosmos_rl_core.checkpoint.export import find_checkpoint
from cosmos_rl_core.checkpoint.manifest import MANIFEST, train_state, verify
from cosmos_rl_core.checkpoint.resume import recipe_of
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.inference.layout import Instances
from cosmos_rl_core.inference.prompts import Prompts
from cosmos_rl_core.recipe.run import RunConfig

DECIDES = (
    "run.domain",
    "run.seed",
    "model",
    "data",
    "eval.temperature",
    "eval.max_length",
    "rollout.engine",
    "rollout.options",
    "rollout.sampling",
)
"""Keys and sections that decide what is drawn of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for, beside the recipe."""

    checkpoint: str = ""
    """A run's directory (its newest checkpoint), or a checkpoint; empty for the model of the recipe."""
    step: int | None = None
    """Which checkpoint of the run."""
    averaged: bool = True
    """Take the average of the weights, where the checkpoint holds one, and not the trained ones."""
    prompts: str = ""
    """A .jsonl or .txt file, or one prompt; empty for [eval.data]."""
    out: Path | None = None
    """Where files go; None: beside the run's, in a folder of the command and the step."""
    num_samples: int = 1
    """Rollouts of a row."""
    instances: Instances = field(default_factory=Instances)
    rows_at_once: int | None = None
    """Rows in work at the same time in an instance; None leaves the choice to it."""
    media: bool = True
    """Whether images and videos are written."""
    overwrite: bool = False
    """Replace what another request has left in `out`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Those that rollouts are drawn with."""

    folder: str = ""
    """The checkpoint's; empty for the model of the recipe."""
    version: int = 0
    digest: str = ""
    """SHA-256 of its manifest, and so of all it holds."""

    @classmethod
    def find(cls, request: Request) -> Weights:
        """Look up and verify the checkpoint. Raises UserError where there is none, or a damaged one."""
        if not request.checkpoint:
            if request.step is not None:
                raise UserError(f"--step {request.step}: of which run? Give its directory by --checkpoint")
            return cls()
        folder = find_checkpoint(request.checkpoint, step=request.step)
        verify(folder)
        state = train_state(folder)
        return cls(folder=str(folder), version=state.step, digest=folder.digest(MANIFEST))

    @property
    def name(self) -> str:
        return f"step_{self.version}" if self.folder else "model"


def folder_of(config: RunConfig, request: Request, weights: Weights, *, command: str) -> Path:
    """Where the files of a command go."""
    return (request.out or config.run.directory / command / weights.name).resolve()


def identity(config: RunConfig, request: Request, given: Prompts, weights: Weights, *, scored: bool) -> dict[str, Any]:
    """Return everything that decides what rollouts.jsonl holds, but for the number of instances."""
    recipe = recipe_of(config)
    rows = hashlib.sha256(msgspec.json.encode([given.rows, given.wrong])).hexdigest()
    return {
        "checkpoint": [weights.folder, weights.digest, request.averaged],
        "prompts": rows,
        "num_samples": request.num_samples,
        "media": request.media,
        **dict(_parts(recipe, (*DECIDES, "reward") if scored else DECIDES)),
    }


def _parts(recipe: Mapping[str, Any], keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        section, _, name = key.partition(".")
        yield key, recipe[section][name] if name else recipe[section]
