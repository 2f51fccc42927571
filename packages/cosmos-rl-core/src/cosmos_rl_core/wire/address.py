"""Addresses of the control channel: "tcp://host:port" and "unix:///path"."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cosmos_rl_core.errors import UserError

_BACKLOG = 4096
_LONGEST_UNIX_PATH = 107  # sockaddr_un.sun_path holds 108 bytes with the closing zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen or to connect: either `path` or `host` and `port`."""

    host: str = ""
    port: int = 0
    """0 lets the system choose when listening."""
    path: str = ""
    """Of a Unix socket."""

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read an address. Raises `UserError` with the two forms that are understood."""
    parts = urlsplit(text)
    try:
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not parts.path:
            return Address(host=parts.hostname, port=parts.port)
    except ValueError as error:  # a port that is no number or above 65535
        raise UserError(f"address {text!r}: {error}; write tcp://host:port with a port of 0 to 65535") from error
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        if len(os.fsencode(parts.path)) > _LONGEST_UNIX_PATH:
            raise UserError(
                f"address {text!r}: a Unix socket's path has at most {_LONGEST_UNIX_PATH} bytes; shorten it"
            )
        return Address(path=parts.path)
    raise UserError(f"address {text!r} is neither tcp://host:port nor unix:///path")


def listen(address: Address, *, allow_remote: bool) -> socket.socket:
    """Return a bound, listening, non-blocking socket.

    Raises `UserError` for a busy port or path, for a host that is not this machine's, and for an address that
    other machines can reach unless `allow_remote`.
    """
    listener = _bind_unix(address.path) if address.path else _bind_tcp(address, allow_remote=allow_remote)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def bound_address(listener: socket.socket, *, asked: Address) -> Address:
    """Return the address a listening socket really has: the system's port in place of 0."""
    if asked.path:
        return asked
    return Address(host=asked.host, port=listener.getsockname()[1])


def _bind_tcp(address: Address, *, allow_remote: bool) -> socket.socket:
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
    return listener


def _bind_unix(path: str) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on unix://{path}: {error.strerror}") from error
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket nobody listens on any more, as a killed process leaves it. Never anything else."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise UserError(f"unix://{path}: a file of that name is there and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
    raise UserError(f"unix://{path} is in use: stop what listens there, or choose another path")
