"""The sections of a recipe. Names of counts end in the counted unit, durations in `_s`, sizes in `_bytes`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from cosmos_rl_core.interfaces import SamplingConfig
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import Sampling

AUTO = "auto"
"""The value of [rollout] engine for which `recipe.load` puts the name of one."""


def count_rows(part: float, total: int) -> int:
    """Return how many of `total` rows a part is: a number from 1, or a share below 1, of which one row is the least."""
    return min(int(part), total) if part >= 1 else max(1, int(part * total))


class RunSection(Strict):
    """[run]: name, output directory, seed and length of the run."""

    domain: str = Field(min_length=1)
    """The domain: an installed one such as "llm", or "module:attribute" for your own."""
    name: str = Field(default="run", min_length=1)
    """Name of the run. Default: the recipe's file name without .toml, or its folder's name if the file is run.toml."""
    output_dir: str = Field(default="runs/{name}", min_length=1)
    """Directory for the run's files; {name} is replaced by the run's name."""
    seed: int = Field(default=0, ge=0)
    """Seed of all randomness: data order, initial weights, sampling."""
    placement: Literal["local", "inline", "external"] = "local"
    """"local": worker processes on this machine; "external": workers are started by `cosmos-rl worker`, on any machine;
    "inline": everything in one process, for debugging."""
    device: Literal["auto", "cpu"] = "auto"
    """"auto": GPUs where this machine has any; a GPU that torch cannot use is an error. "cpu": none, as with an empty
    CUDA_VISIBLE_DEVICES."""
    share_gpus: bool = False
    """Allow several processes of the run on one GPU, if it has fewer GPUs than processes. vLLM then gets an equal part
    of gpu_memory_utilization."""
    colocate: bool = False
    """The policy and the rollout replicas take turns on the same GPUs: while one works, the other is in host memory."""
    tf32: bool = True
    """On a GPU, round the inputs of float32 matrix products to TF32 (10 bits of mantissa), which is several times
    faster; false computes them exactly."""
    deterministic: bool = False
    """Train with deterministic kernels alone, which can be slower: the same batch then gives the same weights, bit by
    bit, on GPUs of the same kind in the same layout. An operation that has none ends the run with an error."""
    bind: str = Field(default="127.0.0.1", min_length=1)
    """Address on which the controller listens; the default allows only this machine, "0.0.0.0" all interfaces."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port on which the controller listens; 0 selects a free one."""
    advertise: str = ""
    """Host, or host:port, at which workers reach the controller. Not set: the environment variable
    COSMOS_RL_ADVERTISE, or `bind`."""
    max_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps. Not set: the run ends after [prompts] epochs."""
    log_every: int = Field(default=1, ge=1)
    """Steps between lines on the console; metric files contain every step."""

    @field_validator("output_dir")
    @classmethod
    def _with_name(cls, value: str, info: ValidationInfo) -> str:
        return value.replace("{name}", info.data.get("name", "run"))

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return Path(self.output_dir)


class CurriculumSection(Strict):
    """[prompts.curriculum]: select rows that the policy sometimes solves more often than solved and failed ones."""

    visits: int = Field(default=2, ge=1, le=64)
    """Visits of a row whose success rates are remembered; a row that is skipped has no visit."""
    min_chance: float = Field(default=0.1, ge=0.01, le=1)
    """Least chance of a row to be selected: that of one that was solved, or failed, at every remembered visit."""
    failed_reward: float = Field(default=0.0, allow_inf_nan=False)
    """Reward of a rollout that counts as failed."""
    solved_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Reward of a rollout that counts as solved; rewards in between count in part."""


class PromptsSection(Strict):
    """[prompts]: the order of the rows of [data], and the number of passes over them."""

    shuffle: bool = True
    """Shuffle the rows in every epoch, in an order determined by the seed and the epoch."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data. Not set: rows repeat until [run] max_steps ends the run."""
    curriculum: CurriculumSection | None = None
    """[prompts.curriculum]. Without it every row is selected in every epoch."""


class SamplingSection(Strict):
    """[rollout.sampling]: sampling parameters of the rollouts that are trained on."""

    unit: ClassVar[str] = "tokens"
    length_key: ClassVar[str] = "max_tokens"

    max_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens generated for one rollout."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; 0 is not allowed, as all rollouts of a prompt would be equal. [eval] has its own."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens whose cumulative probability reaches this; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most likely tokens; 0 keeps all."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divide the logits of tokens that prompt or response have already, if positive, by this, and multiply negative
    ones by it; the policy's log-probabilities are of the same distribution. 1 is no penalty."""
    renormalise: bool = True
    """Log-probabilities of engine and policy are among the tokens that top_p and top_k keep, which is the distribution
    that rollouts are sampled from; false: among all tokens, for which the gradient is biased (not with vLLM)."""
    stop: tuple[str, ...] = ()
    """Strings at which generation of a rollout stops."""

    @property
    def max_terms(self) -> int:
        """A term is a token."""
        return self.max_tokens

    @property
    def least_microbatch_terms(self) -> int:
        """A whole rollout, as its tokens are not split across microbatches."""
        return self.max_terms

    def evaluation(self, *, temperature: float, max_terms: int | None) -> Sampling:
        """Return the sampling parameters of an evaluation: these, with temperature and length of [eval]."""
        update = {"temperature": temperature, "max_tokens": max_terms or self.max_tokens}
        return self.model_copy(update=update).build()

    def build(self) -> Sampling:
        """Return the sampling parameters for an engine."""
        return Sampling(
            max_terms=self.max_terms,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            renormalise=self.renormalise,
            stop=self.stop,
        )


class SpoolSection(Strict):
    """[rollout.spool]: storage of large groups at the replica that generated them, where the policy reads them."""

    threshold_bytes: int = Field(default=2**20, ge=0)
    """Minimum size of a group stored at the replica; smaller ones are sent through the controller. 0 stores all."""
    capacity_bytes: int = Field(default=2**34, ge=1)
    """Maximum bytes of groups stored by one replica; while it is full, it requests no prompts."""
    directory: str | None = Field(default=None, min_length=1)
    """Folder of the spool, such as one on a local NVMe disk or in /dev/shm. Not set: spool/ in the run's directory."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Maximum wait for more bytes from a replica on another machine; after it the group is generated again."""

    @field_validator("directory")
    @classmethod
    def _the_same_from_everywhere(cls, directory: str | None) -> str | None:
        return None if directory is None else os.path.abspath(directory)


class RolloutParallelSection(Strict):
    """[rollout.parallel]: sharding of a rollout replica's model over GPUs of one machine."""

    tp: int | None = Field(default=None, ge=1)
    """GPUs over which each matrix is sharded. Not set: as in the options of the engine, or 1."""
    pp: int | None = Field(default=None, ge=1)
    """Stages of layers, each on `tp` GPUs of its own. Not set: as in the options of the engine, or 1."""


class RolloutSection(Strict):
    """[rollout]: engine, replicas and group size of generation."""

    replicas: int = Field(default=1, ge=1)
    """Number of engine copies that generate in parallel."""
    engine: str = Field(default=AUTO, min_length=1)
    """Engine of the domain or of an installed plug-in, or "module:attribute". "auto": vLLM for language models on GPUs,
    where it is installed for them and takes the model with these options, else "torch"."""
    group_size: int = Field(default=8, ge=1)
    """Number of rollouts generated for each prompt."""
    started_rollouts: int | None = Field(default=None, ge=1)
    """Rollouts that are started for each prompt, more than group_size: the first group_size that end are the group, and
    the others are cancelled. It waits for no stragglers, and prefers short answers. Not set: group_size."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of a replica. Not set: the machine's cores are divided among all replicas of all roles."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts per prompt before it is dropped; the reason is logged. Crashes of a worker do not count."""
    sampling: Any = SamplingSection()
    """Sampling parameters, with the keys of the domain."""
    spool: SpoolSection = SpoolSection()
    """Storage of large groups."""
    parallel: RolloutParallelSection = RolloutParallelSection()
    """Sharding of a replica over several GPUs."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine."""


class RewardFunctionSection(Strict):
    """[[reward.functions]]: one reward and its weight."""

    name: str = Field(min_length=1)
    """Reward of the domain or of an installed plug-in, or "module:attribute"."""
    label: str = ""
    """Name in metrics. Default: `name`, or the attribute of a "module:attribute"."""
    weight: float = 1.0
    """Factor in the weighted sum; 0 records the value without training on it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""
    own_process: bool | None = None
    """Call the function in a process that is killed and replaced after `timeout_s`; a thread cannot be ended. The
    process builds the function by its name. Not set: as the reward asks for, which `math`, `boxed` and `format` do."""

    @property
    def title(self) -> str:
        return self.label or self.name.rpartition(":")[2]


class RewardSection(Strict):
    """[reward]: the reward functions and their time limit."""

    functions: tuple[RewardFunctionSection, ...] = ()
    """The reward functions; their weighted sum is the reward of a rollout."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one call of a function, for one group."""

    @field_validator("functions")
    @classmethod
    def _distinct(cls, functions: tuple[RewardFunctionSection, ...]) -> tuple[RewardFunctionSection, ...]:
        seen = [function.title for function in functions]
        twice = sorted({name for name in seen if seen.count(name) > 1})
        if twice:
            raise ValueError(f"names a reward more than once: {', '.join(twice)}; give each a label of its own")
        return functions


class DataRegularizationSection(Strict):
    """[data_regularization]: a supervised loss added to the RL loss (DDRL's data term, InstructGPT's PPO-ptx)."""

    coef: float = Field(default=0.0, ge=0)
    """Coefficient of the supervised loss; 0 disables it."""
    rows_per_step: int = Field(default=8, ge=1)
    """Supervised rows per optimizer step."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, in an order determined by the seed and the epoch."""
    data: Any = None
    """The supervised rows, with the keys of [data]. Not set: the rows of [data]."""


class TlsSection(Strict):
    """[tls]: encryption of the connections between the processes of the run."""

    enabled: bool = False
    """TLS 1.3 on all connections to the controller, with certificates of a CA that the run makes for itself; needs
    the extra `tls` of cosmos-rl-core."""
    weights: bool = False
    """TLS also on connections for weights over TCP and for large groups of rollouts."""
    valid_days: float = Field(default=90, gt=0)
    """Validity of the certificates, in days; a resumed run makes new ones."""


class CheckpointSection(Strict):
    """[checkpoint]: interval, number and location of checkpoints."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves only at the end and when the run is stopped."""
    asynchronous: bool = True
    """Copy to host memory and write in the background; false blocks training, but needs no memory for the copy."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: int = Field(default=0, ge=0)
    """Number of additional checkpoints to keep, those with the best `best_metric`."""
    best_metric: str = Field(default="eval/reward_mean", min_length=1)
    """A metric of eval.jsonl or metrics.jsonl; with a minus, as in "-loss", lower is better."""
    max_failures: int = Field(default=3, ge=0)
    """Failed saves in a row after which the run ends with an error; 0: it goes on."""
    path: str | None = Field(default=None, min_length=1)
    """A folder that all ranks can access, or "s3://bucket/prefix". Not set: checkpoints/ in the run's directory."""

    @field_validator("path")
    @classmethod
    def _the_same_from_everywhere(cls, path: str | None) -> str | None:
        return path if path is None or "://" in path else os.path.abspath(path)


class EvalSection(Strict):
    """[eval]: rewards (in supervised training: the loss) on held-out rows."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first step and after the last."""
    held_out: float | None = Field(default=None, gt=0)
    """Evaluate the first rows of [data], which are then not trained on, in place of [eval.data]: their number, or a
    share below 1 of all."""
    limit: float | None = Field(default=None, gt=0)
    """Evaluate only the first rows: their number, or a share below 1 of all. Not set: all."""
    max_length: int | None = Field(default=None, ge=1)
    """Maximum tokens of a response, or simulator steps of an episode. Not set: the limit of [rollout.sampling]."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the most likely tokens whose cumulative probability reaches this. Not set: as in
    [rollout.sampling]."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this many most likely tokens; 0 keeps all. Not set: as in [rollout.sampling]."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """Penalty of tokens that prompt or response have already. Not set: as in [rollout.sampling]."""
    by: tuple[str, ...] = ()
    """Columns to group metrics by, such as ["task"]: each value gets its own metrics, beside those of all rows."""
    data: Any = None
    """The rows to evaluate on, with the keys of [data]. Not set: those of `held_out`, or no evaluation."""
    loss_data: Any = None
    """Rows with reference responses, with the keys of [data]; the supervised loss on them is measured in each
    evaluation, to detect a model that drifts away from real data."""

    @property
    def of_tokens(self) -> dict[str, float]:
        """The keys that are set and apply to tokens alone."""
        settings = {"top_p": self.top_p, "top_k": self.top_k, "repetition_penalty": self.repetition_penalty}
        return {key: value for key, value in settings.items() if value is not None}

    def sampling(self, of_rollouts: SamplingConfig) -> Any:
        """Return the sampling parameters of an evaluation: those of [rollout.sampling], with the keys set here."""
        sampling = of_rollouts.evaluation(temperature=self.temperature, max_terms=self.max_length)
        return replace(sampling, **self.of_tokens) if self.of_tokens else sampling

    @field_validator("limit", "held_out")
    @classmethod
    def _whole_or_share(cls, part: float | None) -> float | None:
        if part is not None and part >= 1 and part != int(part):
            raise ValueError("must be a number of rows, such as 100, or a share below 1, such as 0.1")
        return part

    def first(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Return the rows that are evaluated."""
        return rows if self.limit is None else rows[: count_rows(self.limit, len(rows))]

    def due(self, version: int, *, last: int | None) -> bool:
        """Return whether this version is evaluated: the first, the last, and every `every_steps`-th."""
        regular = self.every_steps > 0 and version % self.every_steps == 0
        measured = self.data is not None or self.loss_data is not None
        return measured and (regular or version in (0, last))


class ProfileSection(Strict):
    """[logging.profile]: a window of steps that torch's profiler records, profile/policy-0.json.gz in the run's
    directory."""

    steps: int = Field(default=0, ge=0)
    """Number of recorded steps; 0: none. A step of a large model takes some 100 MB, with `stack` several times that."""
    wait_steps: int = Field(default=3, ge=0)
    """Steps after the start of the policy that are left out, before one more as warm-up."""
    ranks: tuple[int, ...] = (0,)
    """Ranks of each policy replica that record."""
    shapes: bool = False
    """Record the shapes of operators' inputs."""
    memory: bool = False
    """Record allocations."""
    stack: bool = False
    """Record the line of the source of each operator."""
    modules: bool = False
    """Record the module of each operator."""


class LoggingSection(Strict):
    """[logging]: destinations of metrics, and intervals at which rollouts and media are written."""

    sinks: tuple[Literal["console", "jsonl", "tensorboard", "wandb", "trackio", "mlflow"], ...] = ("console", "jsonl")
    """Destinations of metrics beside metrics.jsonl, which every run has; the services after "jsonl" also show grids of
    samples that are images or videos."""
    project: str = Field(default="cosmos-rl", min_length=1)
    """Project of the run in wandb and trackio, experiment in mlflow; [run] name is its name there."""
    group: str = ""
    """Group of the run in that project."""
    rollouts_every: int = Field(default=1, ge=0)
    """Steps between files of rollouts; 0 writes none."""
    term_groups: int = Field(default=4, ge=0)
    """Number of groups a file in which each term is written, with its log-probability; about 25 bytes a term. They are
    the first, those of the lowest and the highest mean reward, the one whose rewards differ most, and the next."""
    media_every: int = Field(default=10, ge=0)
    """Versions between galleries of samples that are images or videos, or answers about them; 0 writes none."""
    media_groups: int = Field(default=4, ge=1)
    """Number of groups in a gallery."""
    profile: ProfileSection = ProfileSection()
    """A window of steps that torch's profiler records."""


class AutoscaleSection(Strict):
    """[elastic.autoscale]: adds and drains rollout workers of `cosmos-rl run` by the idle fractions in the metrics."""

    max_rollouts: int = Field(default=0, ge=0)
    """Maximum number of rollout workers; 0: the number is not changed."""
    min_rollouts: int = Field(default=1, ge=1)
    """Minimum number of rollout workers."""
    idle_fraction: float = Field(default=0.3, gt=0, lt=1)
    """If the policy is idle for more than this fraction of each step and rollout workers are not, one is added; if
    rollout workers are and the policy is not, the youngest leaves."""
    steps: int = Field(default=3, ge=1)
    """Consecutive steps with such idle fractions after which the number changes."""
    cooldown_steps: int = Field(default=5, ge=0)
    """Steps after a change, once it is complete, that count neither for nor against the next one."""


class ElasticSection(Strict):
    """[elastic]: time limits and restarts for workers that hang, disconnect or crash."""

    lease_ttl_s: float = Field(default=600.0, gt=0)
    """Time without progress of a rollout worker that has prompts, after which they are given to another worker, and it
    gets no new ones. Without progress for as long again it counts as hung: it is removed from the run and ends. Set it
    above the time of the longest reward."""
    suspect_grace_s: float = Field(default=2.0, gt=0)
    """Time a disconnected worker has to reconnect before it is removed from the run."""
    silence_s: float = Field(default=120.0, gt=0)
    """Time without a heartbeat, which a worker sends each second, after which it counts as hung: it is removed from the
    run after `suspect_grace_s`, and ends when it goes on; `cosmos-rl run` kills and restarts it."""
    stall_s: float = Field(default=1800.0, gt=0)
    """Time without progress of a policy that sends heartbeats, after which it counts as hung: it is removed from the
    run and ends. Progress is the forward and backward pass of a step, and each wait for the controller; set it above
    the time of the longest step, checkpoint and validation."""
    peer_s: float = Field(default=60.0, gt=0)
    """Time after which a policy that others cannot reach is removed from the run. Half of it is for the sum of 32 MB of
    gradients, or for 32 MB of the state of a newcomer, not for all of it; then they connect anew, for which they have
    the other half, to a newcomer at most 5 s."""
    restart_workers: int = Field(default=3, ge=0)
    """Maximum restarts of each worker after its process ends unexpectedly; a policy continues from a checkpoint."""
    restart_controller: int = Field(default=3, ge=0)
    """Maximum restarts of the controller of `cosmos-rl run`, on Linux, after it was killed or has crashed; its workers
    go on meanwhile. 0: the command itself is the controller, whose end is that of the run."""
    leave_s: float = Field(default=20.0, ge=0)
    """Time for a rollout worker to finish its groups after SIGTERM, and to serve those that were not read yet. Set it
    below the time after which the platform kills the process."""
    controller_wait_s: float = Field(default=300.0, ge=0)
    """Time a worker waits for the controller after its connection closed; it goes on with its work meanwhile. 0 ends it
    at once."""
    policy_wait_s: float = Field(default=600.0, ge=0)
    """Time to wait for another policy worker after the last one was lost; 0 ends the run at once."""
    controller_moves: bool = False
    """On SIGTERM, `cosmos-rl controller` serves until the last policy has left, and then exits with 143 as if it were
    killed: the workers wait for the next controller. For platforms that move it to another machine; `cosmos-rl launch
    --on kubernetes` sets it. With false, SIGTERM ends the run."""
    autoscale: AutoscaleSection = AutoscaleSection()
