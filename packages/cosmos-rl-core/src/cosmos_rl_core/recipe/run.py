"""RunConfig: a whole recipe, and the rules between its sections."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from cosmos_rl_core.algorithms.config import AlgorithmConfig, TeacherSection
from cosmos_rl_core.algorithms.table import Rows, find_algorithm
from cosmos_rl_core.episodes.agent_config import AgentSection
from cosmos_rl_core.episodes.config import EnvironmentSection
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.monitor.config import DIVERSITY, MonitorConfig
from cosmos_rl_core.parallel.config import PolicySection
from cosmos_rl_core.recipe.cluster import ClusterSection
from cosmos_rl_core.recipe.sections import (
    CheckpointSection,
    DataRegularizationSection,
    ElasticSection,
    EvalSection,
    LoggingSection,
    PromptsSection,
    RewardSection,
    RolloutSection,
    RunSection,
    TlsSection,
    count_rows,
)
from cosmos_rl_core.settings.base import Problem, Strict
from cosmos_rl_core.settings.problems import as_toml
from cosmos_rl_core.weight_sync import BETWEEN_GPUS, SyncSection

RL_ONLY = ("rollout", "environment", "agent", "reward", "data_regularization", "sync", "monitor")
"""Sections that do not apply to supervised fine-tuning."""


class RunConfig(Strict):
    """A recipe, as `load_config` returns it. Each component is built from its own section."""

    run: RunSection
    model: Any = None
    """[model], an instance of the domain's `Model`."""
    data: Any = None
    """[data], an instance of the domain's `Data`."""
    prompts: PromptsSection = PromptsSection()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    teacher: TeacherSection | None = None
    policy: PolicySection = PolicySection()
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection | None = None
    agent: AgentSection | None = None
    reward: RewardSection = RewardSection()
    data_regularization: DataRegularizationSection = DataRegularizationSection()
    sync: SyncSection = SyncSection()
    tls: TlsSection = TlsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    monitor: MonitorConfig = MonitorConfig()
    logging: LoggingSection = LoggingSection()
    elastic: ElasticSection = ElasticSection()
    cluster: ClusterSection = ClusterSection()

    @property
    def is_sft(self) -> bool:
        """True for training on the rows of [data], also on preferences: no rollouts, rewards or weight sync."""
        return self.trains_on != ""

    @property
    def trains_on(self) -> Rows:
        """As `Algorithm.rows`."""
        return find_algorithm(self.algorithm.name).rows

    def num_held_out(self, rows: Sequence[Any]) -> int:
        """Return how many of the first rows of [data] are evaluated and not trained on.

        Raises UserError if that leaves none to train on.
        """
        part = self.eval.held_out
        if part is None or self.eval.data != self.data:  # rows given to `evaluate` replace them
            return 0
        count = count_rows(part, len(rows))
        if count >= len(rows):
            raise UserError(f"[eval] held_out = {part:g} of {len(rows)} rows leaves none to train on; lower it")
        return count

    def evaluated(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Return those of the rows of [eval.data] that are evaluated."""
        return self.eval.first(rows[: self.num_held_out(rows) or len(rows)])

    @property
    def has_episodes(self) -> bool:
        """Whether rollouts have turns, with an environment or an agent that gives rewards."""
        return self.environment is not None or self.agent is not None

    @property
    def is_taught_alone(self) -> bool:
        """True where a teacher's loss is the only one: rewards, if there are any, are not trained on."""
        return self.teacher is not None and self.teacher.task_coef == 0

    @property
    def policy_sampling(self) -> Any:
        """Sampling parameters of the rollouts that the policy trains on; None in supervised fine-tuning."""
        return None if self.is_sft else self.rollout.sampling.build()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConflict:
    """Two keys whose values are each valid, but not together."""

    key: str
    """The key to change first."""
    other: str
    """The key it conflicts with."""
    wrong: str
    """The problem with `key`, as a phrase that continues with the name of `other`."""
    suggestion: str = ""

    @property
    def sections(self) -> frozenset[str]:
        """Sections of both keys; the conflict is reported only if both are valid."""
        return frozenset(key.partition(".")[0] for key in (self.key, self.other))

    def problem(self, config: RunConfig) -> Problem:
        """Return the conflict as a `Problem`, with both values."""
        value, other = _written(config, self.key), _written(config, self.other)
        is_section = isinstance(reduce(getattr, self.other.split("."), config), Strict)
        wrong = f"{self.wrong} {self.other}" + (f" = {other}" if other else "" if is_section else " (not set)")
        return Problem(key=self.key, given=value, wrong=wrong, suggestion=self.suggestion)


def conflicts(config: RunConfig, *, sections: Collection[str]) -> Iterator[KeyConflict]:
    """Yield every pair of conflicting keys; `sections` names the sections that the recipe contains."""
    yield from _sft_conflicts(config, sections=sections) if config.is_sft else _rl_conflicts(config)
    yield from _length_conflicts(config)
    yield from _autoscale_conflicts(config)
    if config.agent is not None and config.environment is not None:
        yield KeyConflict(
            key="agent", other="environment", wrong="plays the rollouts, as does", suggestion="remove one"
        )
    if config.agent is not None and config.agent.port and config.rollout.replicas > 1:
        yield KeyConflict(
            key="agent.port",
            other="rollout.replicas",
            wrong="is the port of one replica, and there are others with",
            suggestion="set it to 0: each takes a free one, which the run prints",
        )
    yield from _tls_conflicts(config)
    yield from _sync_conflicts(config)
    yield from _colocate_conflicts(config)
    if config.is_sft and config.run.colocate:
        yield KeyConflict(key="run.colocate", other="algorithm.name", wrong="has no rollouts to take turns with")
    yield from _curriculum_conflicts(config)
    if config.is_sft and config.eval.loss_data is not None:
        yield KeyConflict(
            key="eval.loss_data",
            other="algorithm.name",
            wrong="is measured beside rewards, but there are no rewards with",
            suggestion="rename it to [eval.data]",
        )
    sampled = config.rollout.sampling
    if sampled is not None and sampled.unit != "tokens":
        for key in config.eval.of_tokens:
            yield KeyConflict(key=f"eval.{key}", other="run.domain", wrong="is of tokens, which are not sampled with")
    if config.eval.held_out is not None and config.eval.data != config.data:
        yield KeyConflict(
            key="eval.held_out",
            other="eval.data",
            wrong="evaluates rows of [data] in place of those of",
            suggestion="remove one of the two",
        )
    if config.eval.every_steps and config.eval.data is None and config.eval.held_out is None:
        yield KeyConflict(
            key="eval.every_steps",
            other="eval.data",
            wrong="has no rows to evaluate on without",
            suggestion="add [eval.data], or held_out",
        )
    if config.checkpoint.keep_best and _never_measured(config):
        yield KeyConflict(
            key="checkpoint.best_metric",
            other="eval.data" if config.eval.data is None else "algorithm.name",
            wrong="is a metric that this run does not have, with",
            suggestion='name one of metrics.jsonl or eval.jsonl, such as "-loss"',
        )


def _curriculum_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    curriculum = config.prompts.curriculum
    if curriculum is None:
        return
    if config.is_sft or not config.reward.functions:
        yield KeyConflict(
            key="prompts.curriculum",
            other="algorithm.name" if config.is_sft else "reward.functions",
            wrong="selects rows by the rewards of their rollouts, and there are none with",
            suggestion="remove [prompts.curriculum]",
        )
    if curriculum.solved_reward <= curriculum.failed_reward:
        yield KeyConflict(
            key="prompts.curriculum.solved_reward", other="prompts.curriculum.failed_reward", wrong="must be above"
        )


def _tls_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    if config.tls.weights and not config.tls.enabled:
        yield KeyConflict(key="tls.weights", other="tls.enabled", wrong="has no certificates with")
    if config.tls.weights and config.sync.transport.startswith("nixl"):
        yield KeyConflict(
            key="sync.transport",
            other="tls.weights",
            wrong="does not encrypt, which conflicts with",
            suggestion='set it to "auto" or "tcp"',
        )


def _never_measured(config: RunConfig) -> bool:
    """Whether `best_metric` needs an evaluation that is not configured, or rewards in supervised fine-tuning."""
    metric = config.checkpoint.best_metric.removeprefix("-")
    if metric.startswith("eval/") and config.eval.data is None:
        return True
    return config.trains_on == "responses" and "reward" in metric


def _sft_conflicts(config: RunConfig, *, sections: Collection[str]) -> Iterator[KeyConflict]:
    if config.teacher is not None and config.trains_on != "responses":
        yield KeyConflict(
            key="teacher", other="algorithm.name", wrong="does not apply with", suggestion="remove [teacher]"
        )
    elif config.teacher is not None and config.teacher.loss == "advantage":
        yield KeyConflict(
            key="teacher.loss",
            other="algorithm.name",
            wrong="needs tokens that the policy sampled, and there are none with",
            suggestion='set it to "divergence"',
        )
    for section in RL_ONLY:
        if section in sections:
            yield KeyConflict(
                key=section,
                other="algorithm.name",
                wrong="does not apply with",
                suggestion=f"remove [{section}]",
            )


def _rl_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    if not config.reward.functions and not config.is_taught_alone:
        alone = "" if config.teacher is None else ", or set [teacher] task_coef = 0 to learn from the teacher alone"
        yield KeyConflict(
            key="reward.functions",
            other="algorithm.name",
            wrong="must name at least one reward with",
            suggestion=f"add [[reward.functions]] with a name{alone}",
        )
    compares = find_algorithm(config.algorithm.name).advantage is None and config.algorithm.advantage != "gae"
    if config.rollout.group_size == 1 and compares and not config.is_taught_alone:
        yield KeyConflict(
            key="rollout.group_size",
            other="algorithm.advantage",
            wrong="must be at least 2, to compare rollouts of a prompt, for",
        )
    yield from _started_conflicts(config)
    if (config.algorithm.max_variance_rollouts or 0) > config.rollout.group_size:
        yield KeyConflict(
            key="algorithm.max_variance_rollouts",
            other="rollout.group_size",
            wrong="must be at most",
        )
    if config.data_regularization.data is not None and not config.data_regularization.coef:
        yield KeyConflict(
            key="data_regularization.coef",
            other="data_regularization.data",
            wrong="must be above 0 with",
            suggestion="set it, 0.01 for example, or remove [data_regularization.data]",
        )
    if config.is_taught_alone and not config.reward.functions:
        yield from _filter_conflicts(config)
    yield from _monitor_conflicts(config)
    if config.rollout.sampling is not None:
        yield from _term_conflicts(config)
        yield from _episode_conflicts(config)


def _started_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    """Reject rollouts that have more in common than a prompt: each is a request with a seed of its own."""
    key, started, sampling = "rollout.started_rollouts", config.rollout.started_rollouts, config.rollout.sampling
    if started is None:
        return
    if started <= config.rollout.group_size:
        yield KeyConflict(key=key, other="rollout.group_size", wrong="must be above")
    if config.has_episodes:
        other = "agent" if config.environment is None else "environment"
        wrong = "starts rollouts one by one, and all episodes of a group begin with one seed with"
        yield KeyConflict(key=key, other=other, wrong=wrong, suggestion="remove it")
    elif sampling is not None and sampling.unit != "tokens":
        wrong = "is of answers of tokens, which are not sampled with"
        yield KeyConflict(key=key, other="run.domain", wrong=wrong, suggestion="remove it")


def _filter_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    """Reject rules about the rewards of a group where there are none."""
    keys = {"filter_zero_variance": False, "filter_low": None, "filter_high": None, "mask_prefix_terms": 0}
    keys |= {"max_variance_rollouts": None}
    for key, default in keys.items():
        if getattr(config.algorithm, key) != default:
            yield KeyConflict(
                key=f"algorithm.{key}",
                other="reward.functions",
                wrong="has no rewards to compare without",
                suggestion="remove it",
            )


def _monitor_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    """Check the inputs of the monitor, and the checkpoints that a rollback needs."""
    if set(config.monitor.judges) - {f.title for f in config.reward.functions if f.weight == 0}:
        yield KeyConflict(
            key="monitor.judges",
            other="reward.functions",
            wrong="names a judge that is not a reward of weight 0 in",
            suggestion="add it there with weight = 0, so that it is measured but not trained on",
        )
    if DIVERSITY in config.monitor.judges:
        yield KeyConflict(
            key="monitor.judges",
            other="eval.data",
            wrong=f"names {DIVERSITY}, which compares rollouts of a prompt, but evaluation generates one per row of",
            suggestion=f'remove it: a rule with watch = "{DIVERSITY}" uses the value from training',
        )
    if config.monitor.rolls_back and not config.checkpoint.every_steps:
        yield KeyConflict(
            key="checkpoint.every_steps",
            other="monitor.rules",
            wrong="must be above 0, so that a checkpoint to roll back to exists, with a rollback in",
        )
    if config.monitor.data_rows and config.eval.loss_data is None:
        yield KeyConflict(
            key="monitor.data_rows",
            other="eval.loss_data",
            wrong="has no rows to score without",
            suggestion="add [eval.loss_data], or set best_of_data",
        )


def _sync_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    """Check the interval of versions that engines load."""
    if config.sync.interval > config.sync.max_staleness + 1:
        yield KeyConflict(
            key="sync.interval",
            other="sync.max_staleness",
            wrong="lets weights become interval - 1 versions old, which must be at most",
            suggestion=f"set max_staleness = {config.sync.interval - 1} or more",
        )
    if config.sync.interval > 1 and config.sync.delta:
        yield KeyConflict(
            key="sync.interval",
            other="sync.delta",
            wrong="must be 1, as changes are those since the version before, with",
        )


def _colocate_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    """Check the settings that turns on the same GPUs need."""
    sync = config.sync
    wrong = {
        "run.placement": (
            config.run.placement == "external",
            "starts workers on several machines, which cannot take turns with",
        ),
        "run.share_gpus": (config.run.share_gpus, "puts both on a GPU at the same time, which contradicts"),
        "policy.replicas": (config.policy.replicas > 1, "must be 1, with more ranks in [policy.parallel], with"),
        "policy.num_nodes": (config.policy.num_nodes > 1, "must be 1 with"),
        "sync.max_staleness": (sync.max_staleness > 1, "must be 0 or 1 with"),
        "sync.staging": (sync.staging != "shadow", 'must be "shadow", as weights arrive while the engine sleeps, with'),
        "sync.transport": (
            sync.transport in BETWEEN_GPUS,
            "reads weights on the GPU, where the policy has none after its turn, with",
        ),
    }
    for key, (is_wrong, text) in wrong.items():
        if config.run.colocate and is_wrong:
            yield KeyConflict(key=key, other="run.colocate", wrong=text)


def _autoscale_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    """Check that workers can be added, and the limits of their number."""
    section, key = config.elastic.autoscale, "elastic.autoscale.max_rollouts"
    if not section.max_rollouts:
        return
    if config.run.placement != "local":
        yield KeyConflict(
            key=key,
            other="run.placement",
            wrong="needs workers that the run starts itself, not",
            suggestion="remove it and use cosmos-rl scale",
        )
    if section.min_rollouts > section.max_rollouts:
        yield KeyConflict(key=key, other="elastic.autoscale.min_rollouts", wrong="must be at least")
    if config.rollout.replicas > section.max_rollouts:
        yield KeyConflict(key=key, other="rollout.replicas", wrong="must be at least")


def _term_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    """Check the maximum length of a rollout."""
    length_key = f"rollout.sampling.{config.rollout.sampling.length_key}"
    if config.algorithm.overlong_buffer_terms > config.rollout.sampling.max_terms:
        yield KeyConflict(
            key="algorithm.overlong_buffer_terms",
            other=length_key,
            wrong="must be at most",
        )
    sampling, terms = config.rollout.sampling, config.policy.microbatch_terms
    if sampling.least_microbatch_terms > terms:
        yield KeyConflict(
            key="policy.microbatch_terms",
            other=length_key,
            wrong="must be large enough for a whole rollout: its prompt and up to",
            suggestion="raise the first or lower the second",
        )
    elif sampling.least_microbatch_terms < sampling.max_terms:
        yield from _cut_conflicts(config)


def _episode_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    """Check that turns are of tokens, and their maximum length."""
    sampling, section = config.rollout.sampling, config.environment
    if section is None:
        return
    if sampling.unit != "tokens":
        yield KeyConflict(
            key="environment.name",
            other="run.domain",
            wrong="answers turns of tokens, which are not sampled with",
            suggestion="remove [environment]",
        )
    elif section.max_turn_tokens is not None and section.max_turn_tokens > sampling.max_terms:
        yield KeyConflict(
            key="environment.max_turn_tokens",
            other=f"rollout.sampling.{sampling.length_key}",
            wrong="must be at most that of the whole episode,",
        )


def _cut_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    """Reject sums and averages over whole rollouts in a domain that splits rollouts across microbatches."""
    algorithm = config.algorithm
    averages = {
        "algorithm.loss": algorithm.loss in ("sequence_clipped", "vespo"),
        "algorithm.correction_level": algorithm.correction_level != "term",
        "algorithm.sequence_mask_delta": algorithm.sequence_mask_delta is not None,
    }
    for key, is_average in averages.items():
        if is_average:
            yield KeyConflict(
                key=key,
                other="policy.microbatch_terms",
                wrong="needs whole rollouts, but this domain splits them into microbatches of",
                suggestion='set loss = "clipped"' if key == "algorithm.loss" else "remove it",
            )


def _length_conflicts(config: RunConfig) -> Iterator[KeyConflict]:
    """Check the length of the run."""
    steps, schedule = config.run.max_steps, config.policy.schedule
    if steps is None and config.prompts.epochs is None:
        yield KeyConflict(
            key="run.max_steps",
            other="prompts.epochs",
            wrong="is required without",
            suggestion="set one of them, or the run never ends",
        )
    elif steps is None and schedule.name != "constant":
        yield KeyConflict(key="run.max_steps", other="policy.schedule.name", wrong="is required with")
    if steps is not None and schedule.warmup_steps > steps:
        yield KeyConflict(
            key="policy.schedule.warmup_steps",
            other="run.max_steps",
            wrong="must be at most",
        )


def _written(config: RunConfig, key: str) -> str:
    """The value of a dotted key as TOML; empty for a section or an unset key."""
    value = reduce(getattr, key.split("."), config)
    return "" if value is None or value == () or isinstance(value, Strict) else as_toml(value)
