"""Addresses and listening sockets. Unauthenticated peers can exhaust neither the descriptors nor the log of a run.

raise_descriptor_limit()                          at the start of a process that listens
listener = listen(parse_address("tcp://127.0.0.1:0"), allow_remote=False)
complain = SeldomLog(log.warning)                 the same complaint once a minute
unauthenticated = UnauthenticatedConnections(256, complain=complain)     a bounded number of unauthenticated connections
await accept_forever(listener, admit, ...)        continues after errors of accept()
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import resource
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, KeysView
from dataclasses import dataclass
from urllib.parse import urlsplit

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.clock import RunningClock

log = logging.getLogger(__name__)

COMPLAIN_EVERY_S = 60.0
RETRY_S = 0.1
"""Pause after an accept() without a free descriptor or memory."""
GRACE_S = 0.25
"""Minimum time that an unauthenticated connection stays while others wait for room: a handshake takes milliseconds."""
SLICE_S = 0.1
"""Longest wait for room at a time, of which a process that did not run leaves out the rest."""
_FEW_DESCRIPTORS = 1024
_PER_REPLICA = 2
"""Open files of a controller per replica: the connection, and a local process' descriptor."""
_BESIDE_REPLICAS = 512
"""Open files of a controller besides: connections before their handshake, the journal, logs."""
_BACKLOG = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A TCP endpoint, written "tcp://host:port"."""

    host: str
    port: int = 0
    """0 lets the system choose when listening."""

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse an address. Raises `UserError` with the accepted form."""
    parts = urlsplit(text)
    try:
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not parts.path:
            return Address(host=parts.hostname, port=parts.port)
    except ValueError as error:  # a port that is no number or above 65535
        raise UserError(f"address {text!r}: {error}; write tcp://host:port with a port of 0 to 65535") from error
    raise UserError(f"address {text!r} is not tcp://host:port")


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's loopback interface; False for any other name."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listen(address: Address, *, allow_remote: bool) -> socket.socket:
    """Return a bound, listening, non-blocking socket.

    Raises `UserError` for a busy port, for a host that is not this machine's, and for an address that other machines
    can reach unless `allow_remote`.
    """
    try:
        candidates = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UserError(f"{address}: the host has no address ({error.strerror}); check its name") from error
    family, kind, protocol, _, endpoint = candidates[0]
    if not allow_remote and not ipaddress.ip_address(endpoint[0]).is_loopback:
        raise UserError(
            f"{address} can be reached from other machines; listen on 127.0.0.1, or pass allow_remote=True "
            "where the network between the machines is trusted (frames are authenticated, not encrypted)"
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(endpoint)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {address.port} on {address.host} is in use: stop what listens there, or ask for "
                "port 0 (any free one)"
            ) from error
        raise UserError(f"cannot listen on {address}: {error.strerror}") from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def bound_address(listener: socket.socket, *, requested: Address) -> Address:
    """Return the address a listening socket really has: the system's port in place of 0."""
    return Address(host=requested.host, port=listener.getsockname()[1])


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files to the hard one and return it. Warns if it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError) as error:  # macOS has a lower limit of its own
            log.info("the limit of open files stays at %d: %s", soft, error)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    if soft < _FEW_DESCRIPTORS:
        log.warning("this process may open %d files: raise the hard limit, `ulimit -Hn`, to 4096 or more", soft)
    return soft


def descriptor_shortage(replicas: int, *, allowed: int) -> str:
    """Return a sentence if a controller of that many replicas may run out of open files, else an empty text."""
    needed = _PER_REPLICA * replicas + _BESIDE_REPLICAS
    if allowed >= needed:
        return ""
    return (
        f"{replicas} replicas take up to {needed} open files in the controller, which may open {allowed}: raise the "
        "hard limit, `ulimit -Hn`, or connections will be refused"
    )


class SeldomLog:
    """Logs the same complaint at most once a minute, with the number of repetitions. Thread-safe."""

    def __init__(
        self,
        log: Callable[[str], None],
        *,
        every_s: float = COMPLAIN_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._every_s, self._clock = log, every_s, clock
        self._guard = threading.Lock()
        self._passed: dict[str, tuple[float, int]] = {}
        """By complaint: time of its last line, and number of repetitions since."""

    def __call__(self, complaint: str, detail: str = "") -> None:
        """Log a complaint, or count it. It is stored, so it must not name the peer, as `detail` may."""
        missed = self.due(complaint)
        if missed is not None:
            repeated = f" ({missed} times more since it was last reported)" if missed else ""
            self._log(f"{complaint}{detail}{repeated}")

    def due(self, complaint: str) -> int | None:
        """Return the number of repetitions since the last line, if a line is due; otherwise None, and count it."""
        with self._guard:
            now = self._clock()
            passed_at, missed = self._passed.get(complaint, (-math.inf, 0))
            silent = now - passed_at < self._every_s
            self._passed[complaint] = (passed_at, missed + 1) if silent else (now, 0)
        return None if silent else missed


class SeldomFilter(logging.Filter):
    """Lets the same message of a logger through once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = SeldomLog(log.warning)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is due."""
        return self._seldom.due(record.getMessage()) is not None


class UnauthenticatedConnections:
    """At most `most` unauthenticated connections: a new one closes the oldest. Not thread-safe: for one event loop."""

    def __init__(self, most: int, *, complain: Callable[[str], None], grace_s: float = GRACE_S) -> None:
        self._most, self._complain, self._grace_s = most, complain, grace_s
        self._clock = RunningClock(time.monotonic, longest_s=SLICE_S)
        self._since: dict[object, tuple[float, Callable[[], None]]] = {}
        """Oldest first: when it was accepted, and the function that closes it."""
        self._authenticated_at = -math.inf
        self._fewer = asyncio.Event()

    def __contains__(self, key: object) -> bool:
        return key in self._since

    def __len__(self) -> int:
        return len(self._since)

    def keys(self) -> KeysView[object]:
        """Return the counted connections."""
        return self._since.keys()

    def age(self, key: object) -> float:
        """Return the seconds since a connection was counted."""
        return self._clock() - self._since[key][0]

    def enter(self, key: object, *, drop: Callable[[], None]) -> None:
        """Count a connection; `drop` closes it."""
        self._since[key] = (self._clock(), drop)

    def leave(self, key: object) -> None:
        """Stop counting a connection: it is authenticated, or gone."""
        if self._since.pop(key, None) is not None:
            self._fewer.set()

    def authenticate(self, key: object) -> None:
        """Stop counting a connection whose peer has the token."""
        self._authenticated_at = self._clock()
        self.leave(key)

    async def make_room(self) -> None:
        """Return once there is room for one more; if necessary the oldest is closed.

        It is closed once it is `grace_s` old and no other was authenticated for that time: while thousands of workers
        connect at once, each of them may have to wait for the others, and for this process on a busy machine.
        """
        while len(self._since) >= self._most:
            key, (since, drop) = next(iter(self._since.items()))
            left_s = max(since, self._authenticated_at) + self._grace_s - self._clock()
            if left_s <= 0:
                self._complain(f"more than {self._most} idle connections: the oldest are closed")
                del self._since[key]
                drop()
                return
            self._fewer.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, SLICE_S)):
                    await self._fewer.wait()


async def accept_forever(
    listener: socket.socket,
    admit: Callable[[socket.socket], Awaitable[object]],
    *,
    complain: Callable[[str], None],
) -> None:
    """Await `admit` for each connection to a non-blocking listening socket, until cancelled.

    asyncio's own servers log every failed accept() about a hundred times and multiply their attempts.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            complain(f"a connection cannot be accepted: {error.strerror}")
            if error.errno != errno.ECONNABORTED:
                await asyncio.sleep(RETRY_S)
            continue
        try:
            await admit(connection)
        except asyncio.CancelledError:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            complain(f"a connection cannot be served: {error.strerror}")
