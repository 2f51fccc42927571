"""The pre-flight checks of this machine: sinks, transport, address, disk, processors and the run's directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path

from cosmos_rl_core import plugins
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.observe.services import REQUIREMENT
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.processes import machine_gpus
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.base import Problem
from cosmos_rl_core.settings.problems import as_toml, is_wrong, missing_package, problems_of
from cosmos_rl_core.weight_sync import BETWEEN_GPUS
from cosmos_rl_core.wire.listening import Address, listen
from cosmos_rl_core.workers.directory import holds_earlier_run, lock_holder, why_unusable

PROCESSES_PER_CORE = 4
"""More workers than this for each processor are reported."""
BYTES = 4
"""Of a weight in a checkpoint, at least: the optimizer's state comes on top."""


def machine_problems(config: RunConfig, domain: DomainBase, *, wrong: Collection[str] = ()) -> Iterator[Problem]:
    """Yield the problems that a run of this recipe would have on this machine.

    With placement "external" other machines run it, which share the disk and, without an image, the environment.
    wrong: keys that are known to be wrong; checks that read them are left out.
    """
    here, cluster = config.run.placement != "external", config.cluster
    has_image = not here and bool(cluster.slurm.container_image or "image_uri" in cluster.ray.extra)
    for find, (key, read) in CHECKS.items():
        if is_wrong(read, wrong) or (not here and find is _address):
            continue
        of_packages = find in (sink_problems, transport_problems)
        for problem in caught(find, config, domain, key=key):
            yield replace(problem, is_note=True) if has_image and of_packages else problem


def caught(
    find: Callable[[RunConfig, DomainBase], Iterable[Problem]], config: RunConfig, domain: DomainBase, *, key: str
) -> list[Problem]:
    """Return what a check finds; an error that it raises is a problem, of `key` if it names none."""
    problems: list[Problem] = []
    try:
        problems.extend(find(config, domain))
    except UserError as error:
        problems += problems_of(error, key=key)
    return problems


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


def sink_problems(config: RunConfig, _domain: DomainBase | None = None) -> Iterator[Problem]:
    """Yield a problem for each of [logging] sinks whose package is missing here."""
    for place, name in enumerate(config.logging.sinks):
        if name in REQUIREMENT:
            install = pip_install(REQUIREMENT[name])
            yield from missing_package(name, key=f"logging.sinks.{place}", given=as_toml(name), install=install)


def transport_problems(config: RunConfig, _domain: DomainBase | None = None) -> Iterator[Problem]:
    """Yield a problem for a [sync] transport that is not known or not usable here."""
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
        yield from missing_package("nixl", key=key, given=as_toml(name), install=install)
    if name in BETWEEN_GPUS and config.run.placement != "external" and not machine_gpus(os.environ):
        yield Problem(
            key=key,
            given=as_toml(name),
            wrong="sends from GPU to GPU, and this machine has none",
            suggestion='set it to "auto"',
        )


def _address(config: RunConfig, _domain: DomainBase) -> Iterator[Problem]:
    """[run] bind and port, by listening there for a moment."""
    run = config.run
    if run.placement == "inline":
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
    place = _existing(Path(config.checkpoint.path or config.run.directory).resolve())
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


def _existing(path: Path) -> Path:
    """The nearest folder that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _processors(config: RunConfig, _domain: DomainBase) -> Iterator[Problem]:
    if config.run.placement != "local" or machine_gpus(os.environ):
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


CHECKS: Mapping[Callable[[RunConfig, DomainBase], Iterator[Problem]], tuple[str, frozenset[str]]] = {
    sink_problems: ("logging.sinks", frozenset({"logging.sinks"})),
    transport_problems: (
        "sync.transport",
        frozenset({"algorithm.name", "run.placement", "sync.backend", "sync.transport"}),
    ),
    _address: ("run.bind", frozenset({"run.bind", "run.placement", "run.port"})),
    _disk: ("run.output_dir", frozenset({"checkpoint", "model", "run.output_dir"})),
    _processors: (
        "policy.parallel",
        frozenset({"algorithm.name", "policy", "rollout.replicas", "run.placement"}),
    ),
}
"""The checks, in order, with the key of their errors and the keys that each reads."""
