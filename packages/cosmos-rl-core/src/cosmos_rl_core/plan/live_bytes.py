"""The memory that operators hold: `with LiveBytes() as live: ...`, then `live.peak`.

    with tensors_without_memory(), LiveBytes(without=tensors_of(module)) as live:
        module(*inputs)

computes only shapes: the peak of a model of any size is known in seconds. Workspace of kernels is not counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cosmos_rl_core.parallel.dtensor import local_part


class LiveBytes(TorchDispatchMode):
    """Counts the real storages that operators return, and with `inputs` those they use, while they are alive.

    A distributed tensor counts with its local part. Tensors on meta have no storage to count, nor have the fake ones in
    which distributed tensors compute shapes, of an inner mode.
    """

    def __init__(self, *, inputs: bool = False, without: Iterable[Tensor] = ()) -> None:
        """without: tensors whose storages are not counted."""
        super().__init__()
        self.peak = 0
        """Bytes of all counted storages, at most so far."""
        self._inputs = inputs
        self._without = {local_part(tensor).untyped_storage()._cdata for tensor in without}
        self._alive: dict[int, StorageWeakRef] = {}
        self._fakes: FakeTensorMode | None = None

    def __enter__(self) -> Self:
        self._fakes = active_fake_mode()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its local operators follow
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result) if self._inputs else result):
            if isinstance(tensor, Tensor) and self._has_storage(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._without:
                    self._alive[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.now())
        return result

    def _has_storage(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode is self._fakes
        return not isinstance(tensor, DTensor) and not tensor.is_meta

    def now(self) -> int:
        """Return the bytes that are alive, and forget the storages that are not."""
        storages = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self._alive.items()}
        self._alive = {key: ref for key, ref in self._alive.items() if storages[key] is not None}
        return sum(storage.nbytes() for storage in storages.values() if storage is not None)


@contextmanager
def tensors_without_memory() -> Iterator[None]:
    """Within the context, tensors have only shapes and dtypes, no data; of constants that exist, only these count."""
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        warnings.simplefilter("ignore")  # from code that reads the memory of its tensors
        yield
