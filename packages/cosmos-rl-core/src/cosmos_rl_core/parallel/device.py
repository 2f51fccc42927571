"""A process's device, transfers to it, and torch's global RNG by one thread at a time.

Placed inline, policy and engine are built in threads of one process, and initialise their weights from that RNG.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import ON_CPU, VISIBLE_GPUS, Nvml, machine_gpus, short_names
from cosmos_rl_core.hardware_log import log_choice


def own_device() -> torch.device:
    """Return this process's GPU, by its rank on the machine (LOCAL_RANK); the CPU where there is none."""
    if os.environ.get(VISIBLE_GPUS) == "" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def chosen_device(device: str) -> Iterator[None]:
    """Hide the GPUs from this process inside, if [run] device is "cpu". Raises UserError as `require_gpus`."""
    before = os.environ.get(VISIBLE_GPUS)
    if device == "cpu":
        os.environ[VISIBLE_GPUS] = ""
    try:
        require_gpus(os.environ)
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE_GPUS] = before
        elif device == "cpu":
            del os.environ[VISIBLE_GPUS]


def require_gpus(environment: Mapping[str, str], *, nvml: Nvml | None = None) -> None:
    """Raise UserError if this process has GPUs that torch cannot use: it would work on the CPU without a word."""
    nvml = Nvml.open() if nvml is None else nvml
    if (gpus := machine_gpus(environment, nvml=nvml)) and (problem := torch_problem(gpus, nvml)):
        observed, advice = problem
        raise UserError(
            f"torch cannot use the GPUs of this process ({short_names(gpus)}): {observed}; {advice}, or {ON_CPU}"
        )


def torch_problem(gpus: Sequence[str], nvml: Nvml) -> tuple[str, str] | None:
    """Return why torch cannot use these GPUs, and what mends it; None if it can.

    gpus: as `machine_gpus` returns them, at least one.
    """
    build, name = torch.version.cuda, f"torch {torch.__version__}"
    if build is None:
        plain = torch.__version__.split("+")[0]
        return f"{name} is built for the CPU", f"`pip install --force-reinstall torch=={plain}` has CUDA, without +cpu"
    if torch.cuda.is_available():
        return None
    if nvml.driver and nvml.cuda[0] < int(build.split(".")[0]):  # a driver runs all minor versions of its CUDA
        own = ".".join(map(str, nvml.cuda))
        return (
            f"{name} is built for CUDA {build}, and the driver {nvml.driver} runs CUDA {own} at most",
            f"install a driver for CUDA {build} (nvidia-smi shows its CUDA version), or torch for CUDA {own}: "
            "https://pytorch.org/get-started/previous-versions",
        )
    if missing := [gpu for gpu in gpus if nvml.driver and nvml.device(gpu) is None]:
        present = short_names(device.uuid for device in nvml.devices()) or "no GPU"
        return (
            f"{VISIBLE_GPUS} names {', '.join(missing)}, and this machine has {present}",
            f"`unset {VISIBLE_GPUS}`, or list GPUs of this machine",
        )
    return f"{name} for CUDA {build} says: {_cuda_error()}", "`nvidia-smi` must list them in this container or machine"


def _cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
        return str(error).split("\n")[0]
    return "no GPU is available"


def use_device(device: torch.device | None = None) -> torch.device:
    """Make a GPU (default: `own_device`) the current one of this thread; each thread starts with GPU 0."""
    device = own_device() if device is None else device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def gpu_identity() -> str:
    """Return the UUID of this process's GPU; empty on a CPU, and in a process that leaves the GPU to its children."""
    if not torch.cuda.is_initialized():
        return ""
    return str(torch.cuda.get_device_properties(own_device()).uuid)


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of a GPU; None for the CPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def use_deterministic_kernels() -> None:
    """Compute with deterministic kernels alone from now on; torch raises RuntimeError for an operation without one.

    cuBLAS reads its variable at the process's first product on a GPU. Empty tensors stay as they are: torch would fill
    them, for code that reads them before it writes them.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False  # measures, and may choose another kernel each time
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]  no stub
    torch.use_deterministic_algorithms(True)


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices on a GPU without rounding them to TF32 inside, whatever [run] tf32 says."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [setting.allow_tf32 for setting in settings]
    for setting in settings:
        setting.allow_tf32 = False
    try:
        yield
    finally:
        for setting, value in zip(settings, before):
            setting.allow_tf32 = value


T = TypeVar("T")
_ALIGNED = 16
"""Bytes to a multiple of which each tensor of a transfer starts: any dtype can be viewed there."""


def to_device(value: T, device: torch.device) -> T:
    """Return `value` with all tensors on `device`: those in mappings, sequences and dataclasses too, shared ones once.

    To a GPU, all pageable tensors are one copy from pinned memory, which the host does not wait for.
    """
    tensors: dict[int, Tensor] = {}
    _collect(value, tensors)
    elsewhere = {key: tensor for key, tensor in tensors.items() if tensor.device != device}
    if not elsewhere:
        return value
    if device.type == "cuda":
        # those of `to_host` are not read here: their copies may still be under way on the stream
        host = {key: each for key, each in elsewhere.items() if each.device.type == "cpu" and not each.is_pinned()}
        others = {key: each.to(device, non_blocking=True) for key, each in elsewhere.items() if key not in host}
        moved = (_upload(host, device) if host else {}) | others
    else:
        moved = {key: tensor.to(device) for key, tensor in elsewhere.items()}
    return _replaced(value, moved)


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in host memory; copies of a GPU's are pinned, and the host does not wait for them.

    Until the current stream has done its work, only that stream may read these, by `to_device`.
    """
    return {name: tensor if tensor.device.type == "cpu" else _download(tensor) for name, tensor in tensors.items()}


def _download(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # of torch's cache: no lock a microbatch
    return host.copy_(tensor.detach(), non_blocking=True)


def _upload(tensors: Mapping[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    # One block of pinned memory, one copy: many small copies would each wait for a launch. Starts are aligned, so that
    # each part can be viewed in its own dtype again.
    ends, total = {}, 0
    for key, tensor in tensors.items():
        start = -(-total // _ALIGNED) * _ALIGNED
        total = start + tensor.numel() * tensor.itemsize
        ends[key] = slice(start, total)
    host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    for key, tensor in tensors.items():
        host[ends[key]] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    packed = host.to(device, non_blocking=True)
    return {key: packed[ends[key]].view(tensor.dtype).view(tensor.shape) for key, tensor in tensors.items()}


def _collect(value: Any, tensors: dict[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors[id(value)] = value
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            _collect(getattr(value, each.name), tensors)
    elif isinstance(value, Mapping):
        for each in value.values():
            _collect(each, tensors)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, tensors)


def _replaced(value: Any, moved: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return moved.get(id(value), value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _replaced(getattr(value, each.name), moved) for each in fields(value)})
    if isinstance(value, Mapping):
        return {key: _replaced(each, moved) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(each, moved) for each in value)
    return value


def pinned(size: int, device: torch.device) -> Tensor:
    """Return uint8 [size] in page-locked host memory, which is unlocked when it is freed.

    torch's own allocator rounds up to powers of two, 20.4 GiB to 32. Where the system refuses (a limit on locked
    memory), it is pageable, with a line in the log.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)  # whole pages: no other range shares them
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(memory.ctypes.data, size, 0))
    if error:
        log_choice(f"host memory cannot be pinned (CUDA error {error}), copies are slower; raise `ulimit -l`")
    else:  # before the pages are unmapped: the array is freed first
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data)
    return torch.from_numpy(memory)


_TURN = threading.Lock()


@contextmanager
def forked_rng(*, seed: int = 0) -> Iterator[None]:
    """Seed torch's global RNG with `seed` inside, for one thread at a time; restore its state afterwards."""
    with _TURN, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
