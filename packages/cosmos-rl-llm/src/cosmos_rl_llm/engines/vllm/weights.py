"""New weights inside a vLLM worker. vLLM imports this module through `vllm_plugin`, in each of its workers.

init_transfer_engine     where each box of a checkpoint tensor lands in this worker's parameters; what all workers
                         hold, exchanged once; a subscriber of this part, and a member that obeys the replica
its thread               Stage: pulls and verifies beside generation     Commit: writes, while vLLM is paused
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator, get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.engines.vllm.plugin import REFUSED
from cosmos_rl_llm.engines.vllm.weight_map.landing import Landing, landing_of, replica_manifest
from cosmos_rl_transfer import Manifest, ReplicaMember, Subscriber

log = logging.getLogger(__name__)

NAMED = 3
"""Tensors that a message names at most."""
ACCEPTED = b"+"
"""A worker's answer to the others where new weights can reach it; else the answer is why not."""


@dataclass
class Connection(WeightTransferInitInfo):
    """What a worker needs to take part. Travels to it as a dict of plain values."""

    publishers: str
    """Address of every rank that publishes."""
    replica: str
    """Address of the replica's own process, which orders what happens when."""
    token: bytes
    """The run's secret."""
    specs: list[tuple[str, list[int], str]]
    """Name, shape and dtype of every tensor that is published."""
    transport: str
    timeout_s: float
    staging: Literal["shadow", "in_place"]


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
        """Join the replica; all its workers call this together.

        Raises ValueError, in all of them, where what is published cannot make up the model of one.
        """
        self.shutdown()
        group = get_world_group()
        specs = [WeightSpec(name=name, shape=tuple(shape), dtype=dtype) for name, shape, dtype in init_info.specs]
        landing = self._land(specs, group)
        _tell(landing, rank=group.rank_in_group)
        parts = exchange(landing.manifest.encode(), group=group.cpu_group)
        subscriber = self._subscriber = Subscriber(
            init_info.publishers,
            landing.views,
            token=init_info.token,
            transport=init_info.transport,
            timeout_s=init_info.timeout_s,
            manifest=replica_manifest([Manifest.decode(part) for part in parts]),
            rank=group.rank_in_group,
            staging=init_info.staging,
        )
        self._member = ReplicaMember(
            init_info.replica,
            subscriber,
            token=init_info.token,
            rank=group.rank_in_group,
            timeout_s=init_info.timeout_s,
            commit=lambda: self._commit(subscriber, landing),
        )

    def _land(self, specs: list[WeightSpec], group: GroupCoordinator) -> Landing:
        """Find where the tensors land. A worker that cannot tells the others, which would wait for its manifest."""
        landing, answer = None, ACCEPTED
        try:
            with set_current_vllm_config(self.vllm_config):
                landing = landing_of(self.model, specs, vllm_config=self.vllm_config, rank=group.rank_in_group)
        except ValueError as error:
            answer = str(error).encode()
        refused = [other.decode() for other in exchange(answer, group=group.cpu_group) if other != ACCEPTED]
        if landing is None or refused:
            raise ValueError(REFUSED + refused[0])
        return landing

    def shutdown(self) -> None:
        """Leave the replica."""
        if self._member is not None:
            self._member.close()
        if self._subscriber is not None:
            asyncio.run(self._subscriber.close())
        self._member = self._subscriber = None

    def _commit(self, subscriber: Subscriber, landing: Landing) -> None:
        """Write what is staged, in the member's thread, and wait until the device has it."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)  # each thread has its own
        with torch.no_grad(), self.device:
            subscriber.apply()
            landing.settle()
        if on_gpu:
            torch.cuda.synchronize(self.device)

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: NoUpdate) -> None:
        """Refuse: nobody but the replica may write."""
        raise RuntimeError("weights come by the orders of the replica: use the subscriber of the engine")

    def finish_weight_update(self) -> None:
        """Nothing to end."""


def exchange(data: bytes, *, group: dist.ProcessGroup) -> list[bytes]:
    """Return what every rank of the group gave, in the order of ranks. All of them call it at the same time."""
    count = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    everyones = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(everyones, padded, group=group)
    return [one.numpy().tobytes()[: int(length)] for one, length in zip(everyones, lengths)]


def _tell(landing: Landing, *, rank: int) -> None:
    """Log what does not go straight into a parameter."""
    if reloaded := landing.reloaded:
        some = "; ".join(f"{name}: {why}" for name, why in list(reloaded.items())[:NAMED])
        log.warning("rank %d: %d tensors go through load_weights (%s)", rank, len(reloaded), some)
    if landing.untouched:
        some = ", ".join(landing.untouched[:NAMED])
        log.warning("rank %d: nothing is published for %d parameters (%s)", rank, len(landing.untouched), some)
