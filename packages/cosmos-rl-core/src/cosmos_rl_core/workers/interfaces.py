"""The network interface of gloo, NCCL and UCX.

    GLOO_SOCKET_IFNAME   the loopback interface for ranks of one machine, else as the next
    NCCL_SOCKET_IFNAME   the interface that reaches the first machine of the policy replica, else the controller
    UCX_NET_DEVICES      the same, without RDMA devices: with them UCX chooses

Variables that the user has set stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
import time
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import rdma_devices
from cosmos_rl_core.wire.advertised import worker_address
from cosmos_rl_core.wire.listening import is_loopback, parse_address
from cosmos_rl_core.workers.node import Node

SIOCGIFADDR = 0x8915
"""Linux request for the IPv4 address of an interface: netdevice(7)."""
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
RETRY_S = 0.5
LIBRARIES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME", "ucx": "UCX_NET_DEVICES"}


def use_interface(
    node: Node, environment: MutableMapping[str, str], *, controller: str, wait_s: float = 0.0, join_s: float = 0.0
) -> None:
    """Set the variables, and write them to this process's log if the run has several machines.

    controller: its address, whose name may take wait_s to resolve. join_s: the same for the first machine of a replica
    over several ones: a platform's DNS has the name of a machine once it runs. Raises UserError after join_s. Without
    a choice gloo resolves the host name, which is 127.0.1.1 in many images.
    """
    if node.is_local and node.num_ranks > 1:
        environment.setdefault(LIBRARIES["gloo"], "lo")
    if node.is_local and is_loopback(parse_address(controller).host):
        return
    own = ""
    with contextlib.suppress(UserError):  # the process that connects to the controller reports it
        own = _when_reached(partial(worker_address, controller), controller, wait_s=wait_s)
    if not node.is_local:
        own = _when_reached(node.address_among_machines, node.rendezvous, wait_s=join_s)
    if not own:
        return
    if name := interface_of(own):
        environment.setdefault(LIBRARIES["gloo"], name)
        environment.setdefault(LIBRARIES["nccl"], f"={name}")  # without "=" nccl takes it as a prefix
        if not rdma_devices():
            environment.setdefault(LIBRARIES["ucx"], name)
    chosen = (f"{library} {environment.get(variable, 'its own choice')}" for library, variable in LIBRARIES.items())
    print(f"network interfaces: {', '.join(chosen)}", file=sys.stderr, flush=True)  # noqa: T201  a worker's log


def _when_reached(find: Callable[[], str], target: str, *, wait_s: float) -> str:
    """Return the address that `find` returns once the target's name resolves. Raises its UserError after wait_s."""
    deadline, waits = time.monotonic() + wait_s, False
    while True:
        try:
            return find()
        except UserError as error:
            if time.monotonic() >= deadline:
                raise
            if not waits:
                print(f"waiting for {target}: {error}", file=sys.stderr, flush=True)  # noqa: T201  a worker's log
            waits = True
        time.sleep(RETRY_S)


def interface_of(host: str) -> str:
    """Return the name of this machine's network interface with the address of `host`; empty if there is none."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_DGRAM)}
    except socket.gaierror:  # a name that only other machines resolve
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]) in addresses:
                    return name
    with contextlib.suppress(FileNotFoundError), IPV6_ADDRESSES.open() as lines:
        for address, *_, name in map(str.split, lines):
            if socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)) in addresses:
                return name
    return ""
