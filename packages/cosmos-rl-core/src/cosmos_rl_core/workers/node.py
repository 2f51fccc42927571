"""Where a worker runs: whom it answers to, and which part of a replica of several ranks its machine holds."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.wire.address import Address, listen


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """What a worker needs to find its run."""

    controller: str
    """Address of the controller, such as tcp://127.0.0.1:4000."""
    role: str
    """policy or rollout."""
    name: str
    """Name of the replica, unique in the run."""
    token_file: Path
    threads: int | None = None
    """CPU threads of the process, or of each rank; None leaves torch's own choice."""

    def arguments(self) -> list[str]:
        """Return the words of a command line that say this."""
        words = ["--controller", self.controller, "--role", self.role, "--name", self.name]
        words += ["--token-file", str(self.token_file)]
        return words + ([] if self.threads is None else ["--threads", str(self.threads)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine's part of a replica."""

    index: int = 0
    """0 is the machine of the controller; rank 0 is there."""
    num_nodes: int = 1
    ranks_per_node: int = 1
    rendezvous: str = ""
    """host:port on machine 0 where the machines meet; empty for one machine."""
    collective_timeout_s: float = 600.0
    """Longest that ranks wait for one another in training."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_nodes:
            raise UserError(f"--node {self.index}: the replica has {self.num_nodes} machines, counted from 0")
        if self.num_nodes > 1 and not self.rendezvous:
            raise UserError("--rendezvous host:port is missing: where the replica's machines meet")

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole replica."""
        return self.num_nodes * self.ranks_per_node

    @property
    def is_local(self) -> bool:
        """Whether the replica's ranks reach one another over the loopback interface."""
        return self.rendezvous == "" or is_loopback(self.rendezvous.rpartition(":")[0])

    def own_address(self) -> str:
        """Return the address of a machine other than the first, as that one sees it; empty on the first."""
        if self.index == 0:
            return ""
        host, _, port = self.rendezvous.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), int(port)))  # sends nothing; it chooses the interface
            return probe.getsockname()[0]

    def arguments(self) -> list[str]:
        """Return the words of a command line that say this; none for a replica of one process."""
        if self.num_ranks == 1:
            return []
        words = ["--node", str(self.index), "--num-nodes", str(self.num_nodes)]
        words += ["--ranks-per-node", str(self.ranks_per_node)]
        words += ["--collective-timeout-s", f"{self.collective_timeout_s:g}"]
        return words + (["--rendezvous", self.rendezvous] if self.rendezvous else [])

    def commands_for_others(self, worker: WorkerAddress, *, python_path: tuple[str, ...]) -> list[str]:
        """Return what to run on each of the other machines, machine 1 first."""
        folders = [word for folder in python_path for word in ("--python-path", folder)]
        return [
            shlex.join(["cosmos-rl", "worker", *worker.arguments(), *replace(self, index=i).arguments(), *folders])
            for i in range(1, self.num_nodes)
        ]


def policy_node(section: PolicySection, *, bind: str) -> Node:
    """Return machine 0 of the policy replica; `bind` is the address the other machines reach it at.

    Raises UserError, with the numbers, for axes that do not multiply to the ranks there are, and for a `bind` that is
    not this machine's.
    """
    dims = ParallelDims.of(section.parallel, world_size=section.world_size)
    if dims.world_size % section.num_nodes:
        raise UserError(
            f"[policy] num_nodes = {section.num_nodes} does not divide the {dims.world_size} ranks of "
            f"[policy.parallel] ({dims.describe()})"
        )
    return Node(
        num_nodes=section.num_nodes,
        ranks_per_node=dims.world_size // section.num_nodes,
        rendezvous=f"{bind}:{_free_port(bind)}" if section.num_nodes > 1 else "",
        collective_timeout_s=section.collective_timeout_s,
    )


def is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]", "::1") or host.startswith("127.")


def _free_port(bind: str) -> int:
    """A port that nobody listens on at the moment. Raises UserError for an address that is not this machine's."""
    with listen(Address(host=bind), allow_remote=True) as probe:
        return probe.getsockname()[1]
