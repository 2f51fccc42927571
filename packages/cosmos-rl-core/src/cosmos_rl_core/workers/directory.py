"""The run's directory: who may use it, and what lies where."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.sinks import set_damage_aside

LEAVING_S = 60.0
"""Longest wait for the workers of a killed run, which save on their way out."""
LOOK_AGAIN_S = 0.05
CONTENTS = ("logs", "rollouts", "journal", "checkpoints")
LOGS = ("metrics.jsonl", "eval.jsonl", "monitor.jsonl", "rows_dropped.jsonl")
"""What a resumed run goes on with: a damaged line in them holds back no checkpoint."""
FILES = ("resolved.toml", "rows.jsonl", "eval_rows.jsonl", *LOGS, "timeline.json", "status.json", "token")
WATCHED = ("journal", "metrics.jsonl", "eval.jsonl", "resolved.toml")
"""What is told when somebody removes it from the directory of a live run. Checkpoints are watched by who saves them."""
NO_ROOM = {errno.ENOSPC: "no space left", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file is too big"}
"""What an OSError of a full disk means, by its number."""


def explain_no_room(error: OSError, place: Path | str) -> UserError | None:
    """Return the message for a disk that is full, or None for any other error."""
    what = NO_ROOM.get(error.errno or 0)
    if what is None:
        return None
    return UserError(
        f"{what} for {error.filename or place}; what was written so far is kept. Make room there and go on with "
        "--resume auto, or choose another [run] output_dir."
    )


@dataclass(slots=True)
class RunDirectory:
    """An output directory, held by one live run at a time.

    directory = RunDirectory.open(path, resume=False, overwrite=False)
    ...
    directory.close()
    """

    path: Path
    _lock: IO[str]
    notes: tuple[str, ...] = ()
    """What the user should know of an earlier life's files."""

    @classmethod
    def open(cls, path: Path, *, resume: bool, overwrite: bool) -> RunDirectory:
        """Make or reopen the directory. Raises UserError when a live run holds it, or it would be written over.

        A new one is its owner's alone (mode 0700): prompts, rollouts and weights lie in it. One that is there keeps
        its mode.
        """
        with contextlib.ExitStack() as unless_held:
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)  # the mode is of the last folder alone
                lock = unless_held.enter_context((path / "run.lock").open("a+"))
                directory = cls(path, lock)
                directory._claim(resume=resume, overwrite=overwrite)
            except OSError as error:
                if told := explain_no_room(error, path):
                    raise told from error
                what = error.strerror if error.filename in (None, str(path)) else f"{error.filename}: {error.strerror}"
                raise UserError(f"cannot use {path} as [run] output_dir: {what}") from error
            unless_held.pop_all()
        return directory

    def _claim(self, *, resume: bool, overwrite: bool) -> None:
        """Lock the directory and prepare it for a new life."""
        path, lock = self.path, self._lock
        self._take_lock()
        if (path / "resolved.toml").exists() and not resume:
            if not overwrite:
                raise UserError(
                    f"{path} holds an earlier run. Go on with it by --resume auto, write over it by --overwrite, "
                    "or choose another [run] output_dir."
                )
            self._clear()
        self.notes = tuple(filter(None, (set_damage_aside(path / name) for name in LOGS)))
        shutil.rmtree(path / "journal", ignore_errors=True)  # it belongs to one controller's life, as does
        (path / "token").unlink(missing_ok=True)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        for name in CONTENTS:
            (path / name).mkdir(exist_ok=True)

    def _take_lock(self) -> None:
        """Raise UserError for a directory in use; wait for the workers of a run that was killed to leave."""
        deadline = time.monotonic() + LEAVING_S
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._lock.seek(0)
                holder = self._lock.read().strip()
                if _is_alive(holder) or time.monotonic() > deadline:
                    raise UserError(
                        f"{self.path} is in use by a live run (process {holder}). Wait for it, stop it, "
                        "or choose another [run] output_dir."
                    ) from error
            time.sleep(LOOK_AGAIN_S)

    @property
    def lock(self) -> int:
        """The descriptor that holds the directory, for as long as any process has it open."""
        return self._lock.fileno()

    def close(self) -> None:
        """Let another run have it."""
        self._lock.close()

    def _clear(self) -> None:
        """Remove what a run writes, and nothing else."""
        for name in (*CONTENTS, "tensorboard", "media"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)


class Removals:
    """Notices what somebody removes from the directory of a live run.

    removals = Removals(path, lock=directory.lock)
    for text in removals.check(): ...        # now and then; each loss once
    """

    def __init__(self, path: Path, *, lock: int) -> None:
        self.lost = False
        """Whether the directory itself has gone, whatever was made in its place since."""
        self._path = path
        self._lock = os.fstat(lock)
        self._seen: set[str] = set()

    def check(self) -> list[str]:
        """Return what was removed since the last look, for people."""
        if self.lost:
            return []
        try:
            self.lost = not os.path.samestat(os.stat(self._path / "run.lock"), self._lock)
        except FileNotFoundError:
            self.lost = True
        if self.lost:
            return [
                f"{self._path} was removed or renamed while the run is going on; the step in work is finished and saved"
            ]
        there = {name for name in WATCHED if _holds_anything(self._path / name)}
        gone, self._seen = self._seen - there, there
        return [f"{self._path / name} was removed while the run is going on, which goes on" for name in sorted(gone)]

    def explain(self, *, step: int, checkpoint: str) -> str:
        """Return what to do about a directory that was lost: the weights of `step` lie in `checkpoint`, if anywhere."""
        left = f"the weights of step {step} lie in {checkpoint}; go on from there by --resume auto"
        return (
            f"{self._path} was removed or renamed while the run was going on. Metrics, rollouts and logs until then "
            f"are gone, and so are earlier checkpoints that lay in it; {left if checkpoint else 'no weights are left'}."
        )


def _holds_anything(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _is_alive(pid: str) -> bool:
    """Whether a process of this machine has this number; not while its holder is still writing it down."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, ProcessLookupError):
        return False
    return True
