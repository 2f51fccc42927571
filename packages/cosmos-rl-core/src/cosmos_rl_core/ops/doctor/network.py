"""Checks of addresses, ports, names and RDMA devices."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Check
from cosmos_rl_core.wire.listening import Address, is_loopback, listen
from cosmos_rl_core.workers.node import interface_of

INFINIBAND = Path("/sys/class/infiniband")
LOOK_UP_S = 3.0


def listening(bind: str, port: int) -> Iterator[Check]:
    """Yield whether the controller can listen at [run] bind and port, and on which interface that is."""
    try:
        with closing(listen(Address(host=bind, port=port), allow_remote=True)) as listener:
            taken = listener.getsockname()[1]
    except UserError as error:
        holder = holder_of(port)
        fix = f"end {holder}" if holder else "[run] port = 0 takes a free one"
        yield Check("bad", "[run] bind", str(error), fix if "in use" in str(error) else '[run] bind = "127.0.0.1"')
        return
    name = interface_of(bind) or "every interface"
    reach = "this machine alone reaches it" if is_loopback(bind) else "other machines reach it"
    yield Check("ok", "[run] bind", f"{bind} ({name}), port {port or f'{taken}, a free one'}: {reach}")


def host_name(name: str = "") -> Iterator[Check]:
    """Yield whether the host name resolves, and its address back to it. name: instead of this machine's."""
    name = name or socket.gethostname()
    fix = "add it to /etc/hosts, for libraries that use the name; runs use addresses"
    answers: list[str] = []
    looking = threading.Thread(target=_look_up, args=(name, answers), name="host name", daemon=True)
    looking.start()
    looking.join(LOOK_UP_S)  # a look-up has no time limit of its own
    address, back, reason = (*answers, "", "", "")[:3]
    if len(answers) < 3:
        subject = f"{name} is {address}, and the look-up of its name" if address else f"the look-up of {name}"
        yield Check("note", "host name", f"{subject} takes more than {LOOK_UP_S:g} s", fix)
    elif not address:
        yield Check("note", "host name", f"{name} has no address ({reason})", fix)
    elif not back:
        yield Check("note", "host name", f"{name} is {address}, which has no name ({reason})", fix)
    else:
        same = back.split(".")[0] == name.split(".")[0]
        yield Check("ok" if same else "note", "host name", f"{name} is {address}, which is {back}", "" if same else fix)


def _look_up(name: str, answers: list[str]) -> None:
    """Append the address of a name, the name of that address, and the reason that one of them is empty."""
    try:
        answers.append(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
    except OSError as error:
        answers += ["", "", str(error.strerror)]
        return
    try:
        answers += [socket.gethostbyaddr(answers[0])[0], ""]
    except OSError as error:
        answers += ["", str(error.strerror)]


def infiniband(devices: Path = INFINIBAND) -> Iterator[Check]:
    """Yield the RDMA devices with the states of their ports."""
    if not devices.is_dir() or not any(devices.iterdir()):
        yield Check("ok", "RDMA", "no device: TCP is used between machines")
        return
    for device in sorted(devices.iterdir()):
        states = [path.read_text().strip() for path in sorted(device.glob("ports/*/state"))]
        listed = ", ".join(state.partition(": ")[2] or state for state in states) or "no port"
        if any("ACTIVE" in state for state in states):
            yield Check("ok", "RDMA", f"{device.name}: {listed}")
        else:
            yield Check("bad", "RDMA", f"{device.name}: {listed}", "its cable, its switch port or the subnet manager")


def holder_of(port: int) -> str:
    """Return "process 12 (python train.py)", the one that listens on a TCP port of this machine; empty if unknown.

    Processes of other users are not visible.
    """
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        inodes |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for link in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        try:
            if str(link.readlink()) in sockets:
                pid = link.parts[2]
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                return f"process {pid} ({b' '.join(words).decode(errors='replace').strip()[:80]})"
        except OSError:  # it has ended, or is of another user
            continue
    return ""


CONNECT_S = 3.0


def weight_ports(members: Sequence[Mapping[str, Any]], *, awaited: bool) -> Iterator[Check]:
    """Yield whether this machine reaches the ports from which the policies of a live run publish weights.

    members: of a status. awaited: whether a rollout worker waits for weights, which makes a silent port bad.
    """
    places = [(each["name"], at) for each in members for at in each.get("weights_at", "").split(",")]
    ports = [(name, at) for name, at in places if at.rpartition(":")[2].isdecimal()]  # others are folders
    with ThreadPoolExecutor(max(1, min(32, len(ports)))) as pool:
        for (name, at), reason in zip(ports, pool.map(lambda port: _refusal(port[1]), ports), strict=True):
            if not reason:
                yield Check("ok", "weight port", f"{name}: {at} accepts connections of this machine")
            else:
                fix = "rollout workers need it: open it in the firewall, or set [run] bind to an address they reach"
                yield Check("bad" if awaited else "note", "weight port", f"{name}: {at}: {reason}", fix)


def _refusal(at: str) -> str:
    """Return why a TCP connection to "host:port" is not made; "" if it is."""
    host, _, port = at.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s, as of a firewall that drops packets"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


CLOCKS = {
    "chronyc": ("chronyc", "-n", "tracking"),
    "timedatectl": ("timedatectl", "show", "--property=NTPSynchronized", "--value"),
}
"""Commands that report on the clock, the better one first."""
CLOCK_S = 5.0
APART_S = 0.5
"""Difference from true time that the timeline of several machines shows, and certificates may not forgive."""


def clock(run: Callable[[Sequence[str]], str] | None = None) -> Iterator[Check]:
    """Yield a line about the clock's synchronisation; nothing on a machine without these commands. run: of one."""
    fix = "ntpd or chronyd keeps the clocks of machines equal, which timelines and certificates need"
    for name, command in CLOCKS.items():
        if run is None and shutil.which(name) is None:
            continue
        text = (run or _output)(command)
        if name == "chronyc" and (match := re.search(r"System time\s*:\s*([0-9.]+) seconds (slow|fast)", text)):
            apart = float(match[1])
            shown = f"{apart:.3g} s {'behind' if match[2] == 'slow' else 'ahead of'} the time servers"
            yield Check("ok", "clock", shown) if apart < APART_S else Check("note", "clock", shown, fix)
            return
        if name == "timedatectl" and text.strip() in ("yes", "no"):
            is_equal = text.strip() == "yes"
            shown = "is synchronised" if is_equal else "is not synchronised"
            yield Check("ok", "clock", shown) if is_equal else Check("note", "clock", shown, fix)
            return


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=CLOCK_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
