"""[run] placement = "external": workers are started by others, on any machine, and may join and leave at any time.

    cosmos-rl worker --role policy --run RUN_DIR
    cosmos-rl worker --role rollout --run RUN_DIR

The controller only prints the commands. A launcher of a cluster needs the same two.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, islice

from cosmos_rl_core.control.protocol import Role
from cosmos_rl_core.launch.placement import STOP_GRACE_S, Added, Launch, Workers
from cosmos_rl_core.wire.handshake import TOKEN_VARIABLE
from cosmos_rl_core.wire.tls import TLS_FILE, TLS_VARIABLE
from cosmos_rl_core.workers.node import Node, WorkerAddress, to_arguments

CHECK_S = 0.05
RENDEZVOUS_PORT = 29400
"""Port on machine 0 of a policy replica over several machines, as printed; torchrun's default."""


class ExternalWorkers(Workers):
    """Processes of others, each of which ends by itself. Any number of them may join."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def add(self, more: Mapping[Role, int]) -> Added:
        return Added(commands=list(commands(self._launch, more)))

    async def leave(self) -> None:
        """Wait until all workers have left, at most STOP_GRACE_S: those that stay lose the connection."""
        deadline = asyncio.get_running_loop().time() + STOP_GRACE_S
        peers = self._launch.controller.peers
        while peers.by_name and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(CHECK_S)

    def kill(self) -> None:
        """Forget the workers: they end with their connection."""
        self._launch.controller.peers.by_name.clear()


async def start_external(launch: Launch) -> ExternalWorkers:
    """Print the commands that start workers."""
    lines = [
        "workers join by, on any machine that shares this directory:",
        *(f"  {command}" for command in commands(launch, {"policy": 1, "rollout": 0 if launch.config.is_sft else 1})),
        f"on other machines by --controller {launch.address} instead of --run, with the content of "
        f"{launch.directory / 'token'} in the environment variable {TOKEN_VARIABLE}"
        + (f", and of {launch.directory / TLS_FILE} in {TLS_VARIABLE}" if launch.tls else ""),
    ]
    launch.observer.note("\n".join(lines))
    return ExternalWorkers(launch)


def commands(launch: Launch, more: Mapping[Role, int]) -> Iterator[str]:
    """Yield the command of each machine of so many policy replicas, and that of each rollout worker."""
    config, folders = launch.config, os.pathsep.join(launch.python_path)
    node, taken = launch.policy_node, launch.controller.ledger.members.by_name
    rendezvous = f"MACHINE_0:{RENDEZVOUS_PORT}" if node.num_nodes > 1 else ""
    threads = config.policy.threads and max(1, config.policy.threads // node.ranks_per_node)
    names = (f"policy-{i}" if i else "" for i in count() if f"policy-{i}" not in taken)  # policy-0 is the default
    for name in islice(names, more.get("policy", 0)):
        worker = WorkerAddress(role="policy", name=name, run=launch.directory, threads=threads)
        for index in range(node.num_nodes):
            yield _command(worker, replace(node, index=index, rendezvous=rendezvous, python_path=folders))
    for _ in range(more.get("rollout", 0)):
        worker = WorkerAddress(role="rollout", run=launch.directory, threads=config.rollout.threads)
        yield _command(worker, Node(python_path=folders))


def _command(worker: WorkerAddress, node: Node) -> str:
    return shlex.join(["cosmos-rl", "worker", *to_arguments(worker, node)])
