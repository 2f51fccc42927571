"""Tensors of the pretend CUDA device, and the rules of CUDA for operations on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from doubles.pretend_record import Record

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
_JOINING = {_aten.cat.default, _aten.stack.default}
"""Operations that refuse CPU tensors without dimensions, too."""


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
        return Operation(record, func, args, kwargs or {}).run()

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
        self.record.count(self.record.synchronisations, "tolist")
        return self.held.tolist()

    def item(self) -> Any:
        self.record.count(self.record.synchronisations, "item")
        return self.held.item()

    def __bool__(self) -> bool:
        self.record.count(self.record.synchronisations, "bool")
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
            self.record.download(blocking=blocking)
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


class Operation:
    """One operator call on tensors of which some may be on the pretend device."""

    def __init__(self, record: Record, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.record, self.func, self.args, self.kwargs = record, func, args, kwargs
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.on_gpu = any(isinstance(tensor, PretendTensor) for tensor in tensors)
        # CUDA accepts CPU tensors without dimensions beside its own
        self.on_host = any(not isinstance(tensor, PretendTensor) and tensor.dim() > 0 for tensor in tensors)
        device = kwargs.get("device")
        self.target = None if device is None else torch.device(device).type
        self.in_autograd = _in_autograd()
        if (self.in_autograd or func is _aten._to_copy.default) and self.on_gpu and self.target == "cpu":
            self.target = "cuda"  # made by autograd or by a change of dtype in C++, which take the device of `held`

    def run(self) -> Any:
        """Count what CUDA would object to or wait for, compute on the CPU, wrap the results."""
        self._count()
        kwargs = dict(self.kwargs)
        if self.target == "cuda":
            kwargs["device"] = torch.device("cpu")
        pinned = kwargs.pop("pin_memory", None)
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.held if isinstance(leaf, PretendTensor) else leaf, (self.args, kwargs)
        )
        with unset_fake_temporarily():
            if self.func is _aten.histc.default and not args[0].is_floating_point():  # CUDA's takes integers, too
                found = self.func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
            else:
                found = self.func(*args, **kwargs)
        if pinned and isinstance(found, Tensor):
            PINNED[found.untyped_storage().data_ptr()] = found
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
            if not self.on_gpu and self.target == "cuda":
                self.record.upload(blocking=blocking or not _is_sent_as_it_is(self.args[0]))
        elif self.in_autograd:
            pass
        elif self.on_gpu and self.func in _INDEXING:
            self._count_index()
        elif self.on_gpu and (self.on_host or (self.func in _JOINING and self._joins_devices())):
            record.count(record.mismatches, name)
        if self.func is _aten._grouped_mm.default and self.on_gpu:
            dtype = next(iter(self.args)).dtype
            if not _has_grouped_kernel(dtype):
                record.count(record.synchronisations, f"{name} in {dtype}")
        if self.on_gpu and self.func in _SYNCHRONISING and self.kwargs.get("output_size") is None:
            record.count(record.synchronisations, name)

    def _count_copy(self, target: Tensor, source: Tensor, *, blocking: bool) -> None:
        if isinstance(target, PretendTensor) and not isinstance(source, PretendTensor) and source.dim() > 0:
            direct = is_pinned(source) and (source.is_contiguous() or source.stride() == target.stride())
            self.record.upload(blocking=blocking or not direct)
        elif isinstance(source, PretendTensor) and not isinstance(target, PretendTensor):
            direct = is_pinned(target) and (target.is_contiguous() or source.stride() == target.stride())
            self.record.download(blocking=blocking or not direct)

    def _joins_devices(self) -> bool:
        return not all(isinstance(tensor, PretendTensor) for tensor in self.args[0])

    def _count_index(self) -> None:
        values, indices = self.args[0], [index for index in self.args[1] if index is not None]
        if not isinstance(values, PretendTensor):
            self.record.count(self.record.mismatches, "CUDA index of a CPU tensor")
            return
        if any(not isinstance(index, PretendTensor) and index.dim() > 0 for index in indices):
            self.record.count(self.record.uploads, "CPU index of a CUDA tensor")
        if any(index.dtype == torch.bool for index in indices):
            self.record.count(self.record.synchronisations, "index by a mask")
        if len(self.args) > 2 and not isinstance(self.args[2], PretendTensor) and self.args[2].dim() > 0:
            self.record.count(self.record.mismatches, "CPU values into a CUDA tensor")


def _has_grouped_kernel(dtype: torch.dtype) -> bool:
    """Whether CUDA multiplies groups of rows in one kernel; else the host reads their ends (`GroupedBlas.cpp`)."""
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in (9, 10)


def _is_sent_as_it_is(tensor: Tensor) -> bool:
    """Whether host memory is copied to a new CUDA tensor at once: pinned, without gaps (`Copy.cu`)."""
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # of any order of the dimensions
    return is_pinned(tensor) and dense


class Dispatch(TorchDispatchMode):
    """Sees operations without tensors of the pretend device too: factories and copies to it."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return Operation(self.record, func, args, kwargs or {}).run()


def is_pinned(tensor: Tensor, *args: Any) -> bool:
    """Whether the tensor was pinned inside `pretend_cuda`."""
    address = tensor.untyped_storage().data_ptr()
    return address in PINNED or any(first <= address < first + size for first, size in list(REGISTERED.items()))


PINNED: dict[int, Tensor] = {}
"""Tensors that were pinned, by the address of their storage: kept, so that an address is not used again."""


REGISTERED: dict[int, int] = {}
"""Bytes of memory that was pinned by `cudaHostRegister`, by its address."""


def pin(tensor: Tensor, *args: Any) -> Tensor:
    """Tensor.pin_memory."""
    pinned = tensor.clone()
    PINNED[pinned.untyped_storage().data_ptr()] = pinned
    return pinned


def _in_autograd() -> bool:
    """Whether autograd's own backward formulas call, which make zeros for missing gradients; not those in Python."""
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)
