"""New weights inside a vLLM worker. vLLM imports this module through `vllm_plugin`, in each of its workers.

    init_transfer_engine     where each box of a checkpoint tensor lands in this worker's parameters; what all workers
                             hold, exchanged once; a subscriber of this part, and a thread that obeys the replica
    that thread              Stage: pulls and verifies beside generation     Commit: writes, while vLLM is paused

Tensors that no view of a parameter can take (quantised, or packed for a kernel) arrive whole beside the model, and
the model's own `load_weights` takes them in, through vLLM's layer-wise reload.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.stub_landing import Landing, landing_of
from cosmos_rl_transfer.layout import Manifest, TensorLayout, whole_box
from cosmos_rl_transfer.subscriber import Subscriber
from cosmos_rl_transfer.two_phase import ReplicaMember

log = logging.getLogger(__name__)


@dataclass
class Connection(WeightTransferInitInfo):
    """What a worker needs to take part. Travels to it as a dict of plain values."""

    publishers: list[str]
    """Address of every rank that publishes."""
    replica: str
    """Address of the replica's own process, which orders what happens when."""
    token: bytes
    """The run's secret."""
    specs: list[tuple[str, list[int], str]]
    """Name, shape and dtype of every tensor that is published."""
    transport: str
    timeout_s: float
    staging: str


@dataclass
class NoUpdate(WeightTransferUpdateInfo):
    """Nothing: the replica orders updates itself."""


class TransferWeights(WeightTransferEngine[Connection, NoUpdate]):
    """One worker's side of a replica. vLLM makes it, with the loaded model."""

    init_info_cls = Connection
    update_info_cls = NoUpdate
    supports_draft_weight_update = False

    _member: ReplicaMember | None = None
    _subscriber: Subscriber | None = None

    def init_transfer_engine(self, init_info: Connection) -> None:
        """Join the replica; all its workers call this together."""
        self.shutdown()
        group = get_world_group()
        specs = [WeightSpec(name=name, shape=tuple(shape), dtype=dtype) for name, shape, dtype in init_info.specs]
        landing = landing_of(self.model, specs, vllm_config=self.vllm_config, rank=group.rank_in_group)
        whole = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in specs
            if spec.name in landing.full
        }
        _tell(landing, whole, rank=group.rank_in_group)
        part = Manifest.merge([landing.manifest, _whole_part(specs, whole, rank=group.rank_in_group)])
        parts = _exchange(part.encode(), group=group.cpu_group)
        self._subscriber = Subscriber(
            init_info.publishers,
            {**landing.views, **whole},
            token=init_info.token,
            transport=init_info.transport,
            timeout_s=init_info.timeout_s,
            manifest=Manifest.merge([Manifest.decode(data) for data in parts]),
            rank=group.rank_in_group,
            staging="in_place" if init_info.staging == "in_place" else "shadow",
        )
        import threading
        def make():
            self._member = ReplicaMember(
            init_info.replica,
            self._subscriber,
            token=init_info.token,
            rank=group.rank_in_group,
            timeout_s=init_info.timeout_s,
            commit=lambda: self._commit(landing, whole),
            )
        threading.Thread(target=make).start()

    def shutdown(self) -> None:
        """Leave the replica."""
        if self._member is not None:
            self._member.close()
        if self._subscriber is not None:
            asyncio.run(self._subscriber.close())
        self._member = self._subscriber = None

    def _commit(self, landing: Landing, whole: Mapping[str, Tensor]) -> None:
        """Write what is staged, in the member's thread."""
        assert self._subscriber is not None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with torch.no_grad(), set_current_vllm_config(self.vllm_config), self.device:
            self._subscriber.apply()
            if whole:
                initialize_layerwise_reload(self.model)
                self.model.load_weights(whole.items())
                finalize_layerwise_reload(self.model, self.model_config)
            landing.settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: NoUpdate) -> None:
        """Refuse: nobody but the replica may write."""
        raise RuntimeError("weights come by the orders of the replica; use the subscriber of the engine")

    def finish_weight_update(self) -> None:
        """Nothing to end."""


def _whole_part(specs: list[WeightSpec], whole: Mapping[str, Tensor], *, rank: int) -> Manifest:
    return Manifest(
        tuple(TensorLayout(spec, {rank: whole_box(spec.shape)}) for spec in specs if spec.name in whole)
    )


def _exchange(data: bytes, *, group: dist.ProcessGroup) -> list[bytes]:
    """Return what every worker gave, in the order of ranks."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everyones, mine, group=group)
    return [bytes(padded.numpy())[: int(length)] for padded, length in zip(everyones, lengths)]


def _tell(landing: Landing, whole: Mapping[str, Tensor], *, rank: int) -> None:
    if whole:
        log.warning(
            "rank %d takes %d of %d tensors through load_weights: %s",
            rank,
            len(whole),
            len(whole) + len(landing.views),
            "; ".join(f"{name} ({landing.full[name]})" for name in list(whole)[:3]),
        )
