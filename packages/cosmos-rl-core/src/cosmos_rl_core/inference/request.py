"""Request of `cosmos-rl generate` and `eval` besides the recipe, and the weights that it selects."""

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
"""Keys and sections that determine the rollouts of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of a command besides the recipe."""

    checkpoint: str = ""
    """A run's directory (its newest checkpoint), or a checkpoint; empty for the recipe's model."""
    step: int | None = None
    """Step of the run's checkpoint; None: the newest."""
    averaged: bool = True
    """Use the average of the weights, if the checkpoint has one, instead of the trained weights."""
    prompts: str = ""
    """A .jsonl or .txt file, or one prompt; empty for [eval.data]."""
    out: Path | None = None
    """Output directory; None: a folder named by command and step, in the run's directory."""
    num_samples: int = 1
    """Rollouts per row."""
    instances: Instances = field(default_factory=Instances)
    rows_at_once: int | None = None
    """Rows in work at the same time in an instance; None: the instance decides."""
    media: bool = True
    """Whether images and videos are written."""
    overwrite: bool = False
    """Replace the results of another request in `out`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights for generation."""

    folder: str = ""
    """Folder or URL of the checkpoint; empty for the recipe's model."""
    version: int = 0
    digest: str = ""
    """SHA-256 of its manifest, and so of its whole content."""

    @classmethod
    def find(cls, request: Request) -> Weights:
        """Find and verify the checkpoint. Raises UserError if it is missing or damaged."""
        if not request.checkpoint:
            if request.step is not None:
                raise UserError(f"--step {request.step} needs the directory of a run; give it with --checkpoint")
            return cls()
        folder = find_checkpoint(request.checkpoint, step=request.step)
        verify(folder)
        state = train_state(folder)
        return cls(folder=str(folder), version=state.step, digest=folder.digest(MANIFEST))

    @property
    def name(self) -> str:
        return f"step_{self.version}" if self.folder else "model"


def folder_of(config: RunConfig, request: Request, weights: Weights, *, command: str) -> Path:
    """The output directory of a command."""
    return (request.out or config.run.directory / command / weights.name).resolve()


def identity(config: RunConfig, request: Request, given: Prompts, weights: Weights, *, scored: bool) -> dict[str, Any]:
    """Return everything that determines the content of rollouts.jsonl; the number of instances does not."""
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
