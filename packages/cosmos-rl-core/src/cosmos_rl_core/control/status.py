"""status.json: replaced every second by the controller, shown by `cosmos-rl status`."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.console import table
from cosmos_rl_core.processes import is_alive

if TYPE_CHECKING:
    from cosmos_rl_core.control.server import Controller


def write_status(path: Path, controller: Controller, *, phase: str) -> None:
    """Replace `path` with the current members, sample counts and waits."""
    ledger = controller.ledger
    now = controller.clock()
    status = {
        "time": time.time(),
        "pid": os.getpid(),
        "phase": phase,
        "step": ledger.next_step,
        "version": ledger.version,
        "members": [
            {
                "name": peer.name,
                "role": peer.role,
                "state": ledger.members.by_name[peer.name].state.value,
                "age_s": round(now - peer.heartbeat_at, 1),
                "progress": peer.progress,
            }
            for peer in controller.peers.by_name.values()
        ],
        "samples": ledger.counts(),
        "waits": ledger.waits() + controller.waits(),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(status))
    temporary.replace(path)


SILENT_S = 10.0
"""Seconds without a new status after which the controller is shown as silent; it writes one per second."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the run."""

    name: str
    role: str
    state: str
    age_s: float
    """Seconds since its last heartbeat."""
    progress: int | float | str = ""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `<run>/status.json`."""

    time: float
    """Time of writing, in Unix seconds."""
    phase: str
    step: int
    version: int
    members: tuple[Member, ...] = ()
    samples: dict[str, int] = {}
    """Samples by state."""
    waits: tuple[Any, ...] = ()
    """One line per wait: the waiting component and the reason."""


def read_status(run_dir: Path) -> RunStatus:
    """Return the last status of a run. Raises UserError if there is none."""
    path = run_dir / "status.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunStatus)
    except FileNotFoundError as error:
        what = "not the directory of a started run" if run_dir.is_dir() else "no such directory"
        raise UserError(f"{run_dir}: {what} (no {path.name} in it)") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a status file: {error}") from error


def live_pid(run_dir: Path) -> int | None:
    """Return the controller's process id from `<run>/run.lock`, or None if that process does not exist."""
    try:
        found = re.search(r"\d+", (run_dir / "run.lock").read_text())
    except FileNotFoundError:
        return None
    return int(found[0]) if found is not None and is_alive(int(found[0])) else None


def _life(status: RunStatus, *, pid: int | None, age_s: float) -> str:
    if status.phase == "finished":
        return f"finished {age_s:.0f} s ago"
    if pid is None:
        return f"NOT LIVE: its controller is gone; last seen {age_s:.0f} s ago"
    if age_s > SILENT_S:
        return f"live (pid {pid}), but silent for {age_s:.0f} s"
    return f"live (pid {pid})"


def render(run_dir: Path, status: RunStatus, *, pid: int | None, now: float) -> str:
    """Return the status as text for the user; `now` in Unix seconds."""
    life = _life(status, pid=pid, age_s=max(0.0, now - status.time))
    place = f"phase {status.phase}, step {status.step}, version {status.version}"
    parts = [f"{run_dir}: {life}\n{place}"]
    if status.members:
        rows = [(m.name, m.role, m.state, f"{m.age_s:.1f} s", m.progress) for m in status.members]
        parts.append(table(rows, header=("name", "role", "state", "age", "progress")))
    if samples := [f"{count} {state}" for state, count in status.samples.items() if count]:
        parts.append(f"samples: {', '.join(samples)}")
    if status.waits:
        parts.append("\n".join(["waiting:", *(f"  {wait}" for wait in status.waits)]))
    return "\n\n".join(parts)
