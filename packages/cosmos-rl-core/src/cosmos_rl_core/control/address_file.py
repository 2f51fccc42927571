"""controller.json in a run's directory: the address of its controller, for workers and for `cosmos-rl scale`.

It is written when the controller listens, replaced by rename, and removed when the run has ended.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec

from cosmos_rl_core.errors import UserError

NAME = "controller.json"
RETRY_S = 0.2


class ControllerFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `<run>/controller.json`."""

    address: str
    """tcp://host:port."""
    generation: int
    """Number of controller restarts from the journal."""
    pid: int
    host: str
    ca: str = ""
    """SHA-256 of the certificate of the run's CA, 64 hex digits; empty without TLS."""

    @classmethod
    def of_this_process(cls, address: str, *, generation: int, ca: str = "") -> ControllerFile:
        return cls(address=address, generation=generation, pid=os.getpid(), host=socket.gethostname(), ca=ca)

    def write(self, run_dir: Path) -> None:
        """Replace the file. Raises OSError."""
        partial = run_dir / f".{NAME}.partial"
        partial.write_bytes(msgspec.json.encode(self) + b"\n")
        partial.replace(run_dir / NAME)

    def remove(self, run_dir: Path) -> None:
        """Remove the file, unless another controller has replaced it."""
        try:
            if read_controller_file(run_dir) == self:
                (run_dir / NAME).unlink(missing_ok=True)
        except UserError:  # it is gone, with the run's directory or without
            return


def wait_for_controller(run_dir: Path, *, timeout_s: float) -> ControllerFile:
    """Return the content of a run's controller.json as soon as there is one. Raises UserError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return read_controller_file(run_dir)
        except UserError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)


def read_controller_file(run_dir: Path) -> ControllerFile:
    """Return the content of a run's controller.json. Raises UserError if there is none."""
    path = run_dir / NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=ControllerFile)
    except FileNotFoundError as error:
        cause = "the run has not started, or has ended" if run_dir.is_dir() else "there is no such directory"
        raise UserError(
            f"{path} is missing: {cause}. Start the run by cosmos-rl controller FILE; on a machine that does not "
            "share its directory, give --controller tcp://host:port and COSMOS_RL_TOKEN instead of --run"
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def present_address(run_dir: Path, *, start: str) -> str:
    """Return the address of a run's controller, which may have been replaced; without controller.json `start`."""
    try:
        return read_controller_file(run_dir).address
    except UserError:  # the controller has not started again, or the run has ended
        return start
