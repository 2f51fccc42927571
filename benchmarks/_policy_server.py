"""A server of `policy_server.py` in a process of its own: ours, or a bare loop of the same messages.

    python benchmarks/_policy_server.py ours|bare

Prints its port. The policy is a pause of PASS_S, as of a GPU: the processor is free meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import uvloop
from websockets.asyncio.server import ServerConnection, serve

from cosmos_rl_core.wire.listening import Address, listen
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.serving.batching import RobotBatcher
from cosmos_rl_vla.serving.observations import ObservationLayout, RobotObservation
from cosmos_rl_vla.serving.openpi import openpi_server, packed
from cosmos_rl_vla.serving.served import ActionRequest

PASS_S = 0.02
CAMERAS, SIDE, STATE, ACTIONS, HORIZON = ("base", "wrist"), 224, 8, 7, 50


class PausingPolicy:
    """As `ServedPolicy`; a pass takes PASS_S whatever the number of robots."""

    name = "pause"
    layout = ObservationLayout(
        cameras=CAMERAS,
        image_size=(SIDE, SIDE),
        state_keys=("state",),
        state_dim=STATE,
        action_dim=ACTIONS,
        horizon=HORIZON,
        stats=ActionStats.unit(ACTIONS),
    )

    def admit(self, observation: RobotObservation, *, seed: int, place: int) -> ActionRequest:
        return ActionRequest(observation=observation, state=observation.state, seed=seed, place=place)

    def act(self, requests: Sequence[ActionRequest]) -> list[np.ndarray]:
        time.sleep(PASS_S)
        return [np.zeros((HORIZON, ACTIONS), np.float32) for _ in requests]


async def ours() -> None:
    with ThreadPoolExecutor(1) as compute, listen(Address(host="127.0.0.1"), allow_remote=False) as listener:
        batcher = RobotBatcher(PausingPolicy(), compute=compute, max_batch=16, log=print)  # pyright: ignore[reportArgumentType]
        passes = asyncio.create_task(batcher.run())
        async with openpi_server(batcher, listener, token="", say=lambda _: None):
            print(listener.getsockname()[1], flush=True)
            await passes


async def bare() -> None:
    timing = {"infer_ms": 1000 * PASS_S, "wait_ms": 0.0}
    answer = packed({"actions": np.zeros((HORIZON, ACTIONS), np.float32), "server_timing": timing})

    async def echo(connection: ServerConnection) -> None:
        await connection.send(packed({}))
        async for _ in connection:
            await asyncio.sleep(PASS_S)
            await connection.send(answer)

    async with serve(echo, "127.0.0.1", 0, compression=None, max_size=None) as server:
        print(next(iter(server.sockets)).getsockname()[1], flush=True)
        await server.wait_closed()


if __name__ == "__main__":
    uvloop.run({"ours": ours, "bare": bare}[sys.argv[1]]())
