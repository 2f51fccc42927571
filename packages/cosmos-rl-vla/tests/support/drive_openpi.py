"""Drives a simulator with the client of openpi-client, in an interpreter that has it.

python drive_openpi.py PORT SIMULATOR TASK
"""

from __future__ import annotations

import json
import sys

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from cosmos_rl_core import plugins
from cosmos_rl_vla.sims.base import GROUP

STEPS, CHUNK = 20, 4


def main() -> None:
    port, name, task = sys.argv[1:]
    simulator = plugins.load(GROUP, name)(image_size=64)
    client = WebsocketClientPolicy("127.0.0.1", int(port))
    policy = ActionChunkBroker(client, action_horizon=CHUNK)
    simulator.reset(task, 0)
    first, error = simulator.observe().state, ""
    for step in range(STEPS):
        seen = simulator.observe()
        images = {f"observation/{camera}": image for camera, image in seen.images.items()}
        sent = {**images, "observation/state": seen.state, "prompt": simulator.instruction(task)}
        if step == 2 * CHUNK:
            try:
                client.infer({**sent, "observation/state": seen.state[:-1]})
            except RuntimeError as refused:
                error = str(refused)
        simulator.step(policy.infer(sent)["actions"])
    moved = float(np.abs(simulator.observe().state - first).max())
    print(json.dumps({"steps": STEPS, "moved": moved > 1e-3, "error": error}))
    simulator.close()


if __name__ == "__main__":
    main()
