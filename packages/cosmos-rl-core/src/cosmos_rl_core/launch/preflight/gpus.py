"""Checks of this machine's GPUs before workers start: torch can use them, they are free, and a worker's are alike."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import ON_CPU, VISIBLE_GPUS, Gpu, Nvml, machine_gpus, short_names
from cosmos_rl_core.launch.gpus import AssignedGpus, assign_gpus
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.base import Problem
from cosmos_rl_core.settings.problems import as_toml
from cosmos_rl_core.workers.directory import holds_earlier_run

KEY = "run.device"
LEAST_FREE = 0.5
"""Share of a GPU's memory that must be free before a run that does not share its GPUs."""


def gpu_problems(
    config: RunConfig, _domain: DomainBase | None = None, *, nvml: Nvml | None = None
) -> Iterator[Problem]:
    """Yield why the run's workers cannot use this machine's GPUs. Raises UserError as `machine_gpus`."""
    if config.run.placement == "external":  # other machines run it
        return
    nvml = Nvml.open() if nvml is None else nvml
    gpus = machine_gpus(os.environ, config.run.device, nvml=nvml)
    if not gpus:
        yield from _unused(config, nvml.devices())
        return
    from cosmos_rl_core.parallel.device import torch_problem  # torch is loaded on a machine with GPUs alone

    if problem := torch_problem(gpus, nvml):
        observed, advice = problem
        wrong = f"torch cannot use the GPUs of this machine ({short_names(gpus)}): {observed}"
        yield Problem(key=KEY, given=as_toml(config.run.device), wrong=wrong, suggestion=f"{advice}, or {ON_CPU}")
        return
    ranks = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size).world_size
    try:
        assigned = assign_gpus(config, ranks // config.policy.num_nodes, gpus=gpus)
    except UserError:
        return  # too few: the start of a run says so, and a check warns, as the recipe may be for another machine
    yield from _unlike(assigned, nvml)
    if not config.run.share_gpus:
        yield from _full(config, assigned, gpus, nvml)


def _unused(config: RunConfig, devices: Sequence[Gpu]) -> Iterator[Problem]:
    if devices:
        cause = '[run] device = "cpu"' if config.run.device == "cpu" else f"{VISIBLE_GPUS} names none of them"
        names = short_names(device.uuid for device in devices)
        yield Problem(key=KEY, wrong=f"the run uses the CPU: {cause} ({names})", is_note=True)


def _unlike(assigned: AssignedGpus, nvml: Nvml) -> Iterator[Problem]:
    """GPUs of different kinds in one worker: the slowest and the smallest would decide about all."""
    for worker, gpus in assigned.workers.items():
        kinds = Counter(device.name for gpu in gpus if (device := nvml.device(gpu)))
        if len(kinds) > 1:
            listed = ", ".join(f"{number} x {name}" for name, number in kinds.items())
            number = Counter(device.name for device in nvml.devices())
            alike = sorted(nvml.devices(), key=lambda device: (-number[device.name], device.name))
            yield Problem(
                key=KEY,
                wrong=f"{worker} would have GPUs of different kinds: {listed}",
                suggestion=f"set {VISIBLE_GPUS}={','.join(device.uuid for device in alike)}, or GPUs of one kind alone",
            )
            return


def _full(config: RunConfig, assigned: AssignedGpus, gpus: Sequence[str], nvml: Nvml) -> Iterator[Problem]:
    """GPUs whose memory other processes fill. Of a run that continues they may be its own, which are ending."""
    devices = {gpu: device for gpu in gpus if (device := nvml.device(gpu))}
    full = {gpu: each for gpu, each in devices.items() if each.free < LEAST_FREE * each.memory_total}
    used = {gpu for own in assigned.workers.values() for gpu in own}
    if not (first := next((gpu for gpu in full if gpu in used), None)):
        return
    each, gib = full[first], 2**30
    others = ",".join(gpu for gpu in gpus if gpu not in full) or "GPUs of another machine"
    yield Problem(
        key=KEY,
        wrong=(
            f"{short_names([first])} ({each.name}) has {each.free / gib:.1f} of "
            f"{each.memory_total / gib:.1f} GiB free: other processes fill it"
        ),
        suggestion=f"end them (nvidia-smi lists them), set {VISIBLE_GPUS}={others}, or [run] share_gpus = true",
        is_note=holds_earlier_run(config.run.directory, continues=False),
    )
