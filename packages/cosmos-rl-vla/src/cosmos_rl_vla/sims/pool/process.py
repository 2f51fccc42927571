"""The process of one group of slots, as the pool sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path

import msgspec

import cosmos_rl_core
import cosmos_rl_vla
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.python_path import PYTHON
from cosmos_rl_vla.sims.pool.messages import Command, Reply

_LAST_LINES = 40
_LAST_BYTES = 8192


class GroupProcess:
    """A process that was started; it is killed at `kill`, and ends by itself when this one does."""

    def __init__(self, *, memory: int, lifeline: int, python: str | None) -> None:
        self.last_words = ""
        """The last lines it printed; known once it has ended."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `kill`; a pipe would block when nobody reads
        self.connection, theirs = Pipe()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        descriptors = (theirs.fileno(), memory, lifeline)
        flags = ("--commands", "--memory", "--lifeline")
        try:
            self._process = subprocess.Popen(
                [
                    *((python,) if python else PYTHON),
                    *("-m", "cosmos_rl_vla.sims.pool.worker"),
                    *(word for flag, number in zip(flags, descriptors) for word in (flag, str(number))),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_environment(own=python is not None),
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C in the terminal is for the pool
            )
        except OSError as error:
            self.connection.close()
            self._log.close()
            raise UserError(f"cannot run {python} for a simulator: {error.strerror}") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Send a command. To a process that is dead nothing is sent: `receive` raises EOFError."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(msgspec.msgpack.encode(command))

    def receive(self) -> Reply:
        """Return the next reply. Raises EOFError where the process has ended."""
        try:
            return self._decoder.decode(self.connection.recv_bytes())
        except ConnectionResetError as error:
            raise EOFError from error

    def kill(self) -> str:
        """End the process and what it has started, and return how it ended: "exit code 1" or "signal SIGKILL"."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its session: also what it has started
        code = self._process.wait()
        if not self._log.closed:
            self.last_words = self._end_of_log()
            self._log.close()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def end(self, *, patience_s: float) -> str:
        """Wait a moment for a process whose end is closed, kill it if it stays, and return how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        return self.kill()

    def _end_of_log(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode(errors="replace")
        return "\n".join(text.strip().splitlines()[-_LAST_LINES:])


def _environment(*, own: bool) -> Mapping[str, str]:
    """Return the variables of a simulator's process; one with its `own` Python imports of ours these packages alone."""
    packages = [str(Path(package.__path__[0]).parent) for package in (cosmos_rl_core, cosmos_rl_vla)]
    path = list(dict.fromkeys(packages)) if own else [str(Path(folder).resolve()) for folder in sys.path]
    threads = {"OMP_NUM_THREADS": "1"}  # processes share the cores already
    return {**threads, **os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
