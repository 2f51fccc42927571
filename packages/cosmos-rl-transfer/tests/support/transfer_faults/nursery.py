"""Processes for trials, forked in a millisecond by one that has all imports done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from transfer_faults.messages import Killing, Order, Report, Role

_PATIENCE_S = 30.0
"""A process that says nothing for so long hangs."""
_ANSWER = msgspec.json.Decoder(Report | Killing)


class Process:
    """A child of the nursery."""

    def __init__(self, line: socket.socket, name: str) -> None:
        line.settimeout(_PATIENCE_S)
        self._line, self._answers, self.name = line, line.makefile("rb"), name
        self.killed_at: float | None = None
        """When it said that it kills somebody."""
        self.asked_at = time.monotonic()
        started = self.hear()
        assert started is not None, f"{name} died at its start"
        self.pid, self.address = started.pid, started.address

    def ask(self, order: Order) -> None:
        """Give an order; the dead take none."""
        self.asked_at = time.monotonic()
        with suppress(ConnectionError):
            self._line.sendall(msgspec.json.encode(order) + b"\n")

    def hear(self) -> Report | None:
        """Return what became of the order; None if the process is dead."""
        while True:
            try:
                text = self._answers.readline()
            except ConnectionError:
                text = b""
            if not text:
                return None
            answer = _ANSWER.decode(text)
            if isinstance(answer, Report):
                return answer
            self.killed_at = answer.at

    def do(self, order: Order) -> Report:
        """Give an order that has to be obeyed."""
        self.ask(order)
        report = self.hear()
        assert report is not None and not report.error, (self.name, order, report)
        return report

    def close(self) -> None:
        """End it, whatever it does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._answers.close()
        self._line.close()


class Nursery:
    """A process with all imports done, which forks the others in a millisecond."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(_PATIENCE_S)
        command = [sys.executable, "-m", "transfer_faults.process", path]
        python_path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)

    def fork(self, role: Role, name: str) -> Process:
        """Return a new process in this role."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(role) + b"\n")
        self._process.stdin.flush()
        return Process(self._listener.accept()[0], name)

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_PATIENCE_S)
        self._listener.close()


@contextmanager
def nursery() -> Iterator[Nursery]:
    """Start one for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        made = Nursery(str(Path(folder) / "line"))
        try:
            yield made
        finally:
            made.close()
