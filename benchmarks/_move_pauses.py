"""Figure 7: how long the trainer and the rollout stand still for a sync, and what a delta saves."""

from __future__ import annotations

import asyncio
from statistics import median

import torch
from _figures import Figure
from _move_speed import TOKEN, WARM_UP

from cosmos_rl_transfer.follower import Follower, Following, SampleModel, Synced
from cosmos_rl_transfer.publisher import Publisher

CHANGED = 100
"""One element of so many."""


def figures(mib: int, rounds: int) -> list[Figure]:
    """Return the trainer's stalls with the next step before and after the end of the transfer, and those of deltas."""
    return [*asyncio.run(_stalls(mib, rounds)), *asyncio.run(_deltas(mib, rounds))]


async def _stalls(mib: int, rounds: int) -> list[Figure]:
    model = SampleModel(mib)
    weights = model.tensors()
    publisher = Publisher(weights, token=TOKEN, transport="shm", patience_s=0.0)
    follower = Follower(Following(publisher.address, TOKEN, model, transport="shm"))
    later, sooner, transfers = [], [], []
    for version in range(2 * (WARM_UP + rounds)):
        published = (await publisher.publish(version, weights))["sync_s"]
        pulling = asyncio.ensure_future(asyncio.to_thread(follower.sync))
        if version % 2 == 0:  # the next optimizer step comes when the transfer is over
            transfers.append((await pulling).stage_s)
        else:  # or in the middle of it
            await asyncio.sleep(median(transfers) / 2)
        fenced = await publisher.fence()
        (later, sooner)[version % 2].append(published + fenced["sync_stall_s"])
        await pulling
    follower.close()
    await publisher.close()
    shares = [stall / whole for stall, whole in zip(later[WARM_UP:], transfers[WARM_UP:])]
    sooner_s, transfer_s = median(sooner[WARM_UP:]), median(transfers[WARM_UP:])
    return [
        Figure(figure="7 transfer", value=transfer_s, unit="s"),
        Figure(figure="7 stall, next step later", value=median(later[WARM_UP:]), unit="s"),
        Figure(
            figure="7 stall / transfer, next step later",
            value=100 * median(shares),
            unit="%",
            target="<= 5",
            note="stall: publish and fence, what optim_step waits for; transfer: what the subscriber needs to stage",
        ),
        Figure(
            figure="7 stall / transfer, next step in the middle",
            value=100 * sooner_s / transfer_s,
            unit="%",
            note="with no patience: the unread half is copied before the optimizer writes",
        ),
    ]


async def _deltas(mib: int, rounds: int) -> list[Figure]:
    """Change 1 % of bfloat16 weights a version, and send it whole and as a delta in turn."""
    model = SampleModel(mib, dtype="bfloat16")
    weights = model.tensors()
    changed = [torch.randperm(tensor.numel())[: tensor.numel() // CHANGED] for tensor in weights.values()]
    synced: dict[bool, list[Synced]] = {True: [], False: []}
    stalls: list[float] = []
    sides = {
        delta: Publisher(weights, token=TOKEN, transport="shm", delta=delta, full_every=10**6)
        for delta in (True, False)
    }
    followers = {
        delta: Follower(Following(publisher.address, TOKEN, model, transport="shm"))
        for delta, publisher in sides.items()
    }
    for version in range(WARM_UP + rounds):
        for tensor, places in zip(weights.values(), changed):
            tensor.view(torch.int16).view(-1)[places] ^= 1
        for delta, publisher in sides.items():
            published = (await publisher.publish(version, weights))["sync_s"]
            synced[delta].append(await asyncio.to_thread(followers[delta].sync))
            fenced = (await publisher.fence())["sync_stall_s"]
            stalls += [published + fenced] if delta else []
    for delta, publisher in sides.items():
        followers[delta].close()
        await publisher.close()
    pairs = list(zip(synced[True][WARM_UP:], synced[False][WARM_UP:]))
    pause_s, dense_s = (median(pair[side].apply_s for pair in pairs) for side in (0, 1))
    return [
        Figure(figure="7 pause, whole", value=dense_s, unit="s"),
        Figure(figure="7 pause, delta of 1 %", value=pause_s, unit="s"),
        Figure(
            figure="7 pause, delta / whole",
            value=100 * median(a.apply_s / b.apply_s for a, b in pairs),
            unit="%",
            target="<= 10",
            note="bfloat16, 1 % of the elements of every tensor changed, staged in the shadow; pause: apply",
        ),
        Figure(
            figure="7 bytes on the wire, delta / whole",
            value=100 * median(a.num_bytes / b.num_bytes for a, b in pairs),
            unit="%",
            target="<= 2.2",
        ),
        Figure(
            figure="7 stage, delta / whole",
            value=100 * median(a.stage_s / b.stage_s for a, b in pairs),
            unit="%",
            note="stage: pull and verify; finding what changed is the trainer's, beside training",
        ),
        Figure(figure="7 stall with deltas", value=median(stalls[WARM_UP:]), unit="s"),
    ]
