"""Reports of failed ranks: from the rank to the agent that started it, and from the agent to the controller.

    rank        writes its error, and whether it is a lost connection to a peer     (a killed rank writes nothing)
    agent       ends the other ranks, finds the cause among all failures, reports it
    controller  ends the run with it

The death of a process of a replica on one machine is not reported: the replica ends, and may be started again.

A failed rank breaks the collectives of all others, so most errors are consequences; only the cause is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.errors import OutOfMemory, UserError, WorkerFailed, WorkerLost
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.wire.channel import Connection, ConnectionClosed, Hello, connect
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_core.workers.directory import explain_no_room

AGENT = "agent"
"""Role in an agent's Hello."""
REPORT_S = 5.0
"""Maximum time for reporting a failure, in seconds."""
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Timed out waiting",  # the other rank hangs
    "Application timeout caused pair closure",  # likewise, in the collectives that follow
)
"""Texts of torch's errors after the loss of the other rank of a collective."""
_FULL = (
    "CUDA out of memory",
    "CUDA error: out of memory",  # of allocations past torch's allocator: a kernel's, NCCL's, pinned host memory
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Failed to CUDA calloc",  # NCCL's buffers
    "Failed to CUDA host alloc",
    "Cuda failure 2 'out of memory'",
    "is less than desired GPU memory utilization",  # vLLM's start
    "No available memory for the cache blocks",
)
"""Texts of errors of other classes for a device, or pinned host memory, that is full."""
_PARTS = {
    "build": "building the model",
    "collate": "collating a batch",
    "forward_backward": "the forward and backward pass",
    "optim_step": "the optimizer step",
    "fence": "copying weights for rollouts",
    "publish": "publishing weights",
    "save": "copying a checkpoint",
}
"""Parts of a worker's work, by the span of its timeline."""


class RefusedByController(UserError):
    """The worker cannot join the run, which continues without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of one rank."""

    message: str
    user: bool = False
    """True: an error that the user can fix; the message is shown alone."""
    out_of_memory: bool = False
    """True: the device has too little memory."""
    consequence: bool = False
    """True: the rank only lost a peer, or was terminated after another one failed."""
    refused: bool = False
    """True: the controller refused the replica."""
    died: bool = False
    """True: the process ended without an error of its own."""
    at: float = field(default_factory=time.time)
    """Time of the failure, in Unix seconds of its machine."""

    @classmethod
    def of(cls, error: Exception, timeline: Timeline | None = None) -> Failure:
        """Return the failure that a worker reports for an error; `timeline`: with the span that failed."""
        if (memory_error := _out_of_memory(error)) is not None:
            part = _PARTS.get(timeline.span_of(memory_error) if timeline else "", "its work")
            reason = str(memory_error).partition(" If reserved ")[0]  # the rest is advice about torch's allocator
            return cls(message=f"out of GPU memory in {part}: {reason}", user=True, out_of_memory=True)
        if isinstance(error, UserError):
            return cls(message=str(error), user=True, refused=isinstance(error, RefusedByController))
        if isinstance(error, OSError) and (explained := explain_no_room(error, "the run's files")):
            return cls(message=str(explained), user=True)
        lost = isinstance(error, ConnectionClosed) or any(text in str(error) for text in _LOST)
        return cls(message=f"{type(error).__name__}: {error}", consequence=lost)

    @property
    def lost(self) -> bool:
        """Whether a process died, here or on another machine, rather than raised an error."""
        return self.died or self.consequence

    @property
    def exit_code(self) -> int:
        return 2 if self.user else 1

    def message_to_controller(self) -> p.Fatal:
        return p.Fatal(message=self.message, user=self.user, out_of_memory=self.out_of_memory, lost=self.lost)

    def write(self, path: Path) -> None:
        """Write the failure for the agent; torch's agent itself reads `message` and `timestamp`."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({**asdict(self), "timestamp": int(self.at)}))
        partial.rename(path)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Failure | None:
        """Return the failure that a rank wrote, from the data that torch's agent read; None if it wrote nothing."""
        if "at" not in written:
            return None
        return cls(**{one.name: written[one.name] for one in fields(cls)})


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """Return the error for a device without free memory, among an error, its causes and what it was raised after."""
    torch = sys.modules.get("torch")  # a worker that has not imported it has used no device
    while torch is not None and error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _FULL):
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def cause(failures: Iterable[tuple[int, Failure]]) -> tuple[int, Failure]:
    """Return the rank and failure that caused the others: the earliest one that is not a consequence."""
    return min(failures, key=lambda item: (item[1].consequence, item[1].at))


async def report_to_controller(
    address: str, *, token: bytes, replica: str, failure: Failure, tls: Tls | None = None
) -> None:
    """Report a failure and wait until the controller closes the connection; no error if the controller is gone."""
    hello = Hello(name=f"{replica}.{AGENT}", role=AGENT)
    with contextlib.suppress(ConnectionClosed, TimeoutError):
        connection = await connect(address, token=token, hello=hello, decode=p.ToWorker, timeout_s=REPORT_S, tls=tls)
        await connection.send(failure.message_to_controller())
        await asyncio.wait_for(connection.closed.wait(), REPORT_S)


async def receive_report(connection: Connection, failed: Callable[[str, Exception], None]) -> None:
    """The controller's side: call `failed(replica, error)`; returning closes the connection."""
    fatal = await connection.receive()
    assert isinstance(fatal, p.Fatal)
    replica = connection.peer.name.removesuffix(f".{AGENT}")
    if fatal.out_of_memory:
        failed(replica, OutOfMemory(fatal.message, role="policy"))
    elif fatal.user:
        failed(replica, UserError(fatal.message))
    else:
        text = f"{fatal.message}; the run cannot continue without it. See logs/{replica}.log"
        failed(replica, WorkerLost(text) if fatal.lost else WorkerFailed(text))
