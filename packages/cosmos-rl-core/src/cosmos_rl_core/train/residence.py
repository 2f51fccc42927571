"""Where a policy's tensors are: on its device for the whole run, or with [run] colocate during its turns alone.

batch arrives -> begin: turn, tensors to the device -> step -> end: tensors to the host, turn over -> publish, save

Gradients are dropped at the end of a turn: they belong to a step that is over, or is computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

from torch import Tensor

from cosmos_rl_core.gpu_time import RankGpuTime
from cosmos_rl_core.interfaces import Reference, Teacher
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.parallel.offload.swap import Swap
from cosmos_rl_core.train.trainer import Trainer

T = TypeVar("T")


class Residence:
    """Tensors that stay on their device."""

    @property
    def is_waiting(self) -> bool:
        """Whether the policy waits for its turn."""
        return False

    @property
    def is_on_device(self) -> bool:
        """Whether the tensors are on their device."""
        return True

    def keep(self, trainer: Trainer, *frozen: Reference | Teacher | None) -> None:
        """Set the tensors: weights, averages and optimizer state of a trainer, and those of its frozen models."""

    async def begin(self) -> None:
        """Wait for the turn, then move the tensors to their device. No-op within a turn."""

    async def end(self) -> None:
        """Move the tensors to the host, then end the turn. No-op outside of a turn."""

    def close(self) -> None:
        """Release the turn's locks."""

    def readable(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors of the policy with values that can be read now: host tensors outside of a turn."""
        return tensors


class ColocatedResidence(Residence):
    """Tensors that are on their device during turns."""

    def __init__(self, gpu_time: RankGpuTime, *, compute: ThreadPoolExecutor, timeline: Timeline) -> None:
        """compute: the one thread of all tensor work."""
        self._gpu_time, self._compute, self._timeline = gpu_time, compute, timeline
        self._kept: tuple[Trainer, tuple[Reference | Teacher | None, ...]] | None = None
        self._swap = Swap(self._tensors)
        self._has_gpu = False
        self._span = ExitStack()
        """Holds the span of the turn."""

    @property
    def is_waiting(self) -> bool:
        return self._gpu_time.is_waiting

    @property
    def is_on_device(self) -> bool:
        return self._has_gpu

    def keep(self, trainer: Trainer, *frozen: Reference | Teacher | None) -> None:
        self._kept = trainer, frozen

    async def begin(self) -> None:
        if not self._has_gpu:
            with self._timeline.span("wait for turn", track="turn"):
                await self._gpu_time.take()
            self._span.enter_context(self._timeline.span("turn", track="turn"))
            self._has_gpu = True
            await self._in_thread("load", self._swap.back)

    async def end(self) -> None:
        if self._has_gpu:
            await self._in_thread("offload", self._offload)
            self._span.close()
            self._gpu_time.give()
            self._has_gpu = False

    def close(self) -> None:
        self._span.close()
        self._gpu_time.close()

    def readable(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._swap.readable(tensors)

    async def _in_thread(self, name: str, work: Callable[[], T]) -> T:
        with self._timeline.span(name, track="turn"):
            return await asyncio.get_running_loop().run_in_executor(self._compute, work)

    def _offload(self) -> None:
        if self._kept is not None:
            self._kept[0].optimizer.zero_grad(set_to_none=True)
        self._swap.out()

    def _tensors(self) -> Iterator[Tensor]:
        if self._kept is None:
            return
        trainer, frozen = self._kept
        yield from trainer.policy.weights().values()  # the first call makes averages,
        yield from trainer.policy.rollout_weights().values()  # and these are read between turns
        for each in (trainer.policy, *frozen):
            if each is not None:
                yield from each.tensors()
        for state in trainer.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
