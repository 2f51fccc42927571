"""A stage of torch's pipeline whose microbatches have hidden states of different shapes.

torch makes the buffers of all microbatches before a step, from one example. Here the example is empty, and a buffer of
the right shape replaces it just before its receive, and is freed after the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import PipelineStage


class RaggedStage(PipelineStage):
    """Calls `run` in a schedule of torch, with the index of the microbatch in the step."""

    def __init__(
        self,
        run: Callable[[Tensor | None, int], Tensor],
        *,
        module: nn.Module,
        index: int,
        num_stages: int,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup,
    ) -> None:
        """Wrap a stage for one step.

        Args:
            run: (hidden states, None in the first stage; index of the microbatch in the step) -> hidden states; the
                loss [] in the last stage.
            module: holds the parameters. Of an FSDP root torch leaves the sums over ranks to the end of the step.
            shapes: of the hidden states between stages, for each microbatch.
            dtype: of the hidden states.
        """
        example = torch.empty(0, dtype=dtype, device=device, requires_grad=True)
        super().__init__(module, index, num_stages, device, input_args=example, output_args=example, group=group)
        self._runtime_validate = False  # under TORCH_DISTRIBUTED_DEBUG torch would compare all shapes with the example
        self._run = run
        self._shapes = shapes
        self._dtype = dtype
        self._place = 0

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        self._make_buffers(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        self._make_buffers(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._place = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *hidden: Tensor) -> Tensor:
        passed = self._run(hidden[0] if hidden else None, self._place)
        if self.is_last:
            return passed
        actual, expected = (tuple(passed.shape), passed.dtype), (self._shapes[self._place], self._dtype)
        assert actual == expected, f"stage {self.stage_index} gives {actual}, the next stage expects {expected}"
        return passed.contiguous()

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep the gradients of earlier steps: torch clears them after a trial run, and there was none."""

    def _make_buffers(self, received: Sequence[Any], place: int) -> None:
        for info in received:
            if not info.is_root_arg:
                info.buffer = torch.empty(self._shapes[place], dtype=self._dtype, device=self.device)
