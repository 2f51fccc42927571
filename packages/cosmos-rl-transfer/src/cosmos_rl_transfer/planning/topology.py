"""The location of ranks and the speed of their NICs, which balance a plan and break its ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DEFAULT_BYTES_PER_S = 50_000_000_000
"""400 Gb/s, a NIC a GPU."""
FAR = 3
"""Distance of ranks that share nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One rank's place in the network. An empty string has no neighbours."""

    host: str = ""
    island: str = ""
    """GPUs that reach one another over NVLink, on one host or several."""
    rail: str = ""
    """The leaf switch of its NIC."""
    egress: int = DEFAULT_BYTES_PER_S
    """Bytes a second out of its NIC."""
    ingress: int = DEFAULT_BYTES_PER_S
    """Bytes a second into its NIC."""

    def __post_init__(self) -> None:
        if self.egress < 1 or self.ingress < 1:
            raise ValueError(f"egress = {self.egress}, ingress = {self.ingress}: give bytes a second, at least 1")


_DEFAULT = Port()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The ports of both sides by rank; a rank left out has a default port."""

    sources: Mapping[int, Port] = field(default_factory=dict)
    targets: Mapping[int, Port] = field(default_factory=dict)

    @classmethod
    def from_hosts(cls, sources: Sequence[str], targets: Sequence[str], **port: int) -> Topology:
        """Describe ranks by the name of their host, rank 0 first; its GPUs are one island, one rail each.

        port: `egress` and `ingress` of every NIC.
        """
        return cls(sources=_ports(sources, port), targets=_ports(targets, port))

    def source(self, rank: int) -> Port:
        """Return the port of a trainer's rank."""
        return self.sources.get(rank, _DEFAULT)

    def target(self, rank: int) -> Port:
        """Return the port of a rollout's rank."""
        return self.targets.get(rank, _DEFAULT)

    def distance(self, source: int, target: int) -> int:
        """Return 0 on one host, 1 in one NVLink island, 2 on one rail, else `FAR`."""
        a, b = self.source(source), self.target(target)
        pairs = ((a.host, b.host), (a.island, b.island), (a.rail, b.rail))
        return next((i for i, (mine, other) in enumerate(pairs) if mine and mine == other), FAR)


def _ports(hosts: Sequence[str], speeds: Mapping[str, int]) -> dict[int, Port]:
    seen: dict[str, int] = {}
    ports = {}
    for rank, host in enumerate(hosts):
        seen[host] = seen.get(host, -1) + 1
        ports[rank] = Port(host=host, island=host, rail=str(seen[host]), **speeds)
    return ports
