"""A vLLM model on the meta device, as any rank of any layout builds it, in one process.

with acting_as(rank, tp=4, pp=2):
    model = twin(vllm_config)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_GROUPS = ("_WORLD", "_TP", "_PP", "_DP", "_EP", "_EPLB", "_PCP", "_DCP")
"""vLLM's process groups, variables of vllm.distributed.parallel_state."""


class _Ranks:
    """Stand-in for a process group while a layer is built: number of ranks, and index of this one."""

    def __init__(self, index: int, count: int) -> None:
        self.rank_in_group = self.rank = self.local_rank = index
        self.world_size, self.ranks = count, list(range(count))
        self.is_first_rank, self.is_last_rank = index == 0, index == count - 1
        self.first_rank, self.last_rank = 0, count - 1
        self.device = torch.device("meta")
        self.device_communicator = self.mq_broadcaster = None
        self.cpu_group = self.device_group = _Size(index, count)


class _Size:
    def __init__(self, index: int, count: int) -> None:
        self._index, self._count = index, count

    def rank(self) -> int:
        return self._index

    def size(self) -> int:
        return self._count


@contextmanager
def acting_as(rank: int, *, tp: int = 1, pp: int = 1) -> Iterator[None]:
    """Build and trace models as on `rank` of a replica of pp x tp ranks, tensor parallelism innermost.

    For a process without vLLM workers: vLLM's process groups are replaced within the context.
    """
    from vllm.distributed import parallel_state

    if not 0 <= rank < tp * pp:
        raise ValueError(f"rank {rank} is not in a replica of {tp * pp} ranks")
    before = {name: vars(parallel_state)[name] for name in _GROUPS}
    one = _Ranks(0, 1)
    in_tp = _Ranks(rank % tp, tp)
    groups = dict.fromkeys(_GROUPS, one) | {
        "_WORLD": _Ranks(rank, tp * pp), "_TP": in_tp, "_EP": in_tp, "_EPLB": in_tp, "_PP": _Ranks(rank // tp, pp),
    }  # fmt: skip
    parallel_state.__dict__.update(groups)
    try:
        yield
    finally:
        parallel_state.__dict__.update(before)


def twin(vllm_config: VllmConfig) -> nn.Module:
    """Build the model of a configuration without memory under the current parallel state.

    Its parameters are as before loading. It affects neither a live model of the same configuration nor vLLM's caches.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = detached(vllm_config)
    ropes = rotary_embedding._ROPE_DICT  # shared between models: the twin's have no values
    kept = dict(ropes)
    ropes.clear()
    try:
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), _NoMemory():
            return initialize_model(config)
    finally:
        ropes.clear()
        ropes.update(kept)


class _NoMemory(TorchFunctionMode):
    """Makes `torch.empty` return meta tensors; tables computed by layers, such as expert maps, keep their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.empty_strided):
            kwargs.setdefault("device", "meta")
        return func(*args, **kwargs)


def detached(vllm_config: VllmConfig) -> VllmConfig:
    """Return the configuration with a separate register of layers: building a model writes to it."""
    config: Any = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    return config
