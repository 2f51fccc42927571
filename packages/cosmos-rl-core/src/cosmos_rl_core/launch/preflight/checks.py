"""Checks by keys of the recipe: each reads a few keys, and is left out where one of them is known to be wrong.

PARTS      model, engine, weight sync and teacher exist, and fit each other
MACHINE    sinks, transport, GPUs, address, disk and processors of this machine
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import NamedTuple

from cosmos_rl_core import plugins
from cosmos_rl_core.assemble import build_reward, engine_options, load_engine, look_up_engine, sleeping_options
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.episodes.build import check_section
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import machine_gpus
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.launch.preflight.gpus import gpu_problems
from cosmos_rl_core.observe.services import REQUIREMENT
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.shape import misfits
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.base import ConfigError, Problem
from cosmos_rl_core.settings.problems import as_toml, each_once, is_wrong, missing_package, problems_of
from cosmos_rl_core.weight_sync import BETWEEN_GPUS, NIXL_BUILDS
from cosmos_rl_core.wire.listening import Address, listen
from cosmos_rl_core.workers.directory import holds_earlier_run, lock_holder, why_unusable

PROCESSES_PER_CORE = 4
"""More workers than this for each processor are reported."""
BYTES = 4
"""Of a weight in a checkpoint, at least: the optimizer's state comes on top."""


class KeyCheck(NamedTuple):
    """A check of a few keys."""

    find: Callable[[RunConfig, DomainBase], Iterable[Problem] | None]
    """Returns problems, or raises one as UserError."""
    key: str
    """The key of an error that names none."""
    reads: tuple[str, ...]
    """Keys and sections that it reads."""


def problems_among(
    checks: Sequence[KeyCheck], config: RunConfig, domain: DomainBase, *, wrong: Collection[str] = ()
) -> list[Problem]:
    """Return the problems of the checks that read none of the `wrong` keys, in their order, each of them once."""
    problems: list[Problem] = []
    for check in checks:
        if is_wrong(check.reads, wrong):
            continue
        try:
            problems += check.find(config, domain) or ()
        except UserError as error:
            problems += problems_of(error, key=check.key)
    return each_once(problems)


def look_up(config: RunConfig) -> None:
    """Raise UserError for a model, engine, reward or weight sync that does not exist, before anything is started.

    Names written as "module:attribute" are imported by the workers alone.
    """
    domain = load_domain(config.run.domain)
    look_up_parts(config, domain)
    for section in () if config.is_sft else config.reward.functions:
        if domain.reward(section.name) is not None:
            build_reward(section.name, domain, options=section.options)
        else:
            plugins.locate("cosmos_rl.rewards", section.name, beside=domain.rewards)


def look_up_parts(config: RunConfig, domain: DomainBase) -> None:
    """As `look_up` without the rewards; also raises for a model that [policy.parallel] cannot shard."""
    if problems := problems_among(PARTS, config, domain):
        raise ConfigError(problems)


def directory_problems(config: RunConfig, *, resume: bool, overwrite: bool | None) -> Iterator[Problem]:
    """Yield the problems that a run would have with its directory. overwrite: None if no run is started now."""
    path, key, written = config.run.directory, "run.output_dir", as_toml(config.run.output_dir)
    if text := why_unusable(path):
        yield Problem(key=key, given=written, wrong=text, suggestion="choose another folder")
    elif (holder := lock_holder(path)) is not None and holder.is_alive:
        wrong, remedy = f"{path} is in use by a live run ({holder})", "wait for it, stop it, or choose another folder"
        yield Problem(key=key, given=written, wrong=wrong, suggestion=remedy, is_note=overwrite is None)
    elif not resume and not overwrite and holds_earlier_run(path, continues=config.run.placement == "external"):
        wrong = f"{path} contains an earlier run"
        remedy = "continue it with --resume auto, replace it with --overwrite, or choose another folder"
        yield Problem(key=key, given=written, wrong=wrong, suggestion=remedy, is_note=overwrite is None)


def _find_weights(config: RunConfig, domain: DomainBase) -> None:
    if config.model is not None:
        domain.weight_specs(config.model)


def _find_shards(config: RunConfig, domain: DomainBase) -> Iterator[Problem]:
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


def _find_teacher(config: RunConfig, domain: DomainBase) -> None:
    if config.teacher is not None:
        domain.check_teacher(config)


def _find_prefix_mask(config: RunConfig, domain: DomainBase) -> Iterator[Problem]:
    if not config.is_sft and config.algorithm.mask_prefix_terms and not domain.has_tokens:
        wrong = f"rollouts of the {domain.name} domain have no tokens; remove it"
        yield Problem(key="algorithm.mask_prefix_terms", given=str(config.algorithm.mask_prefix_terms), wrong=wrong)


def _find_rows(config: RunConfig, domain: DomainBase) -> Iterator[Problem]:
    if config.trains_on and config.trains_on not in domain.trains_on:
        wrong = f"trains on {config.trains_on} of answers, which the {domain.name} domain does not have"
        yield Problem(key="algorithm.name", given=as_toml(config.algorithm.name), wrong=wrong)


def _find_sync(config: RunConfig, _domain: DomainBase) -> None:
    if not config.is_sft:
        plugins.locate("cosmos_rl.weight_sync", config.sync.backend)


def _find_engine(config: RunConfig, domain: DomainBase) -> None:
    if not config.is_sft:
        look_up_engine(config.rollout.engine, domain)


def _find_engine_options(config: RunConfig, domain: DomainBase) -> None:
    if not config.is_sft:
        engine_options(config, domain)


def _build_environment(config: RunConfig, domain: DomainBase) -> None:
    if config.environment is not None:
        check_section(config.environment)


def _import_engine(config: RunConfig, domain: DomainBase) -> Iterator[Problem]:
    """Import an engine of one's own; names that nobody offers are problems of `_find_engine`."""
    if config.is_sft or config.rollout.engine in domain.engines or ":" not in config.rollout.engine:
        return
    try:
        load_engine(config.rollout.engine)
    except UserError as error:
        yield Problem(key="rollout.engine", given=as_toml(config.rollout.engine), wrong=str(error))


def _find_colocation(config: RunConfig, domain: DomainBase) -> None:
    if not config.is_sft and config.run.colocate and config.rollout.engine in domain.engines:
        sleeping_options(config, domain)


def sink_problems(config: RunConfig, _domain: DomainBase | None = None) -> Iterator[Problem]:
    """Yield a problem for each of [logging] sinks whose package is missing here."""
    for place, name in enumerate(config.logging.sinks):
        if name in REQUIREMENT:
            install = pip_install(REQUIREMENT[name])
            missing = missing_package(name, key=f"logging.sinks.{place}", given=as_toml(name), install=install)
            yield from (replace(problem, is_note=_has_image(config)) for problem in missing)


def _has_image(config: RunConfig) -> bool:
    """Whether the run's packages are those of an image, not of this machine."""
    return config.run.placement == "external" and config.cluster.has_image


def transport_problems(config: RunConfig, _domain: DomainBase | None = None) -> Iterator[Problem]:
    """Yield a problem for a [sync] transport that is not known or not usable here."""
    for problem in _transport_problems(config):
        yield replace(problem, is_note=_has_image(config))


def _transport_problems(config: RunConfig) -> Iterator[Problem]:
    key, name = "sync.transport", config.sync.transport
    if config.is_sft or config.sync.backend != "transfer" or name == "auto":
        return
    try:
        plugins.locate("cosmos_rl.transports", name, beside=("auto",))
    except UserError as error:
        yield Problem(key=key, given=as_toml(name), wrong=str(error))
        return
    if name.startswith("nixl"):
        install = pip_install("cosmos-rl-transfer[nixl]")
        build = next(filter(find_spec, NIXL_BUILDS), NIXL_BUILDS[0])
        yield from missing_package(build, key=key, given=as_toml(name), install=install)
    if name in BETWEEN_GPUS and config.run.placement != "external" and not machine_gpus(os.environ, config.run.device):
        yield Problem(
            key=key,
            given=as_toml(name),
            wrong="sends from GPU to GPU, and this machine has none",
            suggestion='set it to "auto"',
        )


def _address(config: RunConfig, _domain: DomainBase) -> Iterator[Problem]:
    """[run] bind and port, by listening there for a moment."""
    run = config.run
    if run.placement in ("inline", "external"):
        return
    try:
        with closing(listen(Address(host=run.bind, port=run.port), allow_remote=True)):
            pass
    except UserError as error:
        in_use = "is in use" in str(error)
        yield Problem(
            key="run.port" if in_use else "run.bind",
            given=as_toml(run.port if in_use else run.bind),
            wrong=str(error),
            suggestion="" if in_use else 'set it to an address of this machine: "127.0.0.1", or "0.0.0.0" for all',
        )


def _disk(config: RunConfig, domain: DomainBase) -> Iterator[Problem]:
    """Room for checkpoints, counted from the weights alone."""
    if config.checkpoint.path and "://" in config.checkpoint.path:
        return
    path = Path(config.checkpoint.path or config.run.directory).resolve()
    place = next(folder for folder in (path, *path.parents) if folder.is_dir())
    try:
        specs = domain.weight_specs(config.model)
    except UserError:
        return  # a problem of the model, which is reported as such
    if specs is None:
        return
    usage = shutil.disk_usage(place)
    if not usage.total:
        return  # not a disk, such as /proc
    free, least = usage.free, BYTES * sum(prod(spec.shape) for spec in specs)
    kept = config.checkpoint.keep + config.checkpoint.keep_best + 1
    if free < least:
        yield Problem(
            key="run.output_dir" if config.checkpoint.path is None else "checkpoint.path",
            wrong=f"{place} has {_gb(free)} free, and the weights of one checkpoint have {_gb(least)}",
            suggestion="free space there, or choose another folder",
        )
    elif free < kept * least:
        yield Problem(
            key="checkpoint.keep",
            given=str(config.checkpoint.keep),
            wrong=f"{place} has {_gb(free)} free, and {kept} checkpoints have {_gb(kept * least)} of weights alone",
            is_note=True,
        )


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _processors(config: RunConfig, _domain: DomainBase) -> Iterator[Problem]:
    if config.run.placement != "local" or machine_gpus(os.environ, config.run.device):
        return
    ranks = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size).world_size
    workers = config.policy.replicas * ranks + (0 if config.is_sft else config.rollout.replicas)
    cores = len(os.sched_getaffinity(0)) if Path("/proc").exists() else os.cpu_count() or 1
    if workers > PROCESSES_PER_CORE * cores:
        yield Problem(
            key="policy.parallel",
            wrong=f"{workers} worker processes share {cores} processors of this machine, which has no GPU",
            is_note=True,
        )


_ENGINE = ("rollout.engine", "rollout.options", "rollout.parallel")
PARTS = (
    KeyCheck(_find_weights, "model.path", ("model.path",)),
    KeyCheck(_find_shards, "policy.parallel", ("algorithm.name", "data", "model", "policy", "rollout.sampling")),
    KeyCheck(_find_teacher, "teacher.path", ("algorithm", "data", "model", "policy", "teacher")),
    KeyCheck(_find_prefix_mask, "algorithm.mask_prefix_terms", ("algorithm",)),
    KeyCheck(_find_rows, "algorithm.name", ("algorithm",)),
    KeyCheck(_find_sync, "sync.backend", ("algorithm.name", "sync.backend")),
    KeyCheck(_find_engine, "rollout.engine", ("algorithm.name", "rollout.engine")),
    KeyCheck(_find_engine_options, "rollout.parallel", ("algorithm.name", *_ENGINE)),
    KeyCheck(_find_colocation, "run.colocate", ("algorithm.name", "run.colocate", *_ENGINE)),
)
"""The parts that a recipe names, in the order in which they are looked up."""
CODE = (
    KeyCheck(_build_environment, "environment.name", ("environment",)),
    KeyCheck(_import_engine, "rollout.engine", ("algorithm.name", "rollout.engine")),
    KeyCheck(lambda config, domain: domain.check_model(config.model), "model.path", ("model",)),
)
"""Imports and reads of a check beside them; a run leaves these to its workers."""
MACHINE = (
    KeyCheck(sink_problems, "logging.sinks", ("logging.sinks",)),
    KeyCheck(
        transport_problems, "sync.transport", ("algorithm.name", "run.placement", "sync.backend", "sync.transport")
    ),
    KeyCheck(gpu_problems, "run.device", ("algorithm.name", "policy", "run", *_ENGINE, "rollout.replicas")),
    KeyCheck(_address, "run.bind", ("run.bind", "run.placement", "run.port")),
    KeyCheck(_disk, "run.output_dir", ("checkpoint", "model", "run.output_dir")),
    KeyCheck(_processors, "policy.parallel", ("algorithm.name", "policy", "rollout.replicas", "run.placement")),
)
"""Needs of a run on this machine. With placement "external" other machines run it, which share the disk and, without
an image, the environment."""
