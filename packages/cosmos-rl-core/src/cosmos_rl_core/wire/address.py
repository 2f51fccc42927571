"""Addresses of the control channel: "tcp://host:port"."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from cosmos_rl_core.errors import UserError

_BACKLOG = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen or to connect."""

    host: str
    port: int = 0
    """0 lets the system choose when listening."""

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read an address. Raises `UserError` with the form that is understood."""
    parts = urlsplit(text)
    try:
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not parts.path:
            return Address(host=parts.hostname, port=parts.port)
    except ValueError as error:  # a port that is no number or above 65535
        raise UserError(f"address {text!r}: {error}; write tcp://host:port with a port of 0 to 65535") from error
    raise UserError(f"address {text!r} is not tcp://host:port")


def listen(address: Address, *, allow_remote: bool) -> socket.socket:
    """Return a bound, listening, non-blocking socket.

    Raises `UserError` for a busy port, for a host that is not this machine's, and for an address that other machines
    can reach unless `allow_remote`.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UserError(f"{address}: the host has no address ({error.strerror}); check its name") from error
    family, kind, protocol, _, endpoint = found[0]
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


def bound_address(listener: socket.socket, *, asked: Address) -> Address:
    """Return the address a listening socket really has: the system's port in place of 0."""
    return Address(host=asked.host, port=listener.getsockname()[1])
