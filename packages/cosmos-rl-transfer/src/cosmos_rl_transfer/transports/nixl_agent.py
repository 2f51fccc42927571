"""This process's NIXL agents: for publishing and subscribing, in host memory and on a GPU; each is shared by all ends.

An agent takes half a second to create, so ends share it; it is freed with its last user. Peers are reference-counted
too: two inlets may read from one publisher. Memory may be registered several times.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch

from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.weight_sync import NIXL_BUILDS
from cosmos_rl_transfer.errors import PeerLost
from cosmos_rl_transfer.transports.base import Inlet, TransportUnavailable
from cosmos_rl_transfer.wire.link import Link

_PROGRESS_US = 1000
"""Sleep of NIXL's idle thread, in microseconds. The default of its Python wrapper is 0, which keeps a core busy."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 1e-3

Role = Literal["publisher", "subscriber", "publisher-vram", "subscriber-vram"]
"""Those of a GPU have agents of their own: memory that cannot be registered spoils an agent (`NixlAgent.refused`)."""
Region = tuple[int, int]
"""Address and number of bytes."""
Move = tuple[int, int, int]
"""Address at the peer, address here, number of bytes."""


@dataclass(frozen=True, slots=True)
class Space:
    """The memory that addresses belong to."""

    segment: str
    """NIXL's name of its kind."""
    device: int
    """Index of the GPU; 0 for host memory."""


HOST = Space("DRAM_SEG", 0)


@dataclass(slots=True, eq=False)
class NixlPeer:
    """An agent of another process, readable from this one."""

    name: str
    users: int = 1
    turn: threading.RLock = field(default_factory=threading.RLock)
    """Locked while reading: the peer's metadata must not be replaced meanwhile."""


class NixlAgent:
    """A NIXL agent with the UCX back end. All methods may be called from any thread."""

    def __init__(self, bindings: Any, role: Role) -> None:
        """Start it. Raises TransportUnavailable if UCX does not start."""
        self._nixl = bindings
        kinds = (getattr(bindings, name) for name in dir(bindings) if name.endswith("Error"))
        self._errors: tuple[type[Exception], ...] = tuple(kinds)
        config = bindings.nixlAgentConfig()
        # a reader's own calls progress its transfers; a further thread would contend for their lock
        config.useProgThread = role.startswith("publisher")
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _PROGRESS_US
        try:
            self._agent = bindings.nixlAgent(f"{role}-{os.getpid()}-{os.urandom(8).hex()}", config)
            self._agent.createBackend("UCX", {})
        except self._errors as error:
            raise TransportUnavailable(f"NIXL's UCX back end does not start: {error}") from error
        self.refused = False
        """Whether a registration failed: peers cannot load the metadata that NIXL 1.5 writes afterwards."""
        self._lock = threading.Lock()
        self._peers: dict[str, NixlPeer] = {}

    def register(self, regions: Sequence[Region], space: Space = HOST) -> None:
        """Register memory for reads by peers or into it. Raises TransportUnavailable."""
        try:
            self._agent.registerMem(self._registrations(regions, space), [])
        except self._errors as error:
            self.refused = True
            raise TransportUnavailable(f"NIXL cannot register {len(regions)} pieces of memory: {error}") from error

    def deregister(self, regions: Sequence[Region], space: Space = HOST) -> None:
        """Undo `register`."""
        self._agent.deregisterMem(self._registrations(regions, space), [])

    def metadata(self) -> bytes:
        """Return the connection data and registered memory for peers."""
        return self._agent.getLocalMD()

    def meet(self, metadata: bytes) -> NixlPeer:
        """Load a peer's metadata. Raises TransportUnavailable."""
        with self._lock:
            try:
                name = self._agent.loadRemoteMD(metadata).decode()
            except self._errors as error:
                raise TransportUnavailable(f"NIXL cannot reach the publisher: {error}") from error
            if name in self._peers:
                self._peers[name].users += 1
            else:
                self._peers[name] = NixlPeer(name)
            return self._peers[name]

    def relearn(self, peer: NixlPeer, metadata: bytes) -> None:
        """Replace a peer's metadata."""
        with peer.turn:
            self._agent.invalidateRemoteMD(peer.name)
            self._agent.loadRemoteMD(metadata)

    def leave(self, peer: NixlPeer, *, lost: bool = False) -> None:
        """Remove a peer with its last user, or at once if it is lost: that ends its pending transfers."""
        with self._lock:
            peer.users -= 1
            if self._peers.get(peer.name) is peer and (lost or not peer.users):
                del self._peers[peer.name]
                with suppress(*self._errors):  # NIXL removes a dead peer by itself
                    self._agent.invalidateRemoteMD(peer.name)

    def read(
        self,
        peer: NixlPeer,
        moves: Sequence[Move],
        *,
        link: Link,
        timeout_s: float,
        remote_space: Space = HOST,
        here: Space = HOST,
    ) -> None:
        """Copy a peer's registered memory into ours and wait for the end without spinning.

        remote_space, here: the kind of memory, host or GPU, at the peer and on this side. Raises PeerLost if the peer
        is lost, `link` to it is closed or `timeout_s` is over.
        """
        targets = self._descriptors([(local, size) for _, local, size in moves], here)
        sources = self._descriptors([(remote, size) for remote, _, size in moves], remote_space)
        with peer.turn:
            try:
                request = self._agent.createXferReq(self._nixl.NIXL_READ, targets, sources, peer.name, b"", [])
                try:
                    self._wait(request, link, timeout_s)
                finally:
                    self._release(request)
            except self._errors as error:
                raise PeerLost(f"the publisher cannot be read: {error}") from error

    def _wait(self, request: int, link: Link, timeout_s: float) -> None:
        deadline, pause = time.monotonic() + timeout_s, _FIRST_WAIT_S
        state = self._agent.postXferReq(request, b"")
        while state == self._nixl.NIXL_IN_PROG:
            if time.monotonic() > deadline:
                raise PeerLost(f"the publisher's bytes did not arrive within {timeout_s:g} s")
            link.check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)
            state = self._agent.getXferStatus(request)
        if state != self._nixl.NIXL_SUCCESS:
            raise PeerLost(f"the publisher cannot be read: {state}")

    def _release(self, request: int) -> None:
        with suppress(*self._errors):  # a transfer that cannot be cancelled ends when the peer is removed
            self._agent.releaseXferReq(request)

    def _registrations(self, regions: Sequence[Region], space: Space) -> Any:
        segment = getattr(self._nixl, space.segment)
        return self._nixl.nixlRegDList(segment, [(address, size, space.device, "") for address, size in regions])

    def _descriptors(self, regions: Sequence[Region], space: Space) -> Any:
        segment = getattr(self._nixl, space.segment)
        return self._nixl.nixlXferDList(segment, [(address, size, space.device) for address, size in regions])


class NixlInlet(Inlet):
    """Reads the memory of one publisher's agent."""

    over_link = False

    def __init__(self, agent: NixlAgent, link: Link) -> None:
        self._agent, self._link = agent, link
        self._peer: NixlPeer | None = None

    def _read(self, moves: Sequence[Move], *, timeout_s: float, remote_space: Space = HOST, here: Space = HOST) -> None:
        """As `NixlAgent.read`."""
        if self._peer is None:
            raise PeerLost("the publisher was lost before")
        try:
            self._agent.read(
                self._peer, moves, link=self._link, timeout_s=timeout_s, remote_space=remote_space, here=here
            )
        except PeerLost:
            self._leave(lost=True)  # nothing may be written to the caller's memory any more
            raise

    def _leave(self, *, lost: bool = False) -> None:
        if self._peer is not None:
            self._agent.leave(self._peer, lost=lost)
            self._peer = None


_agents: WeakValueDictionary[tuple[int, str], NixlAgent] = WeakValueDictionary()
_agents_lock = threading.Lock()


def agent_of(role: Role) -> NixlAgent:
    """Return this process's agent for a role. Raises TransportUnavailable if NIXL is not installed."""
    key = (os.getpid(), role)  # an agent's threads do not survive a fork
    with _agents_lock:
        agent = _agents.get(key)
        if agent is None or agent.refused:
            _agents[key] = agent = NixlAgent(_bindings(), role)
        return agent


def install_nixl() -> str:
    """Return the command that installs NIXL for the CUDA generation of this torch."""
    extra = _builds()[0] == "nixl_cu13"
    return pip_install("cosmos-rl-transfer[nixl]" if extra else "nixl-cu12>=1.5.1")


def _builds() -> list[str]:
    """The packages with bindings, that for torch's CUDA first: some of NIXL's back ends need libcudart of theirs."""
    return sorted(NIXL_BUILDS, reverse=not (torch.version.cuda or "").startswith("12."))


def _bindings() -> Any:
    """Load the bindings alone: importing NIXL's package closes every logging handler of the process."""
    reasons = []
    for package in _builds():
        name = f"{package}._bindings"
        if name in sys.modules:
            return sys.modules[name]
        package_spec = find_spec(package)
        spec = package_spec and PathFinder.find_spec(name, package_spec.submodule_search_locations)
        if spec is None or spec.loader is None:
            continue
        try:
            module = sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            sys.modules.pop(name, None)
            reasons.append(f"{package} cannot be loaded: {error}")
            continue
        return module
    raise TransportUnavailable("; ".join(reasons) or f"NIXL is not installed; {install_nixl()}")
