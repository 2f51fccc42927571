"""A pretend CUDA device: tensors that report cuda:0, hold real CPU values and are as strict as CUDA about devices.

    with pretend_cuda() as record:
        ...                                     # whole runs work: values are real, .tolist() and numpy included
    assert not record.mismatches
    assert record.synchronisations.total() <= 1

Everything inside, in threads started inside too, sees one GPU: `torch.cuda.is_available()` is true, streams, events
and the current device are recorded per thread. Each event is counted by the line of our code that causes it:

    mismatches        operations that mix cuda:0 with CPU tensors; they raise on CUDA
    waits             waits for one event or side stream
    synchronisations  torch.cuda.synchronize, copies to the host, data-dependent shapes, .item(), products of groups
                      without a kernel: the host waits for the GPU
    uploads           copies from pageable or strided host memory: the host waits for the copy
    stray             copies to the host in a thread that never called `torch.cuda.set_device`: with several GPUs it
                      would wait for another one's work
    varlen            calls of `varlen_attn`, which has no kernel on CPUs
    math_attention    scaled_dot_product_attention that no fused kernel takes: scores of [L, L] in memory

It does not emulate time, memory, or races between streams. Operations run on the CPU in the order of their calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode

from doubles.pretend_attention import check_fused, varlen_attention
from doubles.pretend_record import HERE, Record
from doubles.pretend_tensor import CUDA, PINNED, REGISTERED, Dispatch, PretendTensor, is_pinned, pin

_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
"""Functions that copy Python or numpy data."""
_FLOAT32 = frozenset(
    [
        "exp",
        "log",
        "log1p",
        "rsqrt",
        "reciprocal",
        "pow",
        "__pow__",
        "softplus",
        "softmax",
        "log_softmax",
        "logsumexp",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "norm",
        "sum",
        "prod",
        "cumsum",
        "mse_loss",
    ]
)
"""Functions that CUDA's autocast computes in float32 and that of the CPU does not (`ATen/autocast_mode.h`), as used."""


def _with_index(value: Any) -> Any:
    """ "cuda" -> cuda:0: without an index, a build without CUDA asks CUDA for the current device."""
    if (isinstance(value, str) and value == "cuda") or (isinstance(value, torch.device) and value.type == "cuda"):
        return CUDA
    return value


class _Calls(TorchFunctionMode):
    """Names the device of calls, and counts scaled_dot_product_attention for which CUDA has no fused kernel."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: _with_index(value) for name, value in (kwargs or {}).items()}
        if func is torch.nn.functional.scaled_dot_product_attention:
            check_fused(self.record, *args, **kwargs)
        if func is Tensor.cuda:
            return args[0].to(CUDA)
        if getattr(func, "__name__", "") in _FLOAT32 and torch.is_autocast_enabled("cuda"):
            half = (torch.bfloat16, torch.float16)
            args = tuple(arg.float() if isinstance(arg, PretendTensor) and arg.dtype in half else arg for arg in args)
        if func in _FROM_DATA and kwargs.get("device") == CUDA:  # they would allocate past the dispatch mode
            return func(*args, **kwargs | {"device": "cpu"}).to(CUDA)
        return func(*[_with_index(arg) for arg in args], **kwargs)


class _Stream:
    """A CUDA stream as far as it can be recorded: a name."""

    def __init__(
        self, record: Record | None = None, device: Any = None, priority: int = 0, *, name: str = "side stream"
    ) -> None:
        self.name, self.device, self._record = name, CUDA, record

    def synchronize(self) -> None:
        """Nothing to wait for; counted."""
        if self._record is not None:
            self._record.count(self._record.waits, "stream")

    wait_stream = wait_event = record_event = lambda self, *args: args[0] if args else _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        HERE.before = [*getattr(HERE, "before", []), getattr(HERE, "stream_object", _DEFAULT)]
        HERE.stream_object, HERE.stream = self, self.name
        return self

    def __exit__(self, *error: object) -> None:
        HERE.stream_object = HERE.before.pop()
        HERE.stream = HERE.stream_object.name


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, record: Record | None = None, **options: Any) -> None:
        self._record = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0

    record = wait = lambda self, *args: None

    def synchronize(self) -> None:
        """Nothing to wait for; counted."""
        if self._record is not None:
            self._record.count(self._record.waits, "event")


class _DefaultStream(_Stream):
    """The stream of the computation: to wait for it is to wait for the GPU."""

    def synchronize(self) -> None:
        torch.cuda.synchronize()


_DEFAULT = _DefaultStream(name="default stream")


class _Device:
    """Stands in for the context manager torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        self._before = getattr(HERE, "device", None)
        HERE.device = 0

    def __exit__(self, *error: object) -> None:
        HERE.device = self._before


def _set_device(device: Any) -> None:
    HERE.device = 0


_BY_DEVICE = [(torch, "is_autocast_enabled"), (torch, "get_autocast_dtype"), (torch.autocast, "__init__")]
"""Functions of autocast, which on the pretend device is that of the CPU: values are there."""


def _on_cpu(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: "cpu" if value == "cuda" else value for name, value in kwargs.items()}
        return function(*("cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in args), **kwargs)

    return call


class _Runtime:
    """The CUDA runtime, as far as memory is pinned with it."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
        REGISTERED[address] = num_bytes
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        del REGISTERED[address]
        return 0


def _patches(record: Record) -> dict[str, Any]:
    """Attributes of torch.cuda inside."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretend CUDA",
        "is_bf16_supported": lambda *args: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (64 << 30, 80 << 30),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed_all": lambda seed: None,
        "current_stream": lambda device=None: getattr(HERE, "stream_object", _DEFAULT),
        "default_stream": lambda device=None: _DEFAULT,
        "set_device": _set_device,
        "synchronize": lambda device=None: record.count(record.synchronisations, "synchronize"),
        "device": _Device,
        "Stream": functools.partial(_Stream, record),
        "Event": functools.partial(_Event, record),
        "cudart": _Runtime,
        "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "set_sync_debug_mode": lambda mode: None,
    }


@contextlib.contextmanager
def pretend_cuda() -> Iterator[Record]:
    """Make torch see one CUDA device, in this thread and in those started inside.

    Import the libraries in use beforehand: a module that checks for GPUs while it is imported keeps the answer.
    """
    record = Record()
    run_thread = threading.Thread.run

    def run_with_device(thread: threading.Thread) -> None:
        with _modes(record):
            run_thread(thread)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # an empty one would mean the CPU
        for name, value in _patches(record).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for owner, name in _BY_DEVICE:
            stack.enter_context(mock.patch.object(owner, name, _on_cpu(getattr(owner, name))))
        stack.enter_context(mock.patch.object(varlen, "varlen_attn", functools.partial(varlen_attention, record)))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", pin))
        stack.enter_context(mock.patch.object(Tensor, "is_pinned", is_pinned))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_with_device))
        stack.callback(PINNED.clear)
        HERE.__dict__.clear()
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # nn.Module.to replaces CPU parameters
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        matmul = torch.backends.cuda.matmul
        stack.callback(setattr, matmul, "allow_tf32", matmul.allow_tf32)
        stack.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
        torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore: torch.device("cuda") in a build without CUDA
        with _modes(record):
            yield record


@contextlib.contextmanager
def _modes(record: Record) -> Iterator[None]:
    # FakeTensorMode is there for one effect: factories with device="cuda" do not try to initialise CUDA.
    with FakeTensorMode(allow_non_fake_inputs=True), Dispatch(record), _Calls(record):
        yield
