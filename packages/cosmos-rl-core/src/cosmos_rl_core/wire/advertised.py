"""Addresses that other machines of a run connect to.

    controller   listens on [run] bind       advertises --advertise > COSMOS_RL_ADVERTISE > bind > default route
    worker       listens on and advertises   COSMOS_RL_ADVERTISE > the interface that reaches the controller

A host name is never used by default: many images resolve their own to a loopback address.
"""

from __future__ import annotations

import ipaddress
import os
import socket

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.wire.listening import Address, is_loopback, parse_address

ADVERTISE = "COSMOS_RL_ADVERTISE"
"""Environment variable: this machine's host name or address, as the run's other machines reach it."""
_ELSEWHERE = {False: "192.0.2.1", True: "2001:db8::1"}
"""Addresses for documentation (RFC 5737, RFC 3849), by whether they are IPv6: they are on no local network."""


def route_address(host: str, port: int = 9) -> str:
    """Return the address of this machine's interface for packets to `host`; nothing is sent. Raises OSError."""
    (family, kind, protocol, _, endpoint), *_ = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(endpoint)
        return probe.getsockname()[0]


def worker_address(controller: str) -> str:
    """Return the address on which a worker of this machine listens; `controller` is tcp://host:port.

    Raises UserError if there is no route to the controller.
    """
    if chosen := os.environ.get(ADVERTISE, ""):
        return chosen
    target = parse_address(controller)
    try:
        return route_address(target.host, target.port)
    except OSError as error:
        raise UserError(
            f"cannot reach {target}: {error.strerror}; check its name, or set {ADVERTISE} to this machine's address"
        ) from error


def controller_address(bound: Address, *, advertise: str) -> Address:
    """Return the address that workers connect to. bound: the controller's listening address.

    advertise: "host" or "host:port"; empty: from the environment, else from `bound`. Raises UserError if `bound` is
    every interface and none of them has a route to other networks.
    """
    if chosen := advertise or os.environ.get(ADVERTISE, ""):
        return _parsed(chosen, port=bound.port)
    if not _is_wildcard(bound.host):
        return bound
    try:
        host = route_address(_ELSEWHERE[":" in bound.host])
    except OSError:
        host = ""
    if not host or is_loopback(host):
        raise UserError(
            f"[run] bind = {bound.host} listens on every interface, and none has a route to other networks: name the "
            f"address at which workers reach this machine by --advertise or {ADVERTISE}"
        )
    return Address(host=host, port=bound.port)


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _parsed(text: str, *, port: int) -> Address:
    """Parse "host", "host:port", "[v6]:port" or an IPv6 address; `port` is the default."""
    if text.count(":") > 1 and not text.startswith("["):
        return Address(host=text, port=port)
    address = parse_address(f"tcp://{text}" if ":" in text.rpartition("]")[2] else f"tcp://{text}:{port}")
    return address if address.port else Address(host=address.host, port=port)
