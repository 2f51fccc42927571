"""The run of a controller that died, as the next controller finds it in the run's directory.

no live controller, the same recipe -> generation claimed -> journal replayed -> the same token and port
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cosmos_rl_core.checkpoint.manifest import TrainState
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.address_file import read_controller_file
from cosmos_rl_core.control.journal import Journal, JournalError, claim_generation
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.records import Position
from cosmos_rl_core.control.ledger.state import LedgerConfig
from cosmos_rl_core.control.lifecycle import Predecessor
from cosmos_rl_core.control.server import SECOND
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.interrupts import run_to_end
from cosmos_rl_core.wire.channel import ConnectionClosed, Hello, connect
from cosmos_rl_core.wire.handshake import TOKEN_VARIABLE, OtherVersion, environment_token, read_token
from cosmos_rl_core.wire.listening import parse_address
from cosmos_rl_core.wire.tls import TLS_FILE, read_tls
from cosmos_rl_core.workers.directory import DirectoryInUse, RunDirectory

PROBE_S = 5.0
"""Maximum wait for the answer of a live controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """Takes the place of a dead controller."""

    generation: int
    port: int
    """At which the last controller listened, for workers that know no other."""
    directory: Path

    def evaluated_from(self, version: int) -> int:
        """Return the version whose evaluation is repeated: this one, unless the monitor has checked it."""
        return version + (_newest(self.directory / "monitor.jsonl", having="reward") >= version)

    def predecessor(self, ledger: Ledger) -> Predecessor:
        """Return the newest step and evaluation in the run's files. ledger: replayed from the run's journal."""
        evaluated = self.evaluated_from(ledger.version) - 1
        return Predecessor(
            generation=self.generation, step=_newest(self.directory / "metrics.jsonl"), evaluated=evaluated
        )


def open_directory(path: Path, *, resume: bool, overwrite: bool, continues: bool) -> RunDirectory:
    """As `RunDirectory.open`, and report the attempt to a live controller of the directory."""
    try:
        return RunDirectory.open(path, resume=resume, overwrite=overwrite, continues=continues)
    except DirectoryInUse:
        with contextlib.suppress(UserError):  # it has no controller.json yet
            run_to_end(_answers(read_controller_file(path).address, path))
        raise


def take_over(directory: Path, resolved: str) -> Takeover:
    """Claim the run of a dead controller.

    Raises UserError if that controller is alive, or ran another recipe, or if COSMOS_RL_TOKEN is not the run's token.
    """
    contact = read_controller_file(directory)
    if environment_token() not in (None, read_token(directory / "token")):
        raise UserError(
            f"{directory} contains an earlier run, with another token than {TOKEN_VARIABLE}: continue it with --resume "
            "auto, replace it with --overwrite, or choose another [run] output_dir"
        )
    if run_to_end(_answers(contact.address, directory)):
        raise UserError(
            f"{directory} is in use by a live controller (process {contact.pid} on {contact.host}, generation "
            f"{contact.generation}). Stop it first, or choose another [run] output_dir."
        )
    if (directory / "resolved.toml").read_text() != resolved:
        raise UserError(
            f"{directory} holds a run whose controller died, with another recipe: continue it with the same recipe "
            "and flags, with --resume auto from its newest checkpoint, or replace it with --overwrite"
        )
    generation = claim_generation(directory / "journal", after=contact.generation)
    return Takeover(generation=generation, port=parse_address(contact.address).port, directory=directory)


async def _answers(address: str, directory: Path) -> bool:
    """Return whether a controller of this run listens at an address. It notes this one."""
    hello = Hello(name=f"{re.sub('[^A-Za-z0-9-]', '-', socket.gethostname())[:64]}.{os.getpid()}", role=SECOND)
    try:
        token, path = read_token(directory / "token"), directory / TLS_FILE
        tls = read_tls(path) if path.exists() else None
        live = await connect(address, token=token, hello=hello, decode=p.ToWorker, timeout_s=PROBE_S, tls=tls)
    except OtherVersion:  # of this run or of another one
        return True
    except (ConnectionClosed, UserError):  # UserError: another run listens there now
        return False
    live.close()
    return True


def replay(config: LedgerConfig, journal: Journal) -> Ledger:
    """Return the ledger of a dead controller. Raises JournalError for records of another version."""
    try:
        return Ledger.restore(config, journal.snapshot, journal.replay())
    except msgspec.MsgspecError as error:
        raise JournalError(f"the journal is of another version of cosmos-rl-core ({error})") from error


def open_journal(directory: Path, takeover: Takeover | None) -> Journal:
    """Open the journal of a run, for the controller of this generation alone. Raises JournalError if it is damaged."""
    generation = 0 if takeover is None else takeover.generation
    return Journal(
        directory / "journal",
        generation=generation,
        takes_over=takeover is not None,
    )


def _newest(path: Path, *, having: str = "step") -> int:
    """Return the newest step of the whole lines of a file that have a value; -1 without any."""
    lines = map(json.loads, path.read_bytes().split(b"\n")[:-1]) if path.exists() else ()
    return max((line["step"] for line in lines if having in line), default=-1)


def position_of(state: TrainState) -> Position:
    """Return the stream position of a checkpoint."""
    return Position(state.step, state.next_sample, state.unfinished, state.successes)
