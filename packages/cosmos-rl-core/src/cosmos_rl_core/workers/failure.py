"""How the end of a rank is told: by the rank to the agent that started it, and by the agent to the controller.

    rank    raises: writes down what, and whether it only lost the others           a killed rank writes nothing
    agent   ends the other ranks, finds the cause among all that ended, tells it
    controller ends the run with it

One rank's end breaks the collectives of all others, so that most errors are consequences; the cause is what counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, Hello, connect
from cosmos_rl_core.workers.directory import explain_no_room

AGENT = "agent"
"""Role an agent gives when it connects."""
TELL_S = 5.0
"""Longest that an agent tries to tell of a failure."""
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""What torch's errors say where the other rank of a collective is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one rank ended."""

    message: str
    user: bool = False
    """True: something the user can mend; the message stands alone."""
    consequence: bool = False
    """True: it only lost another rank, or was ended because one had failed."""
    at: float = field(default_factory=time.time)
    """Clock of the machine, in seconds."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Put an error into words, as a worker reports it."""
        if isinstance(error, UserError):
            return cls(message=str(error), user=True)
        if isinstance(error, OSError) and (told := explain_no_room(error, "the run's files")):
            return cls(message=str(told), user=True)
        lost = isinstance(error, ConnectionClosed) or any(words in str(error) for words in _LOST)
        return cls(message=f"{type(error).__name__}: {error}", consequence=lost)

    @property
    def exit_code(self) -> int:
        return 2 if self.user else 1

    def write(self, path: Path) -> None:
        """Leave it where the agent looks; `message` and `timestamp` are what torch's agent reads itself."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({**asdict(self), "timestamp": int(self.at)}))
        partial.rename(path)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Failure | None:
        """Return what a rank wrote, as torch's agent read it; None if it wrote nothing."""
        if "at" not in found:
            return None
        return cls(message=found["message"], user=found["user"], consequence=found["consequence"], at=found["at"])


def cause(failures: Iterable[tuple[int, Failure]]) -> tuple[int, Failure]:
    """Return the rank and failure that brought the others about: the earliest that is no consequence."""
    return min(failures, key=lambda item: (item[1].consequence, item[1].at))


async def tell_controller(address: str, *, token: bytes, replica: str, failure: Failure) -> None:
    """Report a failure and wait until it was heard; if nobody listens any more, nobody wants to know."""
    hello = Hello(name=f"{replica}.{AGENT}", role=AGENT)
    with contextlib.suppress(ConnectionClosed, TimeoutError):
        connection = await connect(address, token=token, hello=hello, decode=p.ToWorker, timeout_s=TELL_S)
        await connection.send(p.Fatal(message=failure.message, user=failure.user))
        await asyncio.wait_for(connection.closed.wait(), TELL_S)


async def hear_agent(connection: Connection, fail: Callable[[BaseException], None]) -> None:
    """The controller's side: end the run with what an agent tells; returning closes the connection."""
    fatal = await connection.receive()
    assert isinstance(fatal, p.Fatal)
    if fatal.user:
        fail(UserError(fatal.message))
    else:
        replica = connection.peer.name.removesuffix(f".{AGENT}")
        fail(WorkerFailed(f"{fatal.message}; the run cannot go on without it. See logs/{replica}.log"))
