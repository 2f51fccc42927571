"""Request of `cosmos-rl generate` and `eval` besides the recipe: GPUs, prompts, and the weights that it selects.

num_gpus = total_shard * tp_size; on a machine without GPUs the numbers count processes instead.

    --num-gpus 8                  8 instances of one GPU each
    --num-gpus 8 --tp-size 2      4 instances of two GPUs each
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cosmos_rl_core.checkpoint.export import find_checkpoint
from cosmos_rl_core.checkpoint.manifest import MANIFEST, check_base, train_state, verify
from cosmos_rl_core.checkpoint.resume import recipe_of
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import ON_CPU, short_names
from cosmos_rl_core.inference.prompts import Prompts
from cosmos_rl_core.recipe.run import RunConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Number and size of the instances. Raises UserError for numbers that do not divide."""

    num_gpus: int = 1
    """Total GPUs of all instances."""
    tp_size: int = 1
    """Tensor-parallel GPUs of one instance."""

    def __post_init__(self) -> None:
        for name, value in (("--num-gpus", self.num_gpus), ("--tp-size", self.tp_size)):
            if value < 1:
                raise UserError(f"{name} {value}: must be at least 1")
        if self.num_gpus % self.tp_size:
            raise UserError(
                f"--num-gpus {self.num_gpus} cannot be divided into instances of --tp-size {self.tp_size}: num_gpus = "
                f"total_shard * tp_size. Use {self.num_gpus - self.num_gpus % self.tp_size or self.tp_size} GPUs, or "
                "a tp_size that divides them."
            )

    @property
    def total_shard(self) -> int:
        """Number of instances, each with a part of the rows."""
        return self.num_gpus // self.tp_size

    def allot(self, gpus: Sequence[str]) -> list[list[str]]:
        """Return the GPUs of each instance; empty lists on a machine without GPUs.

        Raises UserError if the machine has fewer GPUs than requested.
        """
        if not gpus:
            return [[] for _ in range(self.total_shard)]
        if self.num_gpus > len(gpus):
            raise UserError(
                f"--num-gpus {self.num_gpus}: this machine has {len(gpus)} ({short_names(gpus)}); use at most "
                f"{len(gpus)}, or {ON_CPU}"
            )
        return [list(gpus[first : first + self.tp_size]) for first in range(0, self.num_gpus, self.tp_size)]

    def deal(self, rows: Sequence[T]) -> list[list[T]]:
        """Distribute the rows round-robin over the instances."""
        return [list(rows[index :: self.total_shard]) for index in range(self.total_shard)]


DECIDES = (
    "run.domain",
    "run.seed",
    "model",
    "data",
    "eval.temperature",
    "eval.max_length",
    "eval.top_p",
    "eval.top_k",
    "eval.repetition_penalty",
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
    images: tuple[Path, ...] = ()
    """Pictures of the one prompt, before its text."""
    videos: tuple[Path, ...] = ()
    """Videos of the one prompt, after the pictures."""
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
class GenerationWeights:
    """The weights for generation."""

    folder: str = ""
    """Folder or URL of the checkpoint; empty for the recipe's model."""
    version: int = 0
    digest: str = ""
    """SHA-256 of its manifest, and so of its whole content."""

    @classmethod
    def find(cls, request: Request, config: RunConfig | None = None) -> GenerationWeights:
        """Find and verify the checkpoint. Raises UserError if it is missing or damaged, or its base model has changed.

        config: has the base model of adapters; None: it is that of the checkpoint.
        """
        if not request.checkpoint:
            if request.step is not None:
                raise UserError(f"--step {request.step} needs the directory of a run; give it with --checkpoint")
            return cls()
        folder = find_checkpoint(request.checkpoint, step=request.step)
        verify(folder)
        check_base(folder, None if config is None else recipe_of(config))
        state = train_state(folder)
        return cls(folder=str(folder), version=state.step, digest=folder.digest(MANIFEST))

    @property
    def name(self) -> str:
        return f"step_{self.version}" if self.folder else "model"


def folder_of(config: RunConfig, request: Request, weights: GenerationWeights, *, command: str) -> Path:
    """The output directory of a command."""
    return (request.out or config.run.directory / command / weights.name).resolve()


def identity(
    config: RunConfig, request: Request, prompts: Prompts, weights: GenerationWeights, *, scored: bool
) -> dict[str, Any]:
    """Return everything that determines the content of rollouts.jsonl; the number of instances does not."""
    recipe = recipe_of(config)
    rows = hashlib.sha256(msgspec.json.encode([prompts.rows, prompts.wrong])).hexdigest()
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
