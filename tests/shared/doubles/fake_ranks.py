"""One rank of a replica of any size in one process: nothing is sent and nothing is allocated.

with fake_rank(dims, rank=0) as mesh, FakeTensorMode(allow_non_fake_inputs=True) as mode:
    policy = ...                              parameters on meta, then empty fake tensors
    with Collectives(mesh) as seen:
        policy(faked(inputs, mode)).sum().backward()
seen.check(traffic(...))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cosmos_rl_core.parallel import mesh as meshes
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.plan.traffic import CollectiveCalls

T = TypeVar("T")

_KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "send": "send",
    "recv": "receive",
}
"""Parts of operators' names."""


@contextmanager
def fake_rank(dims: ParallelDims, *, rank: int = 0) -> Iterator[ReplicaMesh]:
    """Yield the mesh of one rank of `dims` on a CPU, without the others."""
    set_timeouts = meshes._set_timeouts
    dist.init_process_group("fake", rank=rank, world_size=dims.world_size, store=FakeStore())
    meshes._set_timeouts = lambda *_, **__: None  # a fake group has none
    try:
        yield ReplicaMesh.build(dims, device=torch.device("cpu"))
    finally:
        meshes._set_timeouts = set_timeouts
        dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Counts the calls and bytes of collectives, by axis of the mesh and kind.

    Bytes are those of a call's largest tensor: the whole one that is gathered, reduced, exchanged or sent. Axes whose
    groups have the same ranks count as one.
    """

    def __init__(self, mesh: ReplicaMesh) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        along = {name: mesh.world[name] for name in mesh.world.mesh_dim_names or ()}
        along |= {"ep": mesh.experts["ep"], "efsdp": mesh.experts["efsdp"]}
        groups = {name: axis.get_group().group_name for name, axis in along.items()}
        self._groups = groups | {"fsdp": mesh.fsdp.get_group(-1 if mesh.fsdp.ndim > 1 else None).group_name}
        self._axes: dict[str, str] = {group: name for name, group in self._groups.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace and "wait_tensor" not in str(func):
            key = self._axis(args), next(kind for part, kind in _KINDS.items() if part in str(func))
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.calls[key] += 1
            self.bytes[key] += max(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result

    @property
    def found(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Calls and bytes by axis and kind."""
        return {key: (calls, self.bytes[key]) for key, calls in self.calls.items()}

    def expected(
        self, planned: Iterable[CollectiveCalls], *, microbatches: int = 1
    ) -> dict[tuple[str, str], tuple[int, int]]:
        """Return `found` of a step of so many microbatches according to the plan."""
        calls: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for one in planned:
            key = self._axes[self._groups[one.axis]], one.kind
            times = microbatches if one.each == "microbatch" else 1
            calls[key] += times * one.calls
            sizes[key] += times * one.bytes
        return {key: (number, sizes[key]) for key, number in calls.items()}

    def _axis(self, args: Any) -> str:
        """The axis of the group among an operator's arguments: an object of c10d, or the name of a functional one."""
        for leaf in tree_leaves(args):
            if isinstance(leaf, torch.ScriptObject):
                return self._axes[dist.ProcessGroup.unbox(leaf).group_name]
            if isinstance(leaf, str) and leaf in self._axes:
                return self._axes[leaf]
        raise AssertionError("a collective without a group")


def faked(value: T, mode: FakeTensorMode) -> T:
    """Return a value with fake tensors in place of those in it: in tuples and dataclasses."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, tuple):
        return tuple(faked(item, mode) for item in value)  # pyright: ignore[reportReturnType]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: faked(getattr(value, field.name), mode) for field in fields(value)})
    return value
