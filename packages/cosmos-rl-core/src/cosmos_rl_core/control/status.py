"""status.json, replaced by the controller every second, with thousands of workers every five; `cosmos-rl status`."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cosmos_rl_core.control.address_file import ControllerFile, read_controller_file
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.console import duration, table
from cosmos_rl_core.observe.record import RecordedOutcome, last_checkpoint, resume_command
from cosmos_rl_core.observe.slices import Slices, slices
from cosmos_rl_core.processes import ProcessName

if TYPE_CHECKING:
    from cosmos_rl_core.control.server import Controller


def status_of(
    controller: Controller, *, phase: str, targets: Mapping[str, int] | None = None
) -> Slices[dict[str, Any]]:
    """Return the current members, sample counts and waits. targets: number of workers by role."""
    members = yield from _members(controller)
    waits = [] if phase in ENDED else (yield from controller.scheduler.waits())
    ledger = controller.ledger
    return {
        "time": time.time(),
        "pid": os.getpid(),
        "phase": phase,
        "step": ledger.next_step,
        "version": ledger.version,
        "generation": ledger.generation,
        "epoch": ledger.members.epoch,
        "mesh": ledger.members.mesh,
        "wanted": targets or {},
        "members": members,
        "samples": ledger.counts(),
        "waits": waits,
    }


def _members(controller: Controller) -> Slices[list[MemberStatus]]:
    """Return the connected workers, and those that may reconnect."""
    now, sessions, members = controller.clock(), controller.ledger.sessions.by_name, controller.ledger.members.by_name
    by_name: dict[str, MemberStatus] = {}
    for peers in slices(list(controller.peers.by_name.values())):
        for peer in peers:
            by_name[peer.name] = MemberStatus(
                name=peer.name,
                role=peer.role,
                state="leaving" if peer.draining else members[peer.name].state.value,
                since_s=round(now - peer.since, 1),
                age_s=round(now - peer.heartbeat_at, 1),
                progress=peer.progress,
                version=peer.version,
                phase=peer.phases.current,
                phase_s=round(now - peer.phases.since, 1) if peer.phases.current else 0.0,
                started=peer.phases.seconds,
                weights_at=peer.address if peer.role == "policy" else "",
            )
        yield
    for name in [name for name in sessions if name not in controller.peers.by_name]:
        by_name[name] = MemberStatus(
            name=name,
            role=members[name].role,
            state=members[name].state.value,
            since_s=round(now - (sessions[name].suspect_since or now), 1),
            age_s=round(now - sessions[name].last_message, 1),
        )
    return list(by_name.values())


ENDED = ("finished", "failed")
"""Phases of a run that has ended."""
ELSEWHERE_S = 60.0
"""Seconds without a new status after which it is not known whether a controller on another machine is alive."""
SILENT_S = 10.0
"""Seconds without a new status after which the controller is shown as silent; it writes one per second."""


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the run."""

    name: str
    role: str
    state: str
    age_s: float
    """Seconds since its last heartbeat."""
    progress: int | float | str = ""
    since_s: float = 0.0
    """Seconds since it connected, became ready or was lost."""
    version: int = -1
    """Version of its weights; -1: none, or unknown."""
    phase: str = ""
    """Phase of its start, such as "reading weights"; empty after it."""
    phase_s: float = 0.0
    """Seconds since that phase began."""
    started: dict[str, float] = {}
    """Seconds of each phase of its start that has ended."""
    weights_at: str = ""
    """Addresses of a policy from which rollout workers pull weights, "host:port,host:port"."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `<run>/status.json`."""

    time: float
    """Time of writing, in Unix seconds."""
    phase: str
    step: int
    version: int
    generation: int = 0
    """Number of controller restarts from the journal."""
    epoch: int = 0
    """Epoch of the mesh: of the policy replicas that train together."""
    mesh: tuple[str, ...] = ()
    wanted: dict[str, int] = {}
    """Number of workers by role that the run shall have; empty if others start them."""
    members: tuple[MemberStatus, ...] = ()
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


def live_controller(run_dir: Path, *, seen_s: float = 0.0) -> str:
    """Return "pid 12", or "pid 12 on HOST" of another machine; empty if the run's controller does not exist.

    seen_s: age of the run's status. The process of another machine is not looked for, and its controller.json may
    outlive it: it counts as live while its status is younger than ELSEWHERE_S.
    """
    try:
        holder = ProcessName.parse((run_dir / "run.lock").read_text())
    except FileNotFoundError:
        return ""
    if holder is not None and holder.is_alive:
        return f"pid {holder.pid}"
    elsewhere = _elsewhere(run_dir)
    return f"pid {elsewhere.pid} on {elsewhere.host}" if elsewhere and seen_s <= ELSEWHERE_S else ""


def lost_host(run_dir: Path) -> str:
    """Return the other machine whose controller this directory names; empty if it names none."""
    elsewhere = _elsewhere(run_dir)
    return elsewhere.host if elsewhere else ""


def _elsewhere(run_dir: Path) -> ControllerFile | None:
    try:
        controller = read_controller_file(run_dir)
    except UserError:
        return None
    return None if controller.host == socket.gethostname() else controller


def _life(run_dir: Path, status: RunStatus, outcome: RecordedOutcome | None, *, controller: str, now: float) -> str:
    age = duration(max(0.0, now - status.time))
    if outcome is not None:
        return f"{outcome.state} {duration(max(0.0, now - outcome.ended))} ago, after {outcome.step} steps"
    if status.phase in ENDED:
        return f"{status.phase} {age} ago"
    if not controller and (host := lost_host(run_dir)):
        return f"unknown: last seen {age} ago, on {host}"
    if not controller:
        return f"NOT LIVE: its controller is gone; last seen {age} ago"
    if now - status.time > SILENT_S:
        return f"live ({controller}), but silent for {now - status.time:.0f} s"
    return f"live ({controller})"


def _end(run_dir: Path, outcome: RecordedOutcome) -> str:
    """Return the reason of the end, what is left of the run, and the command that continues it."""
    rows = [("reason", outcome.message), ("worker", outcome.worker), ("checkpoint", outcome.checkpoint)]
    if outcome.worker:
        rows.append(("log", str(run_dir / "logs" / f"{outcome.worker}.log")))
    rows.append(("continue", outcome.resume))
    return "\n".join(f"{label}: {text}" for label, text in rows if text)


def _state(member: MemberStatus) -> str:
    return f"{member.state}: {member.phase} {duration(member.phase_s)}" if member.phase else member.state


def _numbers(status: RunStatus) -> str:
    """Return the ready workers of each role, and how many there shall be: "1 of 1 policy, 2 of 3 rollout"."""
    ready = Counter(member.role for member in status.members if member.state == "ready")
    roles = [role for role in ("policy", "rollout") if role in status.wanted or ready[role]]
    return ", ".join(
        f"{ready[role]} of {status.wanted[role]} {role}" if role in status.wanted else f"{ready[role]} {role}"
        for role in roles
    )


def render(
    run_dir: Path, status: RunStatus, *, controller: str, now: float, outcome: RecordedOutcome | None = None
) -> str:
    """Return the status as text for the user.

    controller: as of `live_controller`. now: in Unix seconds. outcome: of a run that has ended.
    """
    life = _life(run_dir, status, outcome, controller=controller, now=now)
    place = f"phase {status.phase}, step {status.step}, version {status.version}"
    lines = [f"{run_dir}: {life}", place]
    if status.mesh:
        lines.append(f"mesh epoch {status.epoch}: {', '.join(status.mesh)}; controller generation {status.generation}")
    if status.members or status.wanted:
        lines.append(f"workers ready: {_numbers(status)}")
    parts = ["\n".join(lines)]
    if outcome is not None and (end := _end(run_dir, outcome)):
        parts.append(end)
    elif outcome is None and status.phase not in ENDED and not controller:
        parts.append(f"continue: {resume_command(run_dir, checkpoint=last_checkpoint(run_dir))}")
    if status.members:
        rows = [
            (m.name, m.role, _state(m), duration(m.since_s), "-" if m.version < 0 else m.version, duration(m.age_s))
            for m in status.members
        ]
        parts.append(table(rows, header=("name", "role", "state", "since", "version", "last heartbeat")))
    if samples := [f"{count} {state}" for state, count in status.samples.items() if count]:
        parts.append(f"samples: {', '.join(samples)}")
    if status.waits and outcome is None and status.phase not in ENDED:
        parts.append("\n".join(["waiting:", *(f"  {wait}" for wait in status.waits)]))
    return "\n\n".join(parts)
