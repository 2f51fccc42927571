"""Weight updates inside a vLLM worker. vLLM imports this module through `vllm_plugin`, in each of its workers.

init_transfer_engine     maps checkpoint tensors to this worker's parameters; exchanges the parts of all workers once;
                         creates a subscriber of this part, and a member controlled by the replica
its thread               Stage: pulls and verifies during generation     Commit: writes, while vLLM is paused
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

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
from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_llm.engines.vllm.plugin import REFUSED
from cosmos_rl_llm.engines.vllm.weight_map.landing import Landing, landing_of, replica_manifest
from cosmos_rl_llm.engines.vllm.weight_map.slots import AdapterLanding, has_adapters
from cosmos_rl_transfer import Manifest, ReplicaMember, Subscriber
from cosmos_rl_transfer.pull.subscriber import prove

log = logging.getLogger(__name__)

NAMED = 3
"""Maximum number of tensors in a message."""
ACCEPTED = b"+"
"""A worker's message to the others if it accepts new weights; otherwise the message is the reason."""


@dataclass
class VllmConnection(WeightTransferInitInfo):
    """Connection parameters of a worker, sent as a dict of plain values."""

    publishers: str
    """Address of every publishing rank."""
    replica: str
    """Address of the replica's own process, which controls the updates."""
    token: bytes
    """The run's secret."""
    tls: str | None
    """Bundle of certificates (`wire.tls`), if connections are encrypted."""
    specs: list[tuple[str, list[int], str]]
    """Name, shape and dtype of every published tensor."""
    settings: dict[str, Any]
    """The section [sync]."""


@dataclass
class NoUpdate(WeightTransferUpdateInfo):
    """Empty: the replica starts updates itself."""


class TransferWeights(WeightTransferEngine[VllmConnection, NoUpdate]):
    """One worker's side of a replica. vLLM creates it, with the loaded model."""

    init_info_cls = VllmConnection
    update_info_cls = NoUpdate
    supports_draft_weight_update = False

    _member: ReplicaMember | None = None
    _subscriber: Subscriber | None = None

    def init_transfer_engine(self, init_info: VllmConnection) -> None:
        """Join the replica; all its workers call this together.

        Raises ValueError in all of them if the published tensors are insufficient for the model of one.
        """
        self.shutdown()
        group = get_world_group()
        specs = [WeightSpec(name=name, shape=tuple(shape), dtype=dtype) for name, shape, dtype in init_info.specs]
        landing = self._land(specs, group)
        _log_indirect(landing, rank=group.rank_in_group)
        parts = exchange(landing.manifest.encode(), group=group.cpu_group)
        tls = None if init_info.tls is None else Tls(init_info.tls)
        settings = SyncSection(**init_info.settings)
        subscriber = self._subscriber = Subscriber(
            init_info.publishers,
            landing.views,
            token=init_info.token,
            settings=settings,
            tls=tls,
            manifest=replica_manifest([Manifest.decode(part) for part in parts]),
            rank=group.rank_in_group,
        )
        self._member = ReplicaMember(
            init_info.replica,
            subscriber,
            token=init_info.token,
            tls=tls,
            rank=group.rank_in_group,
            timeout_s=settings.timeout_s,
            commit=lambda: self._commit(subscriber, landing),
        )

    def _land(self, specs: list[WeightSpec], group: GroupCoordinator) -> Landing | AdapterLanding:
        """Map the tensors. A worker that fails sends its error to the others, which would wait for its manifest."""
        landing, answer = None, ACCEPTED
        try:
            with set_current_vllm_config(self.vllm_config):
                land = AdapterLanding if has_adapters(specs) else landing_of
                landing = land(self.model, specs, vllm_config=self.vllm_config, rank=group.rank_in_group)
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

    def _commit(self, subscriber: Subscriber, landing: Landing | AdapterLanding) -> None:
        """Write the staged tensors, in the member's thread, and wait for the device."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)  # the current device is per thread
            torch.cuda.synchronize(self.device)  # vLLM's last pass is on another thread's stream and reads the weights
        with torch.no_grad(), self.device:
            subscriber.apply()
            landing.settle()
        if on_gpu:
            torch.cuda.synchronize(self.device)
        if isinstance(landing, AdapterLanding):
            prove(subscriber)  # no run has shown that vLLM leaves its slots alone; they are small

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: NoUpdate) -> None:
        """Refuse: only the replica may write."""
        raise RuntimeError("only the replica updates weights: use the subscriber of the engine")

    def finish_weight_update(self) -> None:
        """Nothing to finish."""


def exchange(data: bytes, *, group: dist.ProcessGroup) -> list[bytes]:
    """All-gather `data`: return the value of every rank, in rank order. Collective over the group."""
    count = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    everyones = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(everyones, padded, group=group)
    return [one.numpy().tobytes()[: int(length)] for one, length in zip(everyones, lengths)]


def _log_indirect(landing: Landing | AdapterLanding, *, rank: int) -> None:
    """Log the tensors that are not written directly into a parameter, and parameters without tensors."""
    if reloaded := landing.reloaded:
        some = "; ".join(f"{name}: {why}" for name, why in list(reloaded.items())[:NAMED])
        log.warning("rank %d: %d tensors go through load_weights (%s)", rank, len(reloaded), some)
    if landing.untouched:
        some = ", ".join(landing.untouched[:NAMED])
        log.warning("rank %d: nothing is published for %d parameters (%s)", rank, len(landing.untouched), some)
