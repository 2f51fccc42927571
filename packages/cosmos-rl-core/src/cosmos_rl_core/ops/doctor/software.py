"""Checks of Python, packages, torch and GPUs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from cosmos_rl_core.gpus import Nvml, machine_gpus, short_names
from cosmos_rl_core.imports import PACKAGES, installed_versions, pip_install
from cosmos_rl_core.interfaces import Check
from cosmos_rl_core.launch.versions import too_old

GIB = 2**30
NO_CUDA = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"


def python() -> Iterator[Check]:
    yield Check("ok", "python", f"{platform.python_version()}, {sys.executable}")


def packages(version: Callable[[str], str] = metadata.version) -> Iterator[Check]:
    """Yield whether the packages of Cosmos-RL have one version, and libraries that are too old."""
    installed = installed_versions(PACKAGES, version)
    versions = {name.removeprefix("cosmos-rl-"): number for name, number in installed.items()}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{name} {number}" for name, number in versions.items())
        newest = max(versions.values())
        fix = pip_install(*(f"cosmos-rl-{name}=={newest}" for name in versions))
        yield Check("bad", "cosmos-rl", f"packages of different versions: {listed}", fix)
    elif versions:
        yield Check("ok", "cosmos-rl", f"{next(iter(versions.values()))}: {', '.join(versions)}")
    else:
        yield Check("note", "cosmos-rl", "imported from source, not installed")
    for text in too_old():
        observed, _, fix = text.rpartition(": ")
        yield Check("bad", "libraries", observed, fix)


def torch_and_gpus() -> Iterator[Check]:
    """Yield torch's build against the driver, and each GPU with its memory."""
    import torch
    from torch.cuda import nccl

    from cosmos_rl_core.parallel.device import torch_problem

    nvml, build = Nvml.open(), torch.version.cuda
    gpus = machine_gpus(os.environ, nvml=nvml)
    if not gpus:
        yield Check("ok", "torch", f"{torch.__version__}, for {f'CUDA {build}' if build else 'the CPU'}")
        yield Check("note", "GPUs", "none: models train on the CPU")
        return
    if problem := torch_problem(gpus, nvml):
        observed, fix = problem
        yield Check("bad", "torch", f"{observed}; GPUs here: {short_names(gpus)}", fix)
        return
    yield Check("ok", "torch", f"{torch.__version__} for CUDA {build}, driver {nvml.driver}")
    for index in range(torch.cuda.device_count()):
        yield gpu(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index), index=index)
    if torch.distributed.is_nccl_available():
        yield Check("ok", "NCCL", ".".join(map(str, nccl.version())))
    else:
        yield Check("bad", "NCCL", "this build of torch has no NCCL: policies of several GPUs cannot train", NO_CUDA)


def gpu(name: str, free: int, total: int, *, index: int) -> Check:
    """Return the line of a GPU. free, total: bytes."""
    text = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < 0.9 * total:
        fix = "nvidia-smi lists the processes on it; CUDA_VISIBLE_DEVICES chooses other GPUs"
        return Check("note", f"GPU {index}", f"{text}: another process uses it", fix)
    return Check("ok", f"GPU {index}", text)
