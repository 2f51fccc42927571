"""Figure 7: the pauses of trainer and rollout for a sync, and the saving of a delta."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Literal

import torch
from _metrics import Figure
from _move_follower import Follower, Following, SampleModel, Synced
from _move_speed import TOKEN, WARM_UP
from torch import Tensor

from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_transfer.publish.publisher import Publisher

CHANGED = 100
"""One element of so many."""


def metrics(mib: int, rounds: int) -> list[Figure]:
    """Return the trainer's stalls with the next step before and after the end of the transfer, and those of deltas."""
    return [*asyncio.run(_stalls(mib, rounds)), *asyncio.run(_deltas(mib, rounds))]


async def _stalls(mib: int, rounds: int) -> list[Figure]:
    model = SampleModel(mib)
    weights = model.tensors()
    publisher = Publisher(weights, token=TOKEN, settings=SyncSection(transport="shm", patience_s=0.0))
    follower = Follower(Following(publisher.address, TOKEN, model, transport="shm"))
    later, sooner, transfers, copied = [], [], [], []
    for version in range(2 * (WARM_UP + rounds)):
        published = (await publisher.publish(version, weights))["sync_s"]
        pulling = asyncio.ensure_future(asyncio.to_thread(follower.sync))
        if version % 2 == 0:  # the next optimizer step comes when the transfer is over
            transfers.append((await pulling).stage_s)
        else:  # or in the middle of it
            await asyncio.sleep(min(transfers) / 2)
        fenced = await publisher.fence()
        (later, sooner)[version % 2].append(published + fenced["sync_stall_s"])
        copied += [fenced["sync_copied_bytes"]] if version % 2 else []
        await pulling
    follower.close()
    await publisher.close()
    shares = [stall / whole for stall, whole in zip(later[WARM_UP:], transfers[WARM_UP:])]
    sooner_s, transfer_s = median(sooner[WARM_UP:]), median(transfers[WARM_UP:])
    return [
        Figure(metric="7 transfer", value=transfer_s, unit="s"),
        Figure(metric="7 stall, next step later", value=median(later[WARM_UP:]), unit="s"),
        Figure(
            metric="7 stall / transfer, next step later",
            value=100 * median(shares),
            unit="%",
            target="<= 5",
            note="stall: publish and fence, what optim_step waits for; transfer: what the subscriber needs to stage",
        ),
        Figure(
            metric="7 stall / transfer, next step in the middle",
            value=100 * sooner_s / transfer_s,
            unit="%",
            note="with no patience: what is unread is copied before the optimizer writes",
        ),
        Figure(metric="7 copied then", value=100 * median(copied[WARM_UP:]) / (mib << 20), unit="% of the model"),
    ]


async def _deltas(mib: int, rounds: int) -> list[Figure]:
    """Change 1 % of bfloat16 weights a version; send it as a delta, whole, and whole in place, in turn."""
    model = SampleModel(mib, dtype="bfloat16")
    weights = model.tensors()
    changed = [torch.randperm(tensor.numel())[: tensor.numel() // CHANGED] for tensor in weights.values()]
    sides = {
        "delta": _Side(weights, model, delta=True, staging="shadow"),
        "whole": _Side(weights, model, delta=False, staging="shadow"),
        "in place": _Side(weights, model, delta=False, staging="in_place"),
        "in place over tcp": _Side(weights, model, delta=False, staging="in_place", transport="tcp"),
    }
    for version in range(WARM_UP + rounds):
        for tensor, places in zip(weights.values(), changed):
            tensor.view(torch.int16).view(-1)[places] ^= 1
        for side in sides.values():
            await side.sync(version, weights)
    for side in sides.values():
        await side.close()
    delta, whole, in_place, over_tcp = (side.synced[WARM_UP:] for side in sides.values())
    return [
        *(
            Figure(
                metric=f"7 pause, {name}", value=median(synced.apply_s for synced in side.synced[WARM_UP:]), unit="s"
            )
            for name, side in sides.items()
        ),
        Figure(
            metric="7 pause, delta / whole in place",
            value=_percent((a.apply_s, b.apply_s) for a, b in zip(delta, in_place)),
            unit="%",
            target="<= 10",
            note="bfloat16, 1 % of every tensor changed; pause: apply; in place it pulls and verifies too",
        ),
        Figure(
            metric="7 pause, delta / whole in place over tcp",
            value=_percent((a.apply_s, b.apply_s) for a, b in zip(delta, over_tcp)),
            unit="%",
            target="<= 10",
        ),
        Figure(
            metric="7 pause, delta / whole out of the shadow",
            value=_percent((a.apply_s, b.apply_s) for a, b in zip(delta, whole)),
            unit="%",
        ),
        Figure(
            metric="7 bytes on the wire, delta / whole",
            value=_percent((a.num_bytes, b.num_bytes) for a, b in zip(delta, whole)),
            unit="%",
            target="<= 2.2",
        ),
        Figure(
            metric="7 stage, delta / whole",
            value=_percent((a.stage_s, b.stage_s) for a, b in zip(delta, whole)),
            unit="%",
            note="stage over shared memory, where bytes cost little: it waits until the trainer knows what changed",
        ),
        Figure(metric="7 stall with deltas", value=median(sides["delta"].stalls[WARM_UP:]), unit="s"),
    ]


class _Side:
    """A publisher and its follower."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        model: SampleModel,
        *,
        delta: bool,
        staging: Literal["shadow", "in_place"],
        transport: str = "shm",
    ) -> None:
        self._publisher = Publisher(
            weights, token=TOKEN, settings=SyncSection(transport=transport, delta=delta, full_every=10**6)
        )
        following = Following(self._publisher.address, TOKEN, model, transport=transport, staging=staging)
        self._follower = Follower(following)
        self.synced: list[Synced] = []
        self.stalls: list[float] = []

    async def sync(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Publish, let it be taken over, and fence."""
        published = (await self._publisher.publish(version, weights))["sync_s"]
        self.synced.append(await asyncio.to_thread(self._follower.sync))
        self.stalls.append(published + (await self._publisher.fence())["sync_stall_s"])

    async def close(self) -> None:
        """End both."""
        self._follower.close()
        await self._publisher.close()


def _percent(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the median of the ratios."""
    return 100 * median(above / below for above, below in pairs)
