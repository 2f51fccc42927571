"""Which transports work on this machine, and how fast, measured between two processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.observe.tables import table
from cosmos_rl_transfer.content import digest
from cosmos_rl_transfer.measure.speed import MEMCPY, NIXL_OVER_TCP, RAW_STREAM, Measurement, Speed
from cosmos_rl_transfer.transports.base import TransportUnavailable
from cosmos_rl_transfer.transports.select import infiniband, preference

_SHOW_PATH = {"UCX_PROTO_INFO": "y"}
"""Makes UCX print a table of what it chose for each kind of operation."""
_PATH_HEAD = "remote memory read by"
_PATH_ROW = re.compile(r"\|\s*(?P<range>\S+\.\.\S+)\s*\|\s*(?P<how>[^|]+?)\s*\|\s*(?P<lane>[^|]+?)\s*\|")


@dataclass(frozen=True, slots=True)
class Finding:
    """One way for bytes to travel, or what it is to be compared with."""

    name: str
    works: bool
    reason: str
    """Why not; or how, where there is more than one way."""
    gigabytes_per_s: float | None = None
    """Of 4 MiB buckets into warm memory, 1e9 bytes; None where it was not measured."""
    latency_us: float | None = None
    """From asking for one byte to having it."""


def diagnose(*, mib: int = 64, rounds: int = 5) -> list[Finding]:
    """Try everything; some twenty seconds. Nothing is left behind, and nothing raises because it does not work."""
    found = [
        _measured(MEMCPY, "one thread", mib, rounds),
        _measured(RAW_STREAM, "one connection over loopback, nothing around it", mib, rounds),
        _measured("shm", "a copy out of the publisher's slot", mib, rounds),
        _measured("tcp", "over loopback", mib, rounds),
        _nixl(mib, rounds),
        _measured(NIXL_OVER_TCP, "what NIXL does where reading another process is forbidden", mib, rounds),
    ]
    return [*found, _collective(), _one_pass(), *_hardware()]


def render(findings: Sequence[Finding]) -> str:
    """Return a table for people, and what "auto" makes of it."""
    rows = [
        (
            found.name,
            "yes" if found.works else "no",
            "-" if found.gigabytes_per_s is None else f"{found.gigabytes_per_s:.1f}",
            "-" if found.latency_us is None else f"{found.latency_us:.0f}",
            found.reason,
        )
        for found in findings
    ]
    works = {found.name for found in findings if found.works}
    choice = next(name for name in preference() if name in works or name == preference()[-1])
    listing = table(rows, header=("transport", "works", "GB/s", "latency us", "how, or why not"))
    return f'{listing}\n\ntransport = "auto" offers {choice} here'


def ucx_path(output: str) -> str:
    """Return how UCX reads remote memory, out of what it prints with UCX_PROTO_INFO: "zero-copy over cma/memory"."""
    _, _, after = output.partition(_PATH_HEAD)
    rows = []
    for line in after.splitlines()[1:]:
        row = _PATH_ROW.search(line)
        if row is not None:
            rows.append(f"{row['how']} over {row['lane']}")
        elif rows:
            break
    return ", ".join(dict.fromkeys(rows)) or "UCX does not say how"


def _measured(name: str, how: str, mib: int, rounds: int) -> Finding:
    try:
        with Measurement(name, mib=mib) as measurement:
            return _finding(name, how, measurement.speed(rounds))
    except TransportUnavailable as error:
        return Finding(name, False, str(error))


def _nixl(mib: int, rounds: int) -> Finding:
    try:
        with Measurement("nixl", mib=mib, environment=_SHOW_PATH) as measurement:
            speed = measurement.speed(rounds)
            return _finding("nixl", ucx_path("".join(measurement.output)), speed)
    except TransportUnavailable as error:
        return Finding("nixl", False, str(error))


def _finding(name: str, how: str, speed: Speed) -> Finding:
    return Finding(name, True, how, speed.gigabytes_per_s, speed.latency_us)


def _collective() -> Finding:
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("collective", False, "this build of torch has no torch.distributed")
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    has = ", ".join(name for name, there in built.items() if there) or "no backend"
    return Finding("collective", any(built.values()), f"wants a process group of your own; torch has {has}")


def _one_pass() -> Finding:
    if digest.compiled() is None:
        return Finding("one pass", False, "copies and hashes take several: pip install cosmos-rl-transfer[fast]")
    return Finding("one pass", True, "what is copied is hashed by compiled code on the way")


def _hardware() -> list[Finding]:
    import torch

    devices = infiniband()
    rdma = f"NIXL uses {', '.join(devices)}" if devices else f"no device in {Path('/sys/class/infiniband')}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = "weights on a GPU are packed into host memory first" if gpus else "no CUDA device"
    return [Finding("rdma", bool(devices), rdma), Finding("cuda ipc", False, cuda)]
