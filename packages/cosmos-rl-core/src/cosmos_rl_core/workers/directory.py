"""The run's directory: its lock, its contents, and detection of removed files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cosmos_rl_core.control.address_file import NAME
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.sinks import set_damage_aside
from cosmos_rl_core.processes import ProcessName
from cosmos_rl_core.wire.handshake import read_token
from cosmos_rl_core.wire.tls import CONTROLLER_TLS_FILE, TLS_FILE

TLS_FILES = (TLS_FILE, CONTROLLER_TLS_FILE)
LEAVING_S = 60.0
"""Maximum wait for the workers of a killed run, which save before they exit."""
RETRY_S = 0.05
CONTENTS = ("logs", "rollouts", "spans", "system", "journal", "checkpoints")
LOGS = ("metrics.jsonl", "eval.jsonl", "monitor.jsonl", "rows_dropped.jsonl")
"""Files that a resumed run continues; a damaged line in them does not prevent resuming."""
RECIPE = "resolved.toml"
FILES = (
    RECIPE,
    "rows.jsonl",
    "eval_rows.jsonl",
    *LOGS,
    "timeline.json",
    "status.json",
    "status.jsonl",
    "run.json",
    "outcome.json",
    "events.jsonl",
    "token",
    "agent_token",
    *TLS_FILES,
    NAME,
)
WATCHED = ("journal", "metrics.jsonl", "eval.jsonl", "resolved.toml")
"""Files whose removal during the run is reported. Checkpoints are watched by `checkpoint.saver`."""
NO_ROOM = {errno.ENOSPC: "no space left", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file is too big"}
"""Description of an OSError of a full disk, by its errno."""


def explain_no_room(error: OSError, place: Path | str) -> UserError | None:
    """Return a UserError for a full disk, or None for any other error."""
    what = NO_ROOM.get(error.errno or 0)
    if what is None:
        return None
    return UserError(
        f"{what} for {error.filename or place}; what was written so far is kept. Free space there and continue "
        "with --resume auto, or choose another [run] output_dir."
    )


class DirectoryInUse(UserError):
    """A live run has the lock of the directory."""


@dataclass(slots=True)
class RunDirectory:
    """An output directory, locked by one live run at a time.

    directory = RunDirectory.open(path, resume=False, overwrite=False)
    ...
    directory.close()
    """

    path: Path
    _lock: IO[str]
    notes: tuple[str, ...] = ()
    """Messages for the user about damaged files of the earlier run."""
    is_orphaned: bool = False
    """Whether it is that of a run whose controller died, and whose journal and token are kept."""

    @classmethod
    def open(cls, path: Path, *, resume: bool, overwrite: bool, continues: bool = False) -> RunDirectory:
        """Create or reopen the directory. Raises UserError if a live run uses it, or if it would be overwritten.

        continues: a run whose controller died is kept for the next one, unless it is resumed or overwritten.

        A new directory gets mode 0700, as prompts, rollouts and weights are stored in it. An existing one keeps its
        mode.
        """
        with contextlib.ExitStack() as unless_held:
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)  # the mode applies to the last folder only
                lock = unless_held.enter_context((path / "run.lock").open("a+"))
                directory = cls(path, lock)
                directory._claim(resume=resume, overwrite=overwrite, continues=continues)
            except OSError as error:
                if explained := explain_no_room(error, path):
                    raise explained from error
                what = error.strerror if error.filename in (None, str(path)) else f"{error.filename}: {error.strerror}"
                raise UserError(f"cannot use {path} as [run] output_dir: {what}") from error
            unless_held.pop_all()
        return directory

    def _claim(self, *, resume: bool, overwrite: bool, continues: bool) -> None:
        """Lock the directory and prepare it for a new or resumed run, or for the next controller of a live one."""
        path, lock = self.path, self._lock
        self._take_lock()
        self.is_orphaned = continues and _lost_its_controller(path) and not resume and not overwrite
        if (path / RECIPE).exists() and not resume and not self.is_orphaned:
            if not overwrite:
                raise UserError(
                    f"{path} contains an earlier run. Continue it with --resume auto, replace it with --overwrite, "
                    "or choose another [run] output_dir."
                )
            self._clear()
        self.notes = tuple(filter(None, (set_damage_aside(path / name) for name in LOGS)))
        if not self.is_orphaned:
            shutil.rmtree(path / "journal", ignore_errors=True)  # like the token, it belongs to one run of the recipe
            shutil.rmtree(path / "endpoints", ignore_errors=True)
            for name in ("token", "agent_token", *TLS_FILES, NAME):
                (path / name).unlink(missing_ok=True)
        lock.truncate(0)
        lock.write(f"{ProcessName.of_this_process().text}\n")
        lock.flush()
        for name in CONTENTS:
            (path / name).mkdir(exist_ok=True)

    def _take_lock(self) -> None:
        """Take the lock; wait for the workers of a killed run to exit. Raises UserError if a live run has it."""
        deadline = time.monotonic() + LEAVING_S
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._lock.seek(0)
                holder = ProcessName.parse(self._lock.read())
                if (holder is not None and holder.is_alive) or time.monotonic() > deadline:
                    raise DirectoryInUse(
                        f"{self.path} is in use by a live run ({holder or 'which just starts'}). Wait for it, stop it, "
                        "or choose another [run] output_dir."
                    ) from error
            time.sleep(RETRY_S)

    @property
    def lock(self) -> int:
        """The lock's file descriptor; the lock is held while any process has it open."""
        return self._lock.fileno()

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def _clear(self) -> None:
        """Remove the files that a run writes, and nothing else."""
        for name in (*CONTENTS, "tensorboard", "media", "endpoints"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)


def holds_earlier_run(path: Path, *, continues: bool) -> bool:
    """Return whether a new run would replace an earlier one; with `continues` not if the latter only lost its
    controller."""
    return (path / RECIPE).exists() and not (continues and _lost_its_controller(path))


def _lost_its_controller(path: Path) -> bool:
    return (path / NAME).exists() and any((path / "journal").glob("*.journal"))  # an ended run removes NAME


def why_unusable(path: Path) -> str:
    """Return the reason that no files can be written in a directory, or in the nearest one that exists; or ""."""
    nearest = next(place for place in (path, *path.parents) if place.exists())
    try:
        if nearest == path:
            tempfile.TemporaryFile(dir=nearest).close()
        else:
            os.rmdir(tempfile.mkdtemp(dir=nearest))
    except OSError as error:
        return f"cannot be used: {nearest}: {error.strerror}"
    return ""


def lock_holder(run_dir: Path) -> ProcessName | None:
    """Return the process that its lock names as the holder of a run's directory; None if nothing holds it.

    After the end of that process a policy that saves may still hold it.
    """
    try:
        with (run_dir / "run.lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return ProcessName.parse(lock.read())
    except FileNotFoundError:
        pass
    return None


def shares_directory(run_dir: Path, *, token: bytes) -> bool:
    """Return whether this machine has the run's directory at this path, by the token in it."""
    try:
        return read_token(run_dir / "token") == token
    except UserError:
        return False


def directory_of_worker(run_dir: Path) -> Path:
    """Return a directory for a worker on a machine that does not share `run_dir`: the same path, or a temporary one."""
    try:
        (run_dir / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        run_dir = Path(tempfile.mkdtemp(prefix="cosmos-rl-"))
        (run_dir / "logs").mkdir()
    return run_dir


class Removals:
    """Detects removed files in the directory of a live run.

    removals = Removals(path, lock=directory.lock)
    for text in removals.check(): ...        # periodically; each loss is reported once
    """

    def __init__(self, path: Path, *, lock: int) -> None:
        self.lost = False
        """Whether the directory itself was removed or replaced."""
        self._path = path
        self._lock = os.fstat(lock)
        self._seen: set[str] = set()

    def check(self) -> list[str]:
        """Return a message for each removal since the last check."""
        if self.lost:
            return []
        present = {name for name in WATCHED if _holds_anything(self._path / name)}
        try:
            self.lost = not os.path.samestat(os.stat(self._path / "run.lock"), self._lock)
        except FileNotFoundError:
            self.lost = True
        if self.lost:
            return [f"{self._path} was removed or renamed during the run; the current step is finished and saved"]
        gone, self._seen = self._seen - present, present
        return [f"{self._path / name} was removed during the run; the run continues" for name in sorted(gone)]

    def explain(self, *, step: int, checkpoint: str) -> str:
        """Return a message for a lost directory; `checkpoint` has the weights of `step`, empty if there are none."""
        left = f"the weights of step {step} are in {checkpoint}; continue from there with --resume auto"
        return (
            f"{self._path} was removed or renamed during the run. Metrics, rollouts and logs until then "
            f"are gone, and so are earlier checkpoints in it; {left if checkpoint else 'no weights are left'}."
        )


def _holds_anything(path: Path) -> bool:
    try:
        return any(path.iterdir())
    except NotADirectoryError:
        return True
    except FileNotFoundError:  # also if it is removed at this moment
        return False
