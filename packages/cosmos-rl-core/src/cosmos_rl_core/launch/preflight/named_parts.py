"""The parts that a recipe names: model, engine, rewards, weight sync and teacher exist, and fit each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from cosmos_rl_core import plugins
from cosmos_rl_core.assemble import build_reward, engine_options, look_up_engine, sleeping_options
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.preflight.machine import caught
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.shape import misfits
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.base import ConfigError, Problem
from cosmos_rl_core.settings.problems import each_once, is_wrong, problems_of


def look_up(config: RunConfig) -> None:
    """Raise UserError for a model, engine, reward or weight sync that does not exist, before anything is started.

    Names written as "module:attribute" are imported by the workers alone.
    """
    domain = load_domain(config.run.domain)
    look_up_parts(config, domain)
    if config.is_sft:
        return
    for section in config.reward.functions:
        if domain.reward(section.name) is not None:
            build_reward(section.name, domain, options=section.options)
        else:
            plugins.locate("cosmos_rl.rewards", section.name, beside=domain.rewards)


def look_up_parts(config: RunConfig, domain: DomainBase) -> None:
    """As `look_up` without the rewards; also raises for a model that [policy.parallel] cannot shard."""
    if problems := list(part_problems(config, domain)):
        raise ConfigError(problems)


def part_problems(config: RunConfig, domain: DomainBase, *, wrong: Collection[str] = ()) -> Iterator[Problem]:
    """Yield the problems of model, engine, weight sync and teacher, each of them once.

    wrong: keys that are known to be wrong; parts that read them are left out.
    """
    problems: list[Problem] = []
    for find, key, read in PARTS:
        if not is_wrong(read, wrong):
            problems += caught(find, config, domain, key=key)
    yield from each_once(problems)


def _find_weights(config: RunConfig, domain: DomainBase) -> Iterable[Problem]:
    if config.model is not None:
        domain.weight_specs(config.model)
    return ()


def _find_shards(config: RunConfig, domain: DomainBase) -> Iterable[Problem]:
    dims = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size)
    if config.policy.memory.parameter_offload and dims.world_size == 1:
        yield Problem(
            key="policy.memory.parameter_offload",
            given="true",
            wrong="needs a replica of several ranks, whose shards it moves",
            suggestion="set [policy.parallel] dp_shard to 2 or more, or parameter_offload = false",
        )
    shape = domain.model_shape(config.model, data=config.data, sampling=config.policy_sampling)
    if shape is not None:
        for text in misfits(shape, config.policy.parallel, dims):
            yield from problems_of(UserError(text), key="policy.parallel")


def _find_teacher(config: RunConfig, domain: DomainBase) -> Iterable[Problem]:
    if config.teacher is not None:
        domain.check_teacher(config)
    return ()


def _find_prefix_mask(config: RunConfig, domain: DomainBase) -> Iterable[Problem]:
    if not config.is_sft and config.algorithm.mask_prefix_terms and not domain.has_tokens:
        wrong = f"rollouts of the {domain.name} domain have no tokens; remove it"
        yield Problem(key="algorithm.mask_prefix_terms", given=str(config.algorithm.mask_prefix_terms), wrong=wrong)


def _find_sync(config: RunConfig, _domain: DomainBase) -> Iterable[Problem]:
    if not config.is_sft:
        plugins.locate("cosmos_rl.weight_sync", config.sync.backend)
    return ()


def _find_engine(config: RunConfig, domain: DomainBase) -> Iterable[Problem]:
    if not config.is_sft:
        look_up_engine(config.rollout.engine, domain)
    return ()


def _find_engine_options(config: RunConfig, domain: DomainBase) -> Iterable[Problem]:
    if not config.is_sft:
        engine_options(config, domain)
    return ()


def _find_turns(config: RunConfig, domain: DomainBase) -> Iterable[Problem]:
    if not config.is_sft and config.run.colocate and config.rollout.engine in domain.engines:
        sleeping_options(config, domain)
    return ()


Part = tuple[Callable[[RunConfig, DomainBase], Iterable[Problem]], str, frozenset[str]]
PARTS: tuple[Part, ...] = (
    (_find_weights, "model.path", frozenset({"model.path"})),
    (_find_shards, "policy.parallel", frozenset({"algorithm.name", "data", "model", "policy", "rollout.sampling"})),
    (_find_teacher, "teacher.path", frozenset({"algorithm", "data", "model", "policy", "teacher"})),
    (_find_prefix_mask, "algorithm.mask_prefix_terms", frozenset({"algorithm"})),
    (_find_sync, "sync.backend", frozenset({"algorithm.name", "sync.backend"})),
    (_find_engine, "rollout.engine", frozenset({"algorithm.name", "rollout.engine"})),
    (
        _find_engine_options,
        "rollout.parallel",
        frozenset({"algorithm.name", "rollout.engine", "rollout.options", "rollout.parallel"}),
    ),
    (
        _find_turns,
        "run.colocate",
        frozenset({"algorithm.name", "rollout.engine", "rollout.options", "rollout.parallel", "run.colocate"}),
    ),
)
"""The parts that are looked up, in order: the function, the key of its errors, and the keys that it reads."""
