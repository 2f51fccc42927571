"""Command line of a worker: its controller, and its machine's part of a replica of several ranks.

arguments = to_arguments(address, node)
address, node = from_arguments(arguments, program="cosmos-rl worker")
address = address.resolved()        # with the controller's address and a name
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_rl_core.control.address_file import NAME as CONTROLLER_FILE
from cosmos_rl_core.control.address_file import present_address, wait_for_controller
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.processes import rdma_devices
from cosmos_rl_core.wire.advertised import route_address, worker_address
from cosmos_rl_core.wire.handshake import TOKEN_VARIABLE, environment_token, read_token
from cosmos_rl_core.wire.listening import Address, is_loopback, listen, parse_address
from cosmos_rl_core.wire.tls import TLS_FILE, TLS_VARIABLE, Tls, environment_tls, read_tls

AGENT_PID = "COSMOS_RL_AGENT_PID"
"""Environment variable of a rank: the process of its agent."""
LEFT_FILE = "COSMOS_RL_LEFT_FILE"
"""Environment variable of a rank: a file that it makes if the replica leaves because of SIGTERM."""

SIOCGIFADDR = 0x8915
"""Linux request for the IPv4 address of an interface: netdevice(7)."""
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
RETRY_S = 0.5
# gloo's is the loopback interface for ranks of one machine. Otherwise it is, as NCCL's, the interface that reaches the
# first machine of the policy replica or, for a replica of one machine, the controller. UCX gets the same one, but where
# there are RDMA devices: among those it chooses itself.
LIBRARIES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME", "ucx": "UCX_NET_DEVICES"}
"""Environment variable of each library's network interface. Variables that the user has set stay."""

NAME = re.compile("[A-Za-z0-9._-]{1,100}")
"""Of a replica; shorter than a name of the handshake, which may add a rank to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """A worker's run, role and name. The fields are flags of its command line."""

    role: str = field(metadata={"choices": ("policy", "rollout"), "help": "The worker's role."})
    name: str = field(
        default="",
        metadata={"help": "Name of the replica, unique in the run. Default: policy-0, or rollout-HOST-PROCESS."},
    )
    run: Path | None = field(default=None, metadata={"help": "The run's directory: its controller.json and token."})
    controller: str = field(
        default="", metadata={"help": "Address of the controller, such as tcp://10.0.0.1:4000. Default: that of --run."}
    )
    token_file: Path | None = field(
        default=None,
        metadata={"help": f"File with the run's token. Default: the variable {TOKEN_VARIABLE}, or that of --run."},
    )
    tls_file: Path | None = field(
        default=None,
        metadata={
            "help": f"File {TLS_FILE} of a run with TLS. Default: the variable {TLS_VARIABLE}, or that of --run."
        },
    )
    wait_s: float = field(
        default=0.0,
        metadata={"help": "Seconds to wait for the controller.json of --run, or for --controller to answer."},
    )
    left_code: int = field(
        default=0, metadata={"help": "Exit code after SIGTERM, for a platform that starts again only what has failed."}
    )
    threads: int | None = field(default=None, metadata={"help": "CPU threads of each process. Default: torch's."})
    processes_per_gpu: int = field(
        default=1, metadata={"help": "Processes of the run that share this worker's GPU, itself included."}
    )
    launcher: int = field(
        default=0, metadata={"help": "Process here after whose end the worker waits for no other controller."}
    )

    def resolved(self) -> WorkerAddress:
        """Return it with a name and the controller's address. Raises UserError."""
        address = self
        if not self.controller:
            if self.run is None:
                raise UserError("give --run DIR or --controller tcp://host:port")
            if not (self.run / CONTROLLER_FILE).exists():
                self.report_wait(f"{self.run / CONTROLLER_FILE} is missing")
            contact = wait_for_controller(self.run, timeout_s=self.wait_s)
            ours = None if TOKEN_VARIABLE in os.environ else self.run / "token"
            shared = self.run / TLS_FILE if contact.ca and TLS_VARIABLE not in os.environ else None
            address = replace(
                self,
                wait_s=0.0,  # the address may be that of a controller that died: it is read anew after a restart
                controller=contact.address,
                token_file=self.token_file or ours,
                tls_file=self.tls_file or shared,
            )
            _must_be_of_the_run(address.tls(), contact.ca)
        if not self.name:
            host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]
            address = replace(address, name="policy-0" if self.role == "policy" else f"rollout-{host}-{os.getpid()}")
        if NAME.fullmatch(address.name) is None:
            raise UserError(f"--name {address.name!r}: a name has 1 to 100 letters, digits, '.', '-' and '_'")
        return address

    def report_wait(self, reason: str) -> None:
        """Print that the worker waits for a controller, if it does: it may hold a GPU meanwhile."""
        if self.wait_s:
            text = f"{self.name or self.role}: waiting for the controller, up to {self.wait_s:g} s: {reason}"
            print(text, flush=True)  # noqa: T201  a worker's output is its log

    def present_controller(self) -> str:
        """Return the address of the run's controller: in `run`, another one may have taken over since the start."""
        return self.controller if self.run is None else present_address(self.run, start=self.controller)

    def token(self) -> bytes:
        """Return the run's token: of `token_file`, else of the environment. Raises UserError."""
        if self.token_file is not None:
            return read_token(self.token_file)
        if (token := environment_token()) is None:
            raise UserError(f"the run's token is missing: set {TOKEN_VARIABLE} to it, or give --token-file")
        return token

    def tls(self) -> Tls | None:
        """Return the certificate of `tls_file`, else of the environment; None without both. Raises UserError."""
        return environment_tls() if self.tls_file is None else read_tls(self.tls_file)


def _must_be_of_the_run(tls: Tls | None, ca: str) -> None:
    """Raise UserError if this certificate's CA is another one than that of controller.json (its fingerprint)."""
    if tls is not None and tls.fingerprint != ca:
        run = f"uses the CA {ca[:16]}" if ca else "does not use TLS"
        raise UserError(f"{tls.origin} is of another run, with the CA {tls.fingerprint[:16]}: this run {run}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine's part of a replica. The fields are flags of a worker's command line."""

    index: int = field(
        default=0,
        metadata={"flag": "node", "help": "Index of this machine in the replica; 0, with rank 0, is the controller's."},
    )
    num_nodes: int = field(default=1, metadata={"help": "Machines of the replica."})
    ranks_per_node: int = field(default=1, metadata={"help": "Processes of the replica on each machine."})
    collective_timeout_s: float = field(default=600.0, metadata={"help": "Timeout of collectives between ranks."})
    restarts: int = field(
        default=0,
        metadata={"help": "Times that a further machine of a `cosmos-rl run` starts its ranks again, with machine 0."},
    )
    rendezvous: str = field(default="", metadata={"help": "host:port on machine 0 where the machines meet."})
    store: Path | None = field(default=None, metadata={"help": "File for the rendezvous of the ranks of one machine."})
    python_path: str = field(default="", metadata={"help": "Folders for module:attribute names, as in PYTHONPATH."})

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_nodes:
            raise UserError(f"--node {self.index}: the replica has {self.num_nodes} machines, counted from 0")
        if self.num_nodes > 1 and not self.rendezvous:
            raise UserError("--rendezvous host:port is missing: a replica of several machines needs it")

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole replica."""
        return self.num_nodes * self.ranks_per_node

    @property
    def is_local(self) -> bool:
        """Whether the replica's ranks reach one another over the loopback interface."""
        return self.rendezvous == "" or is_loopback(self.rendezvous.rpartition(":")[0])

    def address_among_machines(self) -> str:
        """Return this machine's address as seen by the replica's others. Raises UserError if the first has none yet."""
        host, _, port = self.rendezvous.rpartition(":")
        try:
            if self.index:
                return route_address(host, int(port))
            socket.getaddrinfo(host.strip("[]"), port)  # its own name must resolve too
        except OSError as error:
            raise UserError(f"cannot reach the replica's first machine {host}: {error.strerror}") from error
        return host

    def commands_for_others(self, worker: WorkerAddress, *, python_path: tuple[str, ...], restarts: int) -> list[str]:
        """Return the commands to run on the other machines, machine 1 first."""
        folders = os.pathsep.join(python_path)
        indices = range(1, self.num_nodes)
        parts = [replace(self, index=i, python_path=folders, restarts=restarts) for i in indices]
        return [shlex.join(["cosmos-rl", "worker", *to_arguments(worker, part)]) for part in parts]


def to_arguments(*parts: WorkerAddress | Node) -> list[str]:
    """Return the command line for `from_arguments`, without default values."""
    arguments = []
    for part in parts:
        for one in fields(part):
            value = getattr(part, one.name)
            if value != one.default:
                arguments += [_flag(one), f"{value:g}" if isinstance(value, float) else str(value)]
    return arguments


def from_arguments(arguments: Sequence[str], *, program: str) -> tuple[WorkerAddress, Node]:
    """Parse the command line of a worker. Exits with code 2 and a message if it is invalid."""
    parser = argparse.ArgumentParser(prog=program, description="One worker of a Cosmos-RL run.")
    for one in (*fields(WorkerAddress), *fields(Node)):
        parser.add_argument(
            _flag(one),
            dest=one.name,
            help=one.metadata["help"],
            type=_READERS[str(one.type).removesuffix(" | None")],
            choices=one.metadata.get("choices"),
            required=one.default is MISSING,
            default=one.default,
        )
    values = vars(parser.parse_args(arguments))
    address, node = ({one.name: values[one.name] for one in fields(kind)} for kind in (WorkerAddress, Node))
    return WorkerAddress(**address), Node(**node)


_READERS: Mapping[str, Callable[[str], object]] = {"str": str, "int": int, "float": float, "Path": Path}
"""Parser of a flag, by the type of its field."""


def _flag(one: Field[Any]) -> str:
    return f"--{one.metadata.get('flag', one.name).replace('_', '-')}"


def policy_node(section: PolicySection, *, bind: str) -> Node:
    """Return machine 0 of the policy replica; `bind` is its address for the other machines.

    Raises UserError if the axes' sizes do not multiply to the number of ranks, or if `bind` is not an address of this
    machine.
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


def _free_port(bind: str) -> int:
    """Return a currently unused port. Raises UserError for an address that is not this machine's."""
    with listen(Address(host=bind), allow_remote=True) as probe:
        return probe.getsockname()[1]


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
