"""Records of a run's start and end, in its directory.

run.json         the newest start: command, machine, versions, recipe; and the earlier ones
outcome.json     the end of it; absent while the run is live, and after a death that nothing could record
events.jsonl     everything that the run has reported, of all starts
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.imports import PACKAGES, installed_versions

RUN, OUTCOME, EVENTS = "run.json", "outcome.json", "events.jsonl"
RECORDED = (*PACKAGES, "torch", "transformers", "diffusers", "vllm", "numpy")
"""Packages whose versions are recorded, if they are installed."""
LAUNCH = "COSMOS_RL_LAUNCH"
"""Environment variable of a controller: the command of `cosmos-rl launch` that has started it."""
STOPPED = 3
"""Exit code of a run that the monitor has ended."""
GIT_S = 5.0
TRACEBACK = "Traceback (most recent call last)"
MOST_BYTES = 16_000
"""Most bytes of a traceback that are recorded: its end."""


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run."""

    started: float
    """In Unix seconds."""
    command: tuple[str, ...]
    cwd: str
    host: str
    pid: int
    python: str
    versions: dict[str, str]
    commit: str
    """Of the git repository around `cwd`; empty outside of one."""
    recipe_sha256: str
    """Digest of resolved.toml."""
    parent: str = ""
    """The checkpoint that it continues from; empty for a new run."""
    rows: int = 0
    """Rows of an epoch, which the order of the prompts depends on; 0 in a run of an earlier version."""
    takes_over: bool = False
    """Whether it continues a run whose controller died, by its journal."""
    launch: str = ""
    """Command of `cosmos-rl launch` without its flags; empty if no platform has started it."""
    gpus: str = ""
    """CUDA_VISIBLE_DEVICES."""
    earlier: tuple[RunStart, ...] = ()
    """Earlier starts in this directory, the oldest first."""


class RecordedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run."""

    state: Literal["done", "interrupted", "failed", "stopped"]
    """stopped: by the monitor."""
    message: str = ""
    """The error, or the monitor's reason."""
    worker: str = ""
    """The worker whose error it is; the message has its rank."""
    traceback: str = ""
    """Its end; empty for an error that the user can fix."""
    exit_code: int = 0
    step: int = 0
    """Number of steps of the newest weights."""
    checkpoint: str = ""
    """The newest whole checkpoint."""
    resume: str = ""
    """Command that continues the run; empty for one that is done."""
    ended: float = 0.0
    """In Unix seconds."""
    wall_s: float = 0.0


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A line of events.jsonl."""

    time: float
    """In Unix seconds."""
    kind: str
    """start, end, phase, note, worker or evaluation."""
    text: str
    step: int
    """Number of steps at that time."""


def record_start(run_dir: Path, *, recipe: str, parent: str, takes_over: bool, rows: int = 0) -> RunStart:
    """Write run.json with this process and its earlier starts, and remove the earlier outcome.

    Raises UserError if the run continues one with another number of rows.
    """
    before = read_start(run_dir)
    continued = before or (read_start(Path(parent).parent.parent) if parent else None)  # RUN/checkpoints/step_N
    if (parent or takes_over) and continued is not None and continued.rows not in (0, rows):
        raise UserError(
            f"[data] had {continued.rows:,} rows when the run began, and has {rows:,}: prompts come in another order, "
            "so that some would be trained on twice in this epoch and others not at all. Restore the rows; for a new "
            "run from the weights, set model.path to an export of the checkpoint and choose another [run] output_dir"
        )
    earlier = () if before is None else (*before.earlier, msgspec.structs.replace(before, earlier=()))
    start = RunStart(
        started=time.time(),
        command=tuple(sys.argv),
        cwd=str(Path.cwd()),
        host=socket.gethostname(),
        pid=os.getpid(),
        python=platform.python_version(),
        versions=installed_versions(RECORDED),
        commit=_commit(),
        recipe_sha256=hashlib.sha256(recipe.encode()).hexdigest(),
        parent=parent,
        rows=rows,
        takes_over=takes_over,
        launch=os.environ.get(LAUNCH, ""),
        gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        earlier=earlier,
    )
    (run_dir / OUTCOME).unlink(missing_ok=True)
    _replace(run_dir / RUN, start)
    Events(run_dir).add("start", f"continues from {parent}" if parent else shlex.join(start.command))
    return start


def record_outcome(run_dir: Path, outcome: RecordedOutcome) -> None:
    """Write outcome.json."""
    _replace(run_dir / OUTCOME, outcome)


def read_start(run_dir: Path) -> RunStart | None:
    """Return the newest start; None of a run of an earlier version, or for a damaged file."""
    return _read(run_dir / RUN, RunStart)


def read_outcome(run_dir: Path) -> RecordedOutcome | None:
    """Return the end of the run; None of a run that is live, was killed, or is of an earlier version."""
    return _read(run_dir / OUTCOME, RecordedOutcome)


def failure(error: BaseException, run_dir: Path, *, worker: str = "") -> RecordedOutcome:
    """Return the outcome for the error that ended a run; worker: the one whose error it is."""
    if isinstance(error, KeyboardInterrupt):
        return RecordedOutcome(state="interrupted", message=str(error) or "interrupted", exit_code=130)
    if isinstance(error, UserError):
        return RecordedOutcome(state="failed", message=str(error), worker=worker, exit_code=2)
    if isinstance(error, WorkerFailed):
        text = _last_traceback(run_dir / "logs" / f"{worker}.log") if worker else ""
    else:
        text = "".join(traceback.format_exception(error))[-MOST_BYTES:]
    message = str(error) if isinstance(error, WorkerFailed) else f"{type(error).__name__}: {error}"
    return RecordedOutcome(state="failed", message=message, worker=worker, traceback=text, exit_code=1)


def last_checkpoint(run_dir: Path) -> str:
    """Return the newest whole checkpoint in a run's directory, by its step; empty if there is none."""
    folders = {path.parent.name[5:]: path.parent for path in (run_dir / "checkpoints").glob("step_*/manifest.json")}
    steps = sorted((int(step) for step in folders if step.isdecimal()), reverse=True)
    return str(folders[str(steps[0])]) if steps else ""


def resume_command(run_dir: Path, *, checkpoint: str) -> str:
    """Return the command that continues the run from its newest checkpoint; without one, that starts it anew."""
    start = read_start(run_dir)
    if start is not None and start.launch:
        return f"{start.launch} --resume"  # also without a checkpoint
    flag = ["--resume", "auto"] if checkpoint else ["--overwrite"]
    if start is None or start.command[:2] not in ((start.command[0], "run"), (start.command[0], "controller")):
        return shlex.join(["cosmos-rl", "run", str(run_dir / "resolved.toml"), *flag])
    kept: list[str] = []
    words = iter(start.command[1:])
    for word in words:
        if word == "--resume":
            next(words, None)
        elif word != "--overwrite" and not word.startswith("--resume="):
            kept.append(word)
    return shlex.join(["cosmos-rl", *kept, *flag])


class Events:
    """Appends to events.jsonl; a full disk loses events, not the run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EVENTS
        self.step = 0
        """Number of steps so far."""

    def add(self, kind: str, *texts: str) -> None:
        """Append an event for each text."""
        now = time.time()
        events = [Event(time=now, kind=kind, text=text, step=self.step) for text in texts]
        if events:
            append_lines(self._path, [msgspec.json.encode(event) for event in events])


def append_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Append lines, on a line of their own also after an incomplete one. Without room they are lost."""
    try:
        with path.open("ab") as file:
            torn = file.tell() and not _ends_whole(path)
            file.write((b"\n" if torn else b"") + b"\n".join(lines) + b"\n")
    except OSError:  # the record of a run must not end it, nor restore a directory that the user has removed
        return


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _last_traceback(log: Path) -> str:
    try:
        text = log.read_bytes()[-4 * MOST_BYTES :].decode(errors="replace")
    except OSError:
        return ""
    begin = text.rfind(TRACEBACK)
    return "" if begin < 0 else text[begin:][-MOST_BYTES:]


def _commit() -> str:
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""


def _read(path: Path, kind):  # noqa: ANN001, ANN202
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _replace(path: Path, value: msgspec.Struct) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(msgspec.to_builtins(value), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
