"""The sections of a recipe. Counts say what they count, durations end in `_s`, sizes in `_bytes`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import Sampling
from cosmos_rl_core.weight_sync import BUCKET_BYTES, FULL_EVERY


class RunSection(Strict):
    """[run]: what this run is and when it ends."""

    domain: str = Field(min_length=1)
    """The domain package: "llm", or "module:attribute" for one of your own."""
    name: str = Field(default="run", min_length=1)
    """Name of the run; by default the recipe's file name, or its folder's for a recipe called run.toml."""
    output_dir: str = Field(default="runs/{name}", min_length=1)
    """Where the run's files go; {name} stands for the run's name."""
    seed: int = Field(default=0, ge=0)
    """Seed of everything that draws: data order, initial weights, sampling."""
    placement: Literal["local", "inline"] = "local"
    """"local": processes on this machine; "inline": everything in one process, for debugging."""
    bind: str = Field(default="127.0.0.1", min_length=1)
    """Address that this machine is reached at by the run's other machines; the default is for runs on one machine."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps after which the run ends; without it the run ends after [prompts] epochs."""
    log_every: int = Field(default=1, ge=1)
    """Steps between two lines on the console; files always get every step."""

    @field_validator("output_dir")
    @classmethod
    def _with_name(cls, value: str, info: ValidationInfo) -> str:
        return value.replace("{name}", info.data.get("name", "run"))

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return Path(self.output_dir)


class PromptsSection(Strict):
    """[prompts]: the order in which the rows of [data] are drawn."""

    shuffle: bool = True
    """Draw the rows of each epoch in a new order, fixed by the seed and the epoch."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data; without it the stream is endless and [run] max_steps ends the run."""


class SamplingSection(Strict):
    """[rollout.sampling]: how tokens are sampled."""

    unit: ClassVar[str] = "tokens"
    length_key: ClassVar[str] = "max_tokens"

    max_tokens: int = Field(default=256, ge=1)
    """Most tokens to generate for one rollout."""
    temperature: float = Field(default=1.0, gt=0)
    """Above 0, for greedy rollouts of a prompt are all the same; [eval] has its own."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the likeliest tokens that together reach this probability; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from this many of the likeliest tokens; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Texts that end a rollout."""

    @property
    def max_terms(self) -> int:
        """A term is a token."""
        return self.max_tokens

    @property
    def least_microbatch_terms(self) -> int:
        """A whole rollout: its tokens are read together."""
        return self.max_terms

    def evaluation(self, *, temperature: float, max_terms: int | None) -> Sampling:
        """Return those of an evaluation, with the two keys of [eval] on top."""
        update = {"temperature": temperature, "max_tokens": max_terms or self.max_tokens}
        return self.model_copy(update=update).build()

    def build(self) -> Sampling:
        """Return the sampling parameters an engine takes."""
        return Sampling(
            max_terms=self.max_terms,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
        )


class SpoolSection(Strict):
    """[rollout.spool]: large groups stay with the replica that made them, where the policy reads them."""

    threshold_bytes: int = Field(default=2**20, ge=0)
    """Size from which a group stays there; smaller ones travel through the controller. 0 keeps all."""
    capacity_bytes: int = Field(default=2**34, ge=1)
    """Most bytes of groups that one replica holds; while no more fit, it takes no prompts."""
    directory: str | None = Field(default=None, min_length=1)
    """Folder for them, such as one on a local NVMe disk or /dev/shm; without it the run's own spool/."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Longest wait for the next bytes from a replica on another machine, before the group is generated again."""

    @field_validator("directory")
    @classmethod
    def _the_same_from_everywhere(cls, directory: str | None) -> str | None:
        return None if directory is None else os.path.abspath(directory)


class RolloutSection(Strict):
    """[rollout]: generation."""

    replicas: int = Field(default=1, ge=1)
    """Copies of the engine that generate side by side."""
    engine: str = Field(default="torch", min_length=1)
    """An engine of the domain, of an installed plug-in, or "module:attribute"."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one prompt."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of a replica; without it the replicas of all roles share the machine's cores."""
    max_attempts: int = Field(default=3, ge=1)
    """Errors after which a prompt is dropped with its reason; a worker's death is not one."""
    sampling: Any = SamplingSection()
    """How rollouts are drawn, with the domain's own keys."""
    spool: SpoolSection = SpoolSection()
    """Where large groups stay."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Handed to the engine as they are."""


class RewardFunctionSection(Strict):
    """[[reward.functions]]: one reward and its weight."""

    name: str = Field(min_length=1)
    """A reward of the domain, of an installed plug-in, or "module:attribute"."""
    label: str = ""
    """What metrics call it; by default the last part of its name."""
    weight: float = 1.0
    """Factor in the sum; 0 records the value without training on it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""

    @property
    def title(self) -> str:
        return self.label or self.name.rpartition(":")[2]


class RewardSection(Strict):
    """[reward]: what is good."""

    functions: tuple[RewardFunctionSection, ...] = ()
    """Their weighted sum is the reward of a rollout."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Longest that one function may take over one group."""

    @field_validator("functions")
    @classmethod
    def _distinct(cls, functions: tuple[RewardFunctionSection, ...]) -> tuple[RewardFunctionSection, ...]:
        seen = [function.title for function in functions]
        twice = sorted({name for name in seen if seen.count(name) > 1})
        if twice:
            raise ValueError(f"names a reward more than once: {', '.join(twice)}; give each a label of its own")
        return functions


class DataRegularizationSection(Strict):
    """[data_regularization]: a supervised loss beside the rollouts' (DDRL's data term, the mix of InstructGPT)."""

    coef: float = Field(default=0.0, ge=0)
    """Coefficient of that loss; 0 switches it off."""
    rows_per_step: int = Field(default=8, ge=1)
    """Supervised rows in an optimizer step."""
    shuffle: bool = True
    """Draw the rows of each epoch in a new order, fixed by the seed and the epoch."""
    data: Any = None
    """The rows, with the keys of [data]; without it those of [data] itself."""


class SyncSection(Strict):
    """[sync]: how new weights reach the engines, and how old the ones in use may be."""

    max_staleness: int = Field(default=1, ge=0)
    """Most versions the weights a rollout was drawn with may lie behind those it trains; 0 is on-policy."""
    backend: str = Field(default="transfer", min_length=1)
    """The package that moves the weights: "transfer" (cosmos-rl-transfer), or "module:attribute"."""
    interval: int = 1
    """Optimizer steps between two pushes of the weights."""
    transport: str = Field(default="auto", min_length=1)
    """"auto" takes what is fastest between two processes; "shm", "tcp" and "nixl" name one."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type that wider weights travel in; without it their own."""
    bucket_bytes: int = Field(default=BUCKET_BYTES, ge=4096)
    """Size of the pieces that weights are hashed and pulled in; each side needs two of them."""
    staging: Literal["shadow", "in_place"] = "shadow"
    """Where engines receive: "shadow", a second copy in host memory, or "in_place", while generation pauses."""
    delta: bool = False
    """Send what changed since the version before, where that is less; costs one copy of the weights at the trainer."""
    full_every: int = Field(default=FULL_EVERY, ge=1)
    """With delta: versions from one that is sent whole to the next."""
    relay: Literal["auto", "on", "off"] = "auto"
    """Let engines feed each other: "auto" where they are on more hosts than the trainers."""
    patience_s: float = Field(default=0.5, ge=0)
    """How long an optimizer step waits for engines that still read, before what they lack is copied for them."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for the other side before the sync is given up and named."""

    @field_validator("interval")
    @classmethod
    def _every_step(cls, interval: int) -> int:
        if interval != 1:
            raise ValueError("only a push after every step is supported; set it to 1")
        return interval


class CheckpointSection(Strict):
    """[checkpoint]: what survives."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves only at the end and when the run is stopped."""
    asynchronous: bool = True
    """Copy to the host's memory and write while training goes on; false waits, and needs no memory for the copy."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    keep_best: int = Field(default=0, ge=0)
    """Checkpoints kept beside those for the best metrics."""
    best_metric: str = Field(default="eval/reward_mean", min_length=1)
    """The metric, of eval.jsonl or metrics.jsonl; "-loss" with a minus where lower is better."""
    path: str | None = Field(default=None, min_length=1)
    """Where they lie: a folder that all ranks reach, or "s3://bucket/prefix"; without it the run's own checkpoints/."""

    @field_validator("path")
    @classmethod
    def _the_same_from_everywhere(cls, path: str | None) -> str | None:
        return path if path is None or "://" in path else os.path.abspath(path)


class EvalSection(Strict):
    """[eval]: rewards, or in supervised training the loss, on rows that are not trained on."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first step and after the last."""
    limit: int | None = Field(default=None, ge=1)
    """Rows to use, from the start; without it all."""
    max_length: int | None = Field(default=None, ge=1)
    """Most tokens of an answer, or simulator steps of an episode; without it the limit of [rollout.sampling]."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    by: tuple[str, ...] = ()
    """Columns of the rows whose values get metrics of their own beside those of all, such as ["task"]."""
    data: Any = None
    """The rows to evaluate on, with the keys of [data]; without it nothing is evaluated."""
    loss_data: Any = None
    """Rows with wanted answers whose loss is measured beside the rewards, with the keys of [data]: real data that the
    model should still find likely."""

    def due(self, version: int, *, last: int | None) -> bool:
        """Return whether this version is evaluated: the untrained, the last, and those asked for in between."""
        regular = self.every_steps > 0 and version % self.every_steps == 0
        measured = self.data is not None or self.loss_data is not None
        return measured and (regular or version in (0, last))


class LoggingSection(Strict):
    """[logging]: where metrics and rollouts are written."""

    sinks: tuple[Literal["console", "jsonl", "tensorboard", "wandb"], ...] = ("console", "jsonl")
    """Where metrics go; "tensorboard" and "wandb" also show grids of samples, where those are images or videos."""
    rollouts_every: int = Field(default=1, ge=0)
    """Steps between two files of rollouts; 0 writes none."""
    media_every: int = Field(default=10, ge=0)
    """Versions between two records of samples that are seen, such as videos; 0 keeps none."""
    media_groups: int = Field(default=4, ge=1)
    """Groups in such a record."""


class ElasticSection(Strict):
    """[elastic]: what happens when a worker goes silent or dies."""

    lease_ttl_s: float = Field(default=600.0, gt=0)
    """Longest a rollout worker may hold a prompt without progress before another one gets it."""
    suspect_grace_s: float = Field(default=15.0, gt=0)
    """Time a worker whose connection broke has to come back before it counts as gone."""
    restart_workers: int = Field(default=3, ge=0)
    """Times each rollout worker is started again after its process died."""
