"""Microbatches through the stages of a pipeline, in the order of one of torch's schedules.

    microbatch -> stage 0 --hidden--> stage 1 --hidden--> ... --hidden--> last stage -> loss(outputs, microbatch)
                         <--d hidden-          <--d hidden-          <--d hidden-

All ranks of a pipeline hold the same microbatches, so a stage reads masks, positions and labels from its own copy and
only hidden states are sent. Their shapes are known beforehand: rows of different lengths need no padding and no
exchange of shapes (`ragged.py`). `stages.py` assigns stages to ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from cosmos_rl_core.interfaces import MicrobatchLoss
from cosmos_rl_core.parallel.axes.ragged import RaggedStage
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.stages import num_stages
from cosmos_rl_core.types import Microbatch, PolicyOutputs


class PolicyStage(ABC):
    """A part of a policy; its domain derives from this class.

    inputs = stage.prepare(microbatch)                         # once, for all stages of this rank
    hidden = first(None, inputs, with_entropy=False)
    hidden = middle(hidden, inputs, with_entropy=False)
    outputs = last(hidden, inputs, with_entropy=False)         # PolicyOutputs
    """

    module: nn.Module
    """Holds the stage's parameters; the root of their FSDP where they are sharded."""

    @abstractmethod
    def prepare(self, microbatch: Microbatch) -> Any:
        """The stages' inputs from a microbatch; the same in each of them. Nothing is sent."""

    @abstractmethod
    def hidden_shape(self, inputs: Any) -> tuple[int, ...]:
        """Shape of the hidden states between stages on this rank; the same in every stage."""

    @abstractmethod
    def __call__(self, hidden: Tensor | None, inputs: Any, *, with_entropy: bool) -> Tensor | PolicyOutputs:
        """Hidden states for the next stage; the outputs, of the last one."""


class Pipeline:
    """This rank's stages, and its place among the ranks that hold the others. All of them call it together."""

    def __init__(
        self, stages: Sequence[PolicyStage], *, section: ParallelSection, mesh: ReplicaMesh, hidden_dtype: torch.dtype
    ) -> None:
        """Take this rank's stages: those with index mesh.stage, mesh.stage + pp, ... in this order.

        Args:
            section: the schedule; `reduce_once` leaves the sum over FSDP's ranks to the end of a step.
            hidden_dtype: of the hidden states between stages.
        """
        axis = mesh.axis("pp")
        assert axis is not None, "a pipeline has several ranks"
        assert len(stages) == section.stages_per_rank
        self._stages = {mesh.stage + place * section.pp: stage for place, stage in enumerate(stages)}
        self._num_stages = num_stages(section)
        self._section = section
        self._group = axis.get_group()
        self._device = mesh.device
        self._hidden_dtype = hidden_dtype

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self._num_stages - 1 in self._stages

    def forward_backward(self, microbatches: Sequence[Microbatch], *, loss: MicrobatchLoss, with_entropy: bool) -> None:
        """Add the gradients of `loss` over each microbatch; only the last stage calls it, once for each, in order."""
        if not microbatches:
            return
        # Every rank has every microbatch, so masks, positions and labels come from its own copy, prepared once for all
        # its stages; the shapes of hidden states follow from them on each side, and no rank has to send them.
        any_stage = next(iter(self._stages.values()))
        inputs = [any_stage.prepare(microbatch) for microbatch in microbatches]
        step = _Step(
            microbatches, inputs, [any_stage.hidden_shape(prepared) for prepared in inputs], loss, with_entropy
        )
        stages = [self._ragged(index, stage, step) for index, stage in self._stages.items()]
        # The last stage returns the loss itself as its output, since only it has the microbatch's labels. torch's
        # schedule wants a target to cut into microbatches and a loss function, which get the loss and pass it on.
        unused = torch.empty(len(microbatches))
        self._schedule(stages, len(microbatches)).step(target=unused, return_outputs=False)

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs | None:
        """One microbatch without gradients; None on the ranks before the last stage."""
        inputs = next(iter(self._stages.values())).prepare(microbatch)
        outputs: Tensor | PolicyOutputs | None = None
        with torch.no_grad():
            # A rank runs its stages in order, and blocks at each for the stage before it, which is on the rank before:
            # stage i waits for i - 1 alone, so no two ranks wait for each other.
            for index, stage in self._stages.items():
                hidden = None if index == 0 else self._receive(stage.hidden_shape(inputs), source=index - 1)
                outputs = stage(hidden, inputs, with_entropy=with_entropy)
                if isinstance(outputs, Tensor):
                    dist.send(outputs.contiguous(), group=self._group, group_dst=(index + 1) % self._section.pp)
        return outputs if isinstance(outputs, PolicyOutputs) else None

    def _receive(self, shape: tuple[int, ...], *, source: int) -> Tensor:
        hidden = torch.empty(shape, dtype=self._hidden_dtype, device=self._device)
        dist.recv(hidden, group=self._group, group_src=source % self._section.pp)
        return hidden

    def _ragged(self, index: int, stage: PolicyStage, step: _Step) -> RaggedStage:
        return RaggedStage(
            partial(step.run, stage),
            # A list hides FSDP from torch's schedule, which would hold back the sums over ranks.
            module=stage.module if self._section.reduce_once else nn.ModuleList([stage.module]),
            index=index,
            num_stages=self._num_stages,
            shapes=step.hidden_shapes,
            dtype=self._hidden_dtype,
            device=self._device,
            group=self._group,
        )

    def _schedule(
        self, stages: list[RaggedStage], num_microbatches: int
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """torch makes a schedule for one number of microbatches, in less than a millisecond for each of them."""
        # scale_grads: torch would divide by the number of microbatches; losses are divided by their own counts already.
        if self._section.pipeline_schedule == "interleaved_1f1b":
            return ScheduleInterleaved1F1B(list(stages), num_microbatches, _loss_as_passed, scale_grads=False)
        # With fewer microbatches than stages 1F1B never reaches its steady state, and is GPipe.
        steady = self._section.pipeline_schedule == "1f1b" and num_microbatches >= self._num_stages
        return (Schedule1F1B if steady else ScheduleGPipe)(
            stages[0], num_microbatches, _loss_as_passed, scale_grads=False
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """The inputs of a step; `place` is the index of a microbatch."""

    microbatches: Sequence[Microbatch]
    inputs: Sequence[Any]
    """`PolicyStage.prepare` of each microbatch."""
    hidden_shapes: Sequence[tuple[int, ...]]
    loss: MicrobatchLoss
    with_entropy: bool

    def run(self, stage: PolicyStage, hidden: Tensor | None, place: int) -> Tensor:
        """Hidden states for the next stage, or the loss []."""
        outputs = stage(hidden, self.inputs[place], with_entropy=self.with_entropy)
        return self.loss(outputs, self.microbatches[place]) if isinstance(outputs, PolicyOutputs) else outputs


def _loss_as_passed(loss: Tensor, target: Tensor) -> Tensor:
    return loss
