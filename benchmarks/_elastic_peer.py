"""torchft's side of elastic.py, in an environment of its own: one process a replica, or the lighthouse.

    python _elastic_peer.py lighthouse MIN_REPLICAS
    python _elastic_peer.py replica NAME LIGHTHOUSE OUT

The lighthouse prints its address. A replica appends one JSON line per committed step to OUT: time, step, participants.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import _elastic_toy as toy

JOIN_TIMEOUT_MS = 10_000
"""Of torchft's README. The heartbeat's limit stays at torchft's default of 5 s."""
TIMEOUT = timedelta(seconds=30)
INIT_TIMEOUT = timedelta(seconds=120)


def serve_lighthouse(min_replicas: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=JOIN_TIMEOUT_MS)
    port = server.address().rpartition(":")[2].rstrip("/")
    print(f"http://127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    server.shutdown()


def train(name: str, lighthouse: str, out: Path) -> None:
    import torch
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    network = toy.network(torch)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, object]:
        return {"network": network.state_dict(), "optimizer": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=toy.REPLICAS - 1,
        timeout=TIMEOUT,
        quorum_timeout=INIT_TIMEOUT,
        connect_timeout=INIT_TIMEOUT,
        replica_id=name,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, network)
    optimizer = Optimizer(manager, torch.optim.AdamW(network.parameters(), lr=toy.LEARNING_RATE))
    contexts, places, actions = toy.batch(torch, rows=toy.ROWS // toy.REPLICAS)
    with out.open("a") as file:
        while True:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(contexts, places), actions).backward()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                line = {
                    "time": time.monotonic(),
                    "step": manager.current_step(),
                    "participants": manager.num_participants(),
                }
                file.write(json.dumps(line) + "\n")
                file.flush()


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        serve_lighthouse(int(sys.argv[2]))
    else:
        train(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
