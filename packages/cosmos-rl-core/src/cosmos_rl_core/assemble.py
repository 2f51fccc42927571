"""Builds the parts of a run from its config. The only file that imports every component."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms.rules import group_rules
from cosmos_rl_core.data.source import PromptSource, UsableRows
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.episodes.agent_config import AgentSection
from cosmos_rl_core.episodes.agents import AgentGenerator
from cosmos_rl_core.episodes.build import build_environments
from cosmos_rl_core.episodes.engine import EpisodeGenerator
from cosmos_rl_core.episodes.interfaces import HoldsSessions
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.interfaces import Reference, RewardFn, RolloutEngine, Teacher
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.setup import ModelSetup, SentAdapters
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.sections import RewardFunctionSection
from cosmos_rl_core.reward.build import build
from cosmos_rl_core.reward.processes import ProcessReward, RewardProcesses
from cosmos_rl_core.reward.rubric import Rubric, WeightedReward
from cosmos_rl_core.rollout.rollouter import Requests, Rollouter
from cosmos_rl_core.types import Prompt, RolloutGroup, Share, TrainBatch
from cosmos_rl_core.weight_sync import WeightSync

if TYPE_CHECKING:  # the controller assembles its parts without torch
    from pathlib import Path

    from cosmos_rl_core.data.mixing import DataTerm
    from cosmos_rl_core.interfaces import Policy
    from cosmos_rl_core.parallel.mesh import ReplicaMesh
    from cosmos_rl_core.train.answer_sums import AnswerSumsStage
    from cosmos_rl_core.train.comparison import EngineComparison
    from cosmos_rl_core.train.trainer import Trainer
    from cosmos_rl_core.train.validation import Validation

log = logging.getLogger(__name__)


def look_up_engine(name: str, domain: DomainBase) -> None:
    """Raise UserError for an engine that neither the domain nor an installed package offers."""
    if name in domain.engines:
        return
    try:
        plugins.locate("cosmos_rl.engines", name, beside=domain.engines)
    except UserError as error:
        raise UserError(f"[rollout] engine = {name!r}: {error}") from error


def build_source(config: RunConfig) -> PromptSource:
    """The training prompts, in the controller."""
    domain = load_domain(config.run.domain)
    rows, origin = domain.load_rows(config.data)
    return PromptSource(
        rows,
        origin=origin,
        skip=config.num_held_out(rows),
        shuffle=config.prompts.shuffle,
        seed=config.run.seed,
        epochs=config.prompts.epochs,
        is_slow=domain.reads_slowly,
    )


def planned_steps(config: RunConfig, source: PromptSource) -> int:
    """Return the steps of the run: [run] max_steps, or the number of whole batches in [prompts] epochs."""
    num_batches = None if source.total is None else source.total // config.policy.prompts_per_step
    if num_batches == 0:
        raise UserError(
            f"{len(source)} rows are fewer than [policy] prompts_per_step = {config.policy.prompts_per_step}: "
            "too few for one step. Lower it, or raise [prompts] epochs."
        )
    limits = [steps for steps in (config.run.max_steps, num_batches) if steps is not None]
    assert limits, "the config asks for max_steps or epochs"
    return min(limits)


def left_over(config: RunConfig, rows: int) -> tuple[str, ...]:
    """Return a note on rows that are not trained on, as a run of whole epochs ends with its last whole batch."""
    total, per_step = (config.prompts.epochs or 0) * rows, config.policy.prompts_per_step
    steps, rest = divmod(total, per_step)
    if rest == 0 or (config.run.max_steps is not None and config.run.max_steps <= steps):
        return ()
    return (f"the last {rest} of {total:,} prompts are fewer than [policy] prompts_per_step, and are not trained on",)


def build_eval_source(config: RunConfig) -> PromptSource | None:
    """The held-out prompts, in file order; None without any, and in supervised runs, whose policy evaluates them."""
    if config.eval.data is None or config.is_sft:
        return None
    rows, origin = load_domain(config.run.domain).load_rows(config.eval.data)
    return PromptSource(config.evaluated(rows), origin=origin, shuffle=False, epochs=1)


def build_rubric(
    config: RunConfig,
    domain: DomainBase,
    given: Mapping[str, Any] | None = None,
    *,
    report: Callable[[str, str], None] | None = None,
) -> Rubric:
    """The weighted rewards of [reward]; those in `given`, by label, are not looked up. report: as of `Rubric`."""
    processes = RewardProcesses(timeout_s=config.reward.timeout_s)

    def function(section: RewardFunctionSection) -> RewardFn | ProcessReward:
        name, options = section.name, section.options
        if not section.own_process:  # a process makes the reward itself, which may load a model
            reward = build_reward(name, domain, options=options, given=(given or {}).get(section.title))
            if section.own_process is False or not getattr(reward, "own_process", False):
                return reward
            if ":" not in name:  # its class, which is imported without the rest of the domain
                name = f"{type(reward).__module__}:{type(reward).__qualname__}"
        elif domain.reward(name) is not None:
            name = f"{config.run.domain}:{name}"
        return processes.reward(name, label=section.title, options=options)

    rewards = [
        WeightedReward(name=section.title, weight=section.weight, function=function(section))
        for section in config.reward.functions
    ]
    return Rubric(rewards, timeout_s=config.reward.timeout_s, processes=processes, report=report)


def build_reward(name: str, domain: DomainBase, *, options: Mapping[str, Any], given: Any = None) -> RewardFn:
    """A reward by name: one of the domain's, an installed plug-in, or "module:attribute", which may be `given`.

    options: as of `reward.build.build`.
    """
    factory: Any = given or domain.reward(name) or plugins.load("cosmos_rl.rewards", name)
    return build(factory, options, where=f"[reward] {name}", is_attribute=":" in name)


def build_engine(config: RunConfig, domain: DomainBase, *, processes_per_gpu: int = 1) -> RolloutEngine:
    """An engine by name: one of the domain's, an installed plug-in, or "module:attribute".

    The last two are called as `factory(model, data=data, options=options)`, with the sections [model], [data] and
    [rollout.options]. processes_per_gpu: above 1 where the engine shares its GPUs with other processes of the run.
    """
    name, options = config.rollout.engine, engine_options(config, domain)
    if name in domain.engines:
        if config.run.colocate:
            options = sleeping_options(config, domain)
        if processes_per_gpu > 1:
            options = domain.share_gpu(name, options, processes=processes_per_gpu)
        return domain.build_engine(config.model, data=config.data, name=name, options=options)
    return cast(RolloutEngine, load_engine(name)(config.model, data=config.data, options=options))


def engine_options(config: RunConfig, domain: DomainBase) -> Mapping[str, Any]:
    """Return [rollout.options] with the sizes of [rollout.parallel].

    Raises UserError for an engine that cannot be spread over GPUs, and if both sections contain different sizes.
    """
    rollout, parallel = config.rollout, config.rollout.parallel
    if parallel.tp is None and parallel.pp is None:
        return rollout.options
    where = " and ".join(f"{axis} = {size}" for axis, size in parallel if size is not None)
    try:
        return spread_engine(config, domain, rollout.options, tp=parallel.tp, pp=parallel.pp)
    except UserError as error:
        raise UserError(f"[rollout.parallel] {where}: {error}") from error


def spread_engine(
    config: RunConfig, domain: DomainBase, options: Mapping[str, Any], *, tp: int | None, pp: int | None
) -> Mapping[str, Any]:
    """Return options of the engine for `pp` stages of `tp` GPUs each. Raises UserError if it cannot be spread."""
    name = config.rollout.engine
    if name in domain.engines:
        return domain.spread_engine(name, options, tp=tp, pp=pp)
    return DomainBase.spread_engine(domain, name, options, tp=tp, pp=pp)  # a plug-in's engine runs on one GPU


def sleeping_options(config: RunConfig, domain: DomainBase) -> Mapping[str, Any]:
    """Return the options of an engine that sleeps between its turns. Raises UserError for one that cannot."""
    options, name = engine_options(config, domain), config.rollout.engine
    sleeping = domain.sleeping_engine(name, options)
    if sleeping is None:
        raise UserError(
            f"[run] colocate = true: the engine {name!r} of the {domain.name} domain cannot free its memory between "
            "turns; set it to false"
        )
    return sleeping


def load_engine(name: str) -> Callable[..., Any]:
    """Import an engine's factory from a package or module. Raises UserError where that fails, or is not a function."""
    factory = plugins.load("cosmos_rl.engines", name)
    if not callable(factory):
        raise UserError(f"[rollout] engine = {name!r} is {factory!r}, not a function that makes an engine")
    return factory


def build_rollouter(
    config: RunConfig,
    domain: DomainBase,
    engine: RolloutEngine,
    *,
    run_dir: Path | None = None,
    name: str = "",
    rewards: Mapping[str, Any] | None = None,
    timeline: Timeline | None = None,
    report: Callable[[str, str], None] | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Rollouter:
    """The rollouter of a replica; samples are saved in `run_dir`, if given, under the replica's name.

    rewards: functions by label, for those of [reward] that are not looked up. report: as of `Rubric`. log: as of
    `Rollouter`.
    """
    sampling, logging = config.rollout.sampling, config.logging
    recorders = None, None
    if run_dir is not None and logging.media_every:
        keep = partial(domain.recorder, name=name, groups=logging.media_groups)
        recorders = keep(run_dir / "media", every=logging.media_every), keep(run_dir / "media" / "eval", every=1)
    tokens = domain.term_tokens if domain.has_tokens else None
    compares = not config.is_taught_alone
    return Rollouter(
        engine,
        rubric=build_rubric(config, domain, rewards, report=report),
        rules=group_rules(config.algorithm, max_terms=sampling.max_terms, compares=compares, tokens=tokens),
        requests=Requests(
            group_size=config.rollout.group_size,
            num_started=config.rollout.started_rollouts,
            sampling=sampling.build(),
            eval_sampling=config.eval.sampling(sampling),
            seed=config.run.seed,
            long=build_long_prompt(config, domain, log=log),
        ),
        episodes=build_episodes(config, domain, engine, report=report),
        recorders=recorders,
        timeline=timeline,
        show=partial(with_prompt_media, config, domain),
        log=log,
    )


def build_episodes(
    config: RunConfig,
    domain: DomainBase,
    engine: RolloutEngine,
    *,
    report: Callable[[str, str], None] | None = None,
) -> EpisodeGenerator | AgentGenerator | None:
    """The generator of episodes over an engine; None without [environment] and [agent]. Raises UserError."""
    section = config.agent or config.environment
    if section is None:
        return None
    if not isinstance(engine, HoldsSessions):
        name = "environment" if config.agent is None else "agent"
        raise UserError(f"[{name}]: the engine {config.rollout.engine!r} has no sessions for episodes of turns")
    continuation = domain.build_continuation(config.model, data=config.data)
    if isinstance(section, AgentSection):
        given = any(function.name == "environment" for function in config.reward.functions)
        return AgentGenerator(
            engine, continuation, section, needs_reward=given, report=report or (lambda text, detail: None)
        )
    return EpisodeGenerator(engine, continuation, build_environments(section), section)


def build_long_prompt(
    config: RunConfig, domain: DomainBase, *, log: Callable[[str], None]
) -> tuple[Prompt, Any] | None:
    """The prompt on which policy and engine are compared, and its sampling parameters; None if there is none."""
    try:
        return domain.long_prompt(config)
    except SampleError as error:
        log(f"engine and policy are not compared at the start: {error.reason}")
        return None


def build_comparison(
    config: RunConfig,
    domain: DomainBase,
    policy: Policy,
    *,
    share: Share,
    mesh: ReplicaMesh | None,
    log: Callable[[str], None],
    warn: Callable[[str], None],
) -> EngineComparison | None:
    """The comparison of engine and policy at the start, in each rank; None in a domain without a prompt for it."""
    if config.is_sft or (tolerance := domain.engine_tolerance(config)) is None:
        return None
    from cosmos_rl_core.train.comparison import EngineComparison

    return EngineComparison(
        policy,
        collate=build_collate(config, domain, share),
        mesh=mesh,
        tolerance=tolerance,
        sync=config.sync,
        log=log,
        warn=warn,
    )


def with_prompt_media(config: RunConfig, domain: DomainBase, group: RolloutGroup) -> RolloutGroup:
    """Return the group with the pictures and videos of its prompt, for rewards and files."""
    locations, media = domain.prompt_media(config.data, group.prompt.row)
    if not locations:
        return group
    return replace(group, media=locations, rollouts=tuple(replace(each, media=media) for each in group.rollouts))


def build_mesh(config: RunConfig) -> ReplicaMesh | None:
    """The mesh of a policy replica, in each rank after its process group is initialised; None for one rank."""
    from cosmos_rl_core.parallel.device import own_device
    from cosmos_rl_core.parallel.mesh import ReplicaMesh

    dims = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size)
    if dims.world_size == 1:
        return None
    return ReplicaMesh.build(dims, device=own_device())


def build_trainer(config: RunConfig, domain: DomainBase, mesh: ReplicaMesh | None = None) -> Trainer:
    from cosmos_rl_core.algorithms.distill import TaughtObjective
    from cosmos_rl_core.algorithms.objective import build_objective, data_term_objective
    from cosmos_rl_core.train.optimizers.build import build_optimizer, factor
    from cosmos_rl_core.train.trainer import Trainer

    policy = _build_policy(config, domain, mesh)
    optimizer = config.policy.optimizer
    schedule, coef = config.policy.schedule, config.data_regularization.coef
    objective = build_objective(config.algorithm, max_terms=config.rollout.sampling.max_terms)
    return Trainer(
        policy,
        objective=objective if config.teacher is None else TaughtObjective(objective, config.teacher),
        data_term=data_term_objective(coef) if coef else None,
        optimizer=build_optimizer(
            optimizer.name,
            policy.module,
            learning_rate=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            rates=optimizer.rates,
            muon=optimizer.muon,
        ),
        lr_factor=lambda step: factor(
            schedule.name,
            step,
            warmup_steps=schedule.warmup_steps,
            total_steps=config.run.max_steps,
            min_ratio=schedule.min_ratio,
        ),
        max_grad_norm=config.policy.max_grad_norm,
        mesh=mesh,
    )


def build_reference(
    config: RunConfig, domain: DomainBase, trainer: Trainer, mesh: ReplicaMesh | None = None
) -> Reference | None:
    """The reference of the objective, if any: the policy's own, or a frozen copy of the model the run starts from."""
    if not trainer.needs_reference:
        return None
    if (reference := trainer.policy.reference()) is not None:
        return reference
    copy = _build_policy(config, domain, mesh, frozen=True)
    copy.module.requires_grad_(False)
    return copy


def build_answer_sums(
    config: RunConfig, policy: Policy, reference: Reference | None, mesh: ReplicaMesh | None = None
) -> AnswerSumsStage | None:
    """The reference's part of batches of preferences, in each rank; None without a reference or preferences."""
    from cosmos_rl_core.train.answer_sums import AnswerSumsStage

    if reference is None or config.trains_on not in ("pairs", "labels"):
        return None
    return AnswerSumsStage(policy, reference, mesh)


def build_teacher(
    config: RunConfig, domain: DomainBase, trainer: Trainer, mesh: ReplicaMesh | None = None
) -> Teacher | None:
    """The frozen model of [teacher], in each rank; None without the section."""
    if config.teacher is None:
        return None
    setup = _model_setup(config, mesh, frozen=True)
    teacher = domain.build_teacher(config.teacher, config=config, policy=trainer.policy, setup=setup)
    teacher.module.requires_grad_(False)
    return teacher


def _model_setup(
    config: RunConfig, mesh: ReplicaMesh | None, *, frozen: bool, sent_adapters: SentAdapters = "live"
) -> ModelSetup:
    section = config.policy
    return ModelSetup(
        mesh=mesh,
        parallel=section.parallel,
        memory=section.memory,
        precision=section.precision,
        frozen=frozen,
        sent_adapters=sent_adapters,
    )


def _build_policy(config: RunConfig, domain: DomainBase, mesh: ReplicaMesh | None, *, frozen: bool = False) -> Policy:
    sent = "live" if frozen or config.is_sft else domain.sent_adapters(config)
    setup = _model_setup(config, mesh, frozen=frozen, sent_adapters=sent)
    return domain.build_policy(
        config.model, data=config.data, sampling=config.policy_sampling, seed=config.run.seed, setup=setup
    )


def build_collate(
    config: RunConfig, domain: DomainBase, share: Share
) -> Callable[[Sequence[RolloutGroup]], TrainBatch]:
    """Return the function from all groups of a batch to this rank's share of it."""
    return partial(domain.collate, microbatch_terms=config.policy.microbatch_terms, share=share)


def build_validation(
    config: RunConfig,
    domain: DomainBase,
    policy: Policy,
    *,
    share: Share,
    mesh: ReplicaMesh | None = None,
    sums: AnswerSumsStage | None = None,
) -> Validation | None:
    """The loss on held-out rows, in each rank: of [eval.data], or of [eval.loss_data] beside rewards; None without."""
    from cosmos_rl_core.algorithms.objective import build_objective
    from cosmos_rl_core.train.validation import PreferenceValidation, Validation

    data = config.eval.data if config.is_sft else config.eval.loss_data
    if data is None:
        return None
    rows, origin = _loaded(domain, data)
    kind = Validation
    if config.trains_on in ("pairs", "labels", "steps"):
        objective = build_objective(config.algorithm, max_terms=1)
        kind = partial(PreferenceValidation, objective=objective, sums=sums)
    return kind(
        policy,
        source=PromptSource(config.evaluated(rows), origin=origin, shuffle=False, epochs=1),
        rows_at_once=config.policy.prompts_per_step,
        collate=build_collate_sft(config, domain, policy, share, data=data),
        mesh=mesh,
    )


def _loaded(domain: DomainBase, data: Any) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Rows that only the policy reads: no check before the start reports those that are dropped."""
    rows, origin = domain.load_rows(data)
    if isinstance(rows, UsableRows):
        log.warning("%s: %s", origin, rows.note)
    return rows, origin


def build_data_term(config: RunConfig, domain: DomainBase, policy: Policy, share: Share) -> DataTerm | None:
    """The rows of [data_regularization], this rank's share of each step; None if the coefficient is 0."""
    from cosmos_rl_core.data.mixing import DataTerm

    section = config.data_regularization
    if config.is_sft or not section.coef:
        return None
    data = config.data if section.data is None else section.data
    rows, origin = _loaded(domain, data)
    skip = config.num_held_out(rows) if section.data is None else 0
    source = PromptSource(rows, origin=origin, skip=skip, shuffle=section.shuffle, seed=config.run.seed)
    collate = build_collate_sft(config, domain, policy, share, data=data)
    return DataTerm(source, rows_per_step=section.rows_per_step, collate=collate)


def build_collate_sft(
    config: RunConfig, domain: DomainBase, policy: Policy, share: Share, *, data: Any = None
) -> Callable[[Sequence[Prompt]], TrainBatch]:
    """Return the function from supervised rows to this rank's share; `data`: their section, by default [data]."""
    return partial(
        domain.collate_sft,
        data=config.data if data is None else data,
        policy=policy,
        microbatch_terms=config.policy.microbatch_terms,
        share=share,
    )


def build_sync(config: RunConfig) -> WeightSync:
    """The package that transfers the weights."""
    backend: Any = plugins.load("cosmos_rl.weight_sync", config.sync.backend)
    return cast(WeightSync, backend() if inspect.isclass(backend) else backend)
