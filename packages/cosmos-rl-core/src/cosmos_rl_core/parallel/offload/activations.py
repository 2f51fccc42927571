"""Tensors saved for the backward pass, kept in the host's memory.

On a GPU the copies run on a stream of their own, beside the computation:

    compute stream    block 1 | block 2 | block 3 | ... | backward 3 | backward 2 | backward 1
    copy stream               | 1 out   | 2 out   | ... | 2 in       | 1 in       |

A block's tensors are freed when the next block has run and they have left: the compute stream then waits for the copy,
the host never. While the backward pass of a block runs, the tensors of the block before it are on their way back.
Unproven on hardware: tests run on the pretend device of `tests/shared/doubles/pretend_cuda.py`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from cosmos_rl_core.parallel.dtensor import local_part

MIN_OFFLOADED_BYTES = 64 * 1024
"""Smaller tensors stay where they are: a copy costs more than they hold."""

Forward = Callable[..., Any]


def offload_activations(blocks: Iterable[nn.Module], *, min_bytes: int = MIN_OFFLOADED_BYTES) -> None:
    """Keep tensors saved for the backward pass of each block in the host's memory, but parameters and small ones.

    With "full" checkpointing that is the input of each block. On a CPU it costs a copy and gains nothing.
    """
    copies = _Copies()
    for block in blocks:
        # A partial function, not a closure: a deep copy of a block then runs with the copy's weights.
        block.forward = partial(_offloaded, block, block.forward, min_bytes, copies)


def _offloaded(block: nn.Module, forward: Forward, min_bytes: int, copies: _Copies, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    parameters = {_address(parameter) for parameter in block.parameters()}
    moved: dict[Any, tuple[Tensor, Tensor | _Moved]] = {}
    run = copies.begin()

    def pack(saved: Tensor) -> Callable[[], Tensor]:
        small = saved.numel() * saved.itemsize < min_bytes
        if small or type(saved) not in _KINDS or _address(saved) in parameters:
            return lambda: saved
        key = (_address(saved), saved.storage_offset(), saved.shape, saved.stride(), saved._version)
        if key not in moved:
            moved[key] = (saved, run.leave(local_part(saved)))  # kept until the block ends: its address stays its own
        return _like(saved, run.back(moved[key][1]))

    try:
        with saved_tensors_hooks(pack, lambda fetch: fetch()):
            return forward(*args, **kwargs)
    finally:
        copies.end(run, [saved for saved, _ in moved.values()])
        moved.clear()


_KINDS: set[type] = {Tensor, DTensor}
"""Types of tensors that are moved; others may not be plain data."""


class _Copies:
    """The copy stream of a model's blocks, and the tensors that are leaving the GPU."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self._leaving: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._last: Callable[[], _Run | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copies:
        return _Copies()  # a copied model has a stream of its own

    def begin(self) -> _Run:
        """Start a block; the one before it is the last that began."""
        run = _Run(self, self._last)
        self._last = weakref.ref(run)
        return run

    def end(self, run: _Run, saved: list[Tensor]) -> None:
        """End a block, whose tensors are freed after the next."""
        if run.moved:
            self._leaving.append((self.mark(), saved))
            self.free(keep=1)

    def free(self, *, keep: int = 0) -> None:
        """Free the tensors of all blocks but the last `keep`: what reuses their memory waits for their copies."""
        while len(self._leaving) > keep:
            left, _ = self._leaving.popleft()
            torch.cuda.current_stream().wait_event(left)

    def mark(self) -> torch.cuda.Event:
        """Return an event after all copies that are queued."""
        assert self.stream is not None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def side(self, device: torch.device) -> torch.cuda.Stream:
        """Return the copy stream, which waits for all that this thread has queued on its own."""
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        return self.stream


class _Run:
    """One forward pass of a block: its tensors on the host."""

    def __init__(self, copies: _Copies, before: Callable[[], _Run | None]) -> None:
        self.copies = copies
        self.moved: list[_Moved] = []
        self._before = before
        self._fetched = False

    def leave(self, here: Tensor) -> Tensor | _Moved:
        """Copy a tensor to the host; from a GPU the copy is queued."""
        if not here.is_cuda:
            return torch.empty_like(here).copy_(here)
        self.moved.append(_Moved(here, self.copies))
        return self.moved[-1]

    def back(self, left: Tensor | _Moved) -> Callable[[], Tensor]:
        """Return the function with which an operator's backward pass gets a tensor that has left."""
        if isinstance(left, Tensor):
            return lambda: left
        left.uses += 1
        return partial(self._get, left)  # keeps this object, which no tensor of it does: a cycle would outlive the pass

    def _get(self, moved: _Moved) -> Tensor:
        tensor = moved.get()
        self.copies.free()
        if (before := self._before()) is not None:
            before.fetch()
        return tensor

    def fetch(self) -> None:
        """Queue the copies of all tensors to the GPU, once."""
        if not self._fetched:
            self._fetched = True
            for moved in self.moved:
                moved.fetch()


class _Moved:
    """A GPU's tensor in pinned memory, and on the GPU again while the backward pass uses it."""

    def __init__(self, here: Tensor, copies: _Copies) -> None:
        self._copies, self._device = copies, here.device
        self._host = torch.empty_like(here, device="cpu", pin_memory=True)
        with torch.cuda.stream(copies.side(here.device)):
            self._host.copy_(here, non_blocking=True)
        self._on_gpu: tuple[Tensor, torch.cuda.Event] | None = None
        """The copy on the GPU, and the event after which it is complete."""
        self.uses = 0
        """Operators that saved the tensor and have not had it back."""

    def fetch(self) -> None:
        """Queue the copy to the GPU. Its memory belongs to the compute stream, which uses and frees it."""
        if self._on_gpu is None:
            copy = torch.empty_like(self._host, device=self._device)
            with torch.cuda.stream(self._copies.side(self._device)):  # after the last use of that memory
                copy.copy_(self._host, non_blocking=True)
            self._on_gpu = copy, self._copies.mark()

    def get(self) -> Tensor:
        """Return it on the GPU; what this thread queues next waits for the copy. The last use frees it."""
        self.fetch()
        assert self._on_gpu is not None
        copy, arrived = self._on_gpu
        torch.cuda.current_stream(self._device).wait_event(arrived)
        self.uses -= 1
        if self.uses <= 0:
            self._on_gpu = None
        return copy


def _like(saved: Tensor, back: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that makes the local tensor of `back` a DTensor again, if `saved` is one."""
    if not isinstance(saved, DTensor):
        return back
    mesh, placements, shape, stride = saved.device_mesh, saved.placements, saved.shape, saved.stride()
    return lambda: DTensor.from_local(back(), mesh, placements, run_check=False, shape=shape, stride=stride)


def _address(tensor: Tensor) -> int:
    """The address of a tensor's storage: views of a parameter, such as its transpose, share it."""
    return local_part(tensor).untyped_storage().data_ptr()
