"""A pretend CUDA device: tensors that report cuda:0, hold real CPU values and are as strict as CUDA about devices.

    with pretend_cuda() as record:
        ...                                     # whole runs work: values are real, .tolist() and numpy included
    assert not record.mismatches
    assert record.synchronisations.total() <= 1

Everything inside, in threads started inside too, sees one GPU: `torch.cuda.is_available()` is true, streams, events
and the current device are recorded per thread. Each event is counted by the line of our code that causes it:

    mismatches        operations that mix cuda:0 with CPU tensors; they raise on CUDA
    synchronisations  copies to the host, data-dependent shapes, .item(): the host waits for the GPU
    uploads           copies from pageable host memory: the host waits for the copy
    stray             work of a thread on another device or stream than it set: copies to the host in a thread that
                      never called `torch.cuda.set_device`
    math_attention    scaled_dot_product_attention that no fused kernel takes: scores of [L, L] in memory

It does not emulate time, memory, or races between streams. Operations run on the CPU in the order of their calls.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
_SYNCHRONISING = {
    _aten.nonzero.default,
    _aten.bincount.default,
    _aten.unique_consecutive.default,
    _aten._unique2.default,
    _aten.masked_select.default,
    _aten.repeat_interleave.Tensor,
    _aten.equal.default,
    _aten._local_scalar_dense.default,
}
"""Operations whose result, or its shape, the host must wait for."""
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
"""Operations that accept CPU indices beside CUDA values; they copy them."""


@dataclass
class Record:
    """Counts by "file:line source (thread)"."""

    mismatches: Counter[str] = field(default_factory=Counter)
    synchronisations: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    stray: Counter[str] = field(default_factory=Counter)
    math_attention: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)
    """Copies between host and GPU by "direction, stream, thread"."""

    def clear(self) -> None:
        """Forget everything counted so far, for instance during start-up."""
        for counts in vars(self).values():
            counts.clear()

    def __str__(self) -> str:
        lines = []
        for name, counts in vars(self).items():
            lines.append(f"{name}: {counts.total()}")
            lines += [f"  {count:5d}  {place}" for place, count in counts.most_common()]
        return "\n".join(lines)


class PretendTensor(Tensor):
    """A tensor on the pretend device around the CPU tensor `held`."""

    held: Tensor
    record: Record

    @staticmethod
    def __new__(cls: type[PretendTensor], held: Tensor, record: Record) -> PretendTensor:
        self = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device("cpu"),
        )
        self.held, self.record = held, record
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        record = next(leaf.record for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, PretendTensor))
        return _Operation(record, func, args, kwargs or {}).run()

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    @property
    def is_cpu(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False

    def get_device(self) -> int:
        return 0

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{self.held!r} on cuda:0"

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        _count(self.record.synchronisations, "tolist")
        return self.held.tolist()

    def item(self) -> Any:
        _count(self.record.synchronisations, "item")
        return self.held.item()

    def __bool__(self) -> bool:
        _count(self.record.synchronisations, "bool")
        return bool(self.held)

    def pin_memory(self, *args: Any) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor', only dense CPU tensors can be pinned")

    def cuda(self, *args: Any, **options: Any) -> Tensor:
        return self

    def cpu(self, *args: Any, **options: Any) -> Tensor:
        return self.to("cpu")

    def to(self, *args: Any, **options: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As Tensor.to; a copy to the CPU synchronises unless it is non_blocking."""
        device, dtype, blocking, copies = _target(args, options)
        if device is not None and device.type == "cpu":
            if blocking:
                _count(self.record.synchronisations, "copy to the host")
            _check_thread(self.record, "copy to the host")
            found = _ToHost.apply(self)
            return found if dtype is None else found.to(dtype)
        if copies:
            return self.clone() if dtype in (None, self.dtype) else Tensor.to(self, dtype)
        return self if dtype in (None, self.dtype) else Tensor.to(self, dtype)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: PretendTensor) -> Tensor:
        ctx.record = tensor.record
        return tensor.held.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return PretendTensor(grad, ctx.record)


def _target(args: tuple, options: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None, bool, bool]:
    """Device, dtype, blocking and copy of the arguments of Tensor.to."""
    device, dtype = options.get("device"), options.get("dtype")
    flags = [arg for arg in args if isinstance(arg, bool)]
    for arg in args:
        if isinstance(arg, Tensor):
            device, dtype = arg.device, arg.dtype
        elif isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, str | torch.device | int) and not isinstance(arg, bool):
            device = arg
    blocking = not options.get("non_blocking", bool(flags) and flags[0])
    copies = bool(options.get("copy", len(flags) > 1 and flags[1]))
    device = torch.device("cuda", device) if isinstance(device, int) else device
    return None if device is None else torch.device(device), dtype, blocking, copies


class _Operation:
    """One operator call on tensors of which some may be on the pretend device."""

    def __init__(self, record: Record, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.record, self.func, self.args, self.kwargs = record, func, args, kwargs
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.on_gpu = any(isinstance(tensor, PretendTensor) for tensor in tensors)
        # CUDA accepts CPU tensors without dimensions beside its own
        self.on_host = any(not isinstance(tensor, PretendTensor) and tensor.dim() > 0 for tensor in tensors)
        device = kwargs.get("device")
        self.target = None if device is None else torch.device(device).type
        self.in_autograd = _in_autograd()
        if self.in_autograd and self.on_gpu and self.target == "cpu":
            self.target = "cuda"  # a gradient made by autograd, which takes the device of `held`

    def run(self) -> Any:
        """Count what CUDA would object to or wait for, compute on the CPU, wrap the results."""
        self._count()
        kwargs = dict(self.kwargs)
        if self.target == "cuda":
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.held if isinstance(leaf, PretendTensor) else leaf, (self.args, kwargs)
        )
        with unset_fake_temporarily():
            found = self.func(*args, **kwargs)
        return self._wrapped(found, args)

    def _wrapped(self, found: Any, args: tuple) -> Any:
        written = self.func._schema.arguments and self.func._schema.arguments[0].alias_info
        if written is not None and written and written.is_write and args and found is args[0]:
            return self.args[0]  # in place: the same object as came in
        target = self.target or ("cuda" if self.on_gpu else "cpu")
        if self.func in _INDEXING and not isinstance(self.args[0], PretendTensor) and not self.in_autograd:
            target = "cpu"
        if target == "cpu":
            return found
        return pytree.tree_map(lambda leaf: PretendTensor(leaf, self.record) if type(leaf) is Tensor else leaf, found)

    def _count(self) -> None:
        record, name = self.record, self.func.overloadpacket.__name__
        if self.func is _aten.copy_.default:
            self._count_copy(*self.args[:2], blocking=not (len(self.args) > 2 and self.args[2]))
        elif self.func is _aten._to_copy.default:
            blocking = not self.kwargs.get("non_blocking", False)
            if self.on_gpu and self.target == "cpu":
                self._count_download(blocking)
            elif not self.on_gpu and self.target == "cuda":
                self._count_upload(self.args[0], blocking)
        elif self.in_autograd:
            pass
        elif self.on_gpu and self.func in _INDEXING:
            self._count_index()
        elif self.on_gpu and self.on_host:
            _count(record.mismatches, name)
        if self.on_gpu and self.func in _SYNCHRONISING:
            _count(record.synchronisations, name)

    def _count_copy(self, target: Tensor, source: Tensor, *, blocking: bool) -> None:
        if isinstance(target, PretendTensor) and not isinstance(source, PretendTensor) and source.dim() > 0:
            self._count_upload(source, blocking)
        elif isinstance(source, PretendTensor) and not isinstance(target, PretendTensor):
            self._count_download(blocking or not is_pinned(target))

    def _count_upload(self, source: Tensor, blocking: bool) -> None:
        if blocking or not is_pinned(source):
            _count(self.record.uploads, "copy to the GPU")
        _count_stream(self.record, "to the GPU")

    def _count_download(self, blocking: bool) -> None:
        if blocking:
            _count(self.record.synchronisations, "copy to the host")
        _check_thread(self.record, "copy to the host")

    def _count_index(self) -> None:
        values, indices = self.args[0], [index for index in self.args[1] if index is not None]
        if not isinstance(values, PretendTensor):
            _count(self.record.mismatches, "CUDA index of a CPU tensor")
            return
        if any(not isinstance(index, PretendTensor) and index.dim() > 0 for index in indices):
            _count(self.record.uploads, "CPU index of a CUDA tensor")
        if any(index.dtype == torch.bool for index in indices):
            _count(self.record.synchronisations, "index by a mask")
        if len(self.args) > 2 and not isinstance(self.args[2], PretendTensor) and self.args[2].dim() > 0:
            _count(self.record.mismatches, "CPU values into a CUDA tensor")


class _Dispatch(TorchDispatchMode):
    """Sees operations without tensors of the pretend device too: factories and copies to it."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _Operation(self.record, func, args, kwargs or {}).run()


_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
"""Functions that copy Python or numpy data."""


def _with_index(value: Any) -> Any:
    """ "cuda" -> cuda:0: without an index, a build without CUDA asks CUDA for the current device."""
    if (isinstance(value, str) and value == "cuda") or (isinstance(value, torch.device) and value.type == "cuda"):
        return CUDA
    return value


class _Calls(TorchFunctionMode):
    """Names the device of calls, and counts scaled_dot_product_attention for which CUDA has no fused kernel.

    Flash attention takes half precision, head dims up to 256 and no mask; the memory-efficient kernel takes masks and
    float32, but no grouped heads (`sdp_utils.cpp` of torch 2.13).
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: _with_index(value) for name, value in (kwargs or {}).items()}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._check(*args, **kwargs)
        if func is Tensor.cuda:
            return args[0].to(CUDA)
        if func in _FROM_DATA and kwargs.get("device") == CUDA:  # they would allocate past the dispatch mode
            return func(*args, **kwargs | {"device": "cpu"}).to(CUDA)
        return func(*[_with_index(arg) for arg in args], **kwargs)

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        flash = attn_mask is None and query.dtype != torch.float32 and query.shape[-1] <= 256
        efficient = not enable_gqa or key.shape[1] == query.shape[1]
        if isinstance(query, PretendTensor) and not flash and not efficient:
            shape = f"{list(query.shape)} {query.dtype}".replace("torch.", "")
            _count(self.record.math_attention, f"{'masked' if attn_mask is not None else 'causal'} {shape}, grouped")


class _Stream:
    """A CUDA stream as far as it can be recorded: a name."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "side stream") -> None:
        self.name, self.device = name, CUDA

    def synchronize(self) -> None:
        """Nothing to wait for."""

    wait_stream = wait_event = record_event = lambda self, *args: args[0] if args else _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        _HERE.before = [*getattr(_HERE, "before", []), getattr(_HERE, "stream", _DEFAULT)]
        _HERE.stream = self
        return self

    def __exit__(self, *error: object) -> None:
        _HERE.stream = _HERE.before.pop()


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0

    record = wait = synchronize = lambda self, *args: None


_HERE = threading.local()
"""The current device and stream of each thread."""
_DEFAULT = _Stream(name="default stream")


class _Device:
    """torch.cuda.device: sets the thread's device inside."""

    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        self._before = getattr(_HERE, "device", None)
        _HERE.device = 0

    def __exit__(self, *error: object) -> None:
        _HERE.device = self._before


def _set_device(device: Any) -> None:
    _HERE.device = 0


def is_pinned(tensor: Tensor, *args: Any) -> bool:
    """Whether the tensor was pinned inside `pretend_cuda`."""
    return tensor.untyped_storage().data_ptr() in _PINNED


_PINNED: dict[int, Tensor] = {}
"""Tensors that were pinned, by the address of their storage: kept, so that an address is not used again."""


def _pin(tensor: Tensor, *args: Any) -> Tensor:
    pinned = tensor.clone()
    _PINNED[pinned.untyped_storage().data_ptr()] = pinned
    return pinned


def _patches() -> dict[str, Any]:
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
        "current_stream": lambda device=None: getattr(_HERE, "stream", _DEFAULT),
        "default_stream": lambda device=None: _DEFAULT,
        "set_device": _set_device,
        "synchronize": lambda device=None: None,
        "device": _Device,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
        "empty_cache": lambda: None,
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
        for name, value in _patches().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", _pin))
        stack.enter_context(mock.patch.object(Tensor, "is_pinned", is_pinned))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_with_device))
        stack.callback(_PINNED.clear)
        _HERE.__dict__.clear()
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # nn.Module.to replaces CPU parameters
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore: torch.device("cuda") in a build without CUDA
        with _modes(record):
            yield record


@contextlib.contextmanager
def _modes(record: Record) -> Iterator[None]:
    # FakeTensorMode is there for one effect: factories with device="cuda" do not try to initialise CUDA.
    with FakeTensorMode(allow_non_fake_inputs=True), _Dispatch(record), _Calls(record):
        yield


def _check_thread(record: Record, event: str) -> None:
    """Count a copy in a thread that has not chosen its device: with several GPUs it would wait for another one's."""
    if getattr(_HERE, "device", None) is None:
        _count(record.stray, f"{event}, no device set")
    _count_stream(record, "to the host")


def _count_stream(record: Record, direction: str) -> None:
    record.streams[f"{direction}, {getattr(_HERE, 'stream', _DEFAULT).name}, {threading.current_thread().name}"] += 1


def _count(counter: Counter[str], event: str) -> None:
    counter[f"{_place()}: {event} ({threading.current_thread().name})"] += 1


def _place() -> str:
    """The innermost line of our packages, or of the caller where there is none."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.endswith("pretend_cuda.py")]
    ours = [frame for frame in frames if "/cosmos_rl_" in frame.filename and "/tests/" not in frame.filename]
    frame = (ours or [frame for frame in frames if "/torch/" not in frame.filename])[-1]
    return f"{frame.filename.rpartition('/src/')[2].rpartition('site-packages/')[2]}:{frame.lineno} {frame.line}"


def _in_autograd() -> bool:
    """Whether autograd's own backward formulas call, which make zeros for missing gradients; not those in Python."""
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)
