"""Runs of elastic.py: the command as a user calls it, and files and processes as seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

T = TypeVar("T")
PROGRAM = str(Path(sys.executable).with_name("cosmos-rl"))
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "elastic"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
POLL_S = 0.002
TIMEOUT_S = 300.0
END_S = 30.0


class Lines:
    """Follows a file to which another process appends lines of JSON."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Return the whole lines since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Failed(Exception):
    """A side did not get as far as it must; has the end of its output."""


def wait_until(condition: Callable[[], T], what: str, *, log: Path, timeout_s: float = TIMEOUT_S) -> T:
    """Return the first true value of `condition`. Raises Failed."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Failed(f"waited {timeout_s:g} s for {what}:\n{log.read_text()[-3000:]}")
        time.sleep(POLL_S)
    return value


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process whose output goes to `log`; interrupt it at the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process, and kill it if it goes on."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write_recipe(name: str, tables: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write a recipe whose run has a new directory; return both paths."""
    run_dir = CACHE / name
    shutil.rmtree(run_dir, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"{name}.toml"
    path.write_text(tomli_w.dumps({**tables, "run": {**tables["run"], "output_dir": str(run_dir)}}))
    return path, run_dir


def log_of(name: str) -> Path:
    """Return an empty file for a side's output."""
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"{name}.log"
    path.write_bytes(b"")
    return path


def pid_of(run_dir: Path, name: str) -> int | None:
    """Return the process of a worker, from the process table."""
    token = str(run_dir / "token").encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if token in words and name.encode() in words:
                    return int(entry.name)
    return None
