"""Child processes: start, end, exit status, the last lines of their logs, and the GPUs of each. Names of processes.

    child = ChildProcess([*PYTHON, "-m", "module"], environment=environment(folders), output=log)
    status = await child.ended()             # or child.wait(2.0): "exit code 1", "signal SIGKILL"
    child.kill()                             # and everything it has started

    child, ours = ChildProcess.connected(...)           # and a socket, whose other end is the child's:
    theirs = inherited_socket(); end_with(theirs)       # in the child, which then ends with its parent

A child has a session of its own: Ctrl-C in the terminal reaches the parent alone, which decides what to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from cosmos_rl_core.gpus import VISIBLE_GPUS
from cosmos_rl_core.imports import PYTHON, child_environment

T = TypeVar("T")
STACKS = signal.SIGURG
"""Signal on which a worker writes the stacks of its threads to its log. A process without a handler ignores it."""
GRACE_S = 2.0
"""Maximum seconds that a process runs after its connection to the parent was closed."""
LAST_LINES = 12
"""Number of lines shown of a dead process's log."""
_LAST_BYTES = 16384
_POLL_S = 0.25
"""Seconds between two checks of processes that have outlived the one that started them."""


class ChildProcess:
    """A process that was started. Its methods may be called after its end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: IO[bytes] | int | None,
        keeps: Sequence[int] = (),
    ) -> None:
        """Start the process. Raises OSError.

        output: gets stdout and stderr; None: those of this process. keeps: inherited descriptors.
        """
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=environment,
            pass_fds=keeps,
            start_new_session=True,
        )
        self._ended: asyncio.Future[str] | None = None

    @classmethod
    def connected(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        keeps: Sequence[int] = (),
    ) -> tuple[ChildProcess, socket.socket]:
        """Start a process with a socket to it and return both. The child's descriptor is its last argument."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                arguments, kept = [*command, str(theirs.fileno())], (*keeps, theirs.fileno())
                return cls(arguments, environment=environment, output=output, keeps=kept), ours
            except BaseException:
                ours.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As subprocess reports it: -9 after SIGKILL, None while it runs."""
        return self._process.poll()

    @property
    def status(self) -> str:
        """The cause of its end: "exit code 1" or "signal SIGKILL"; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait for its end and return `status`; empty if it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.status

    def release(self) -> None:
        """Let it outlive this process; nobody waits for its end."""
        self._process.returncode = 0  # Python complains about a child that is dropped without a known end

    async def ended(self) -> str:
        """Wait for its end on the running event loop and return `status`."""
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._ended = loop.create_future()
            watch = threading.Thread(target=self._watch, args=(loop, self._ended), name="wait for a child", daemon=True)
            watch.start()
        return await asyncio.shield(self._ended)

    def _watch(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[str]) -> None:
        status = self.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(ended.set_result, status)

    def kill(self) -> None:
        """Kill it and all processes it has started. Does not wait."""
        if self.exit_code is None:
            kill_tree(self.pid)  # children with sessions of their own
        _kill_session(self.pid)


class OrphanGuard:
    """A process that kills others if they outlive this one: those that are stopped, or in which no thread runs because
    one keeps Python's lock, do not end by themselves.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        code = f"from {__name__} import kill_orphans; kill_orphans()"
        self._process, self._socket = ChildProcess.connected(
            [*PYTHON, "-c", code], environment=environment(), output=subprocess.DEVNULL
        )

    def watch(self, pid: int, *, grace_s: float) -> None:
        """Kill the leader of a session, and all it has started, if it runs `grace_s` after the end of this process."""
        self._send(f"{pid} {grace_s}")

    def forget(self, pid: int) -> None:
        """Do not kill it: it has ended."""
        self._send(str(pid))

    def close(self) -> None:
        """End the guard: nothing is watched any more."""
        self._process.kill()  # first: at the end of the socket it would kill what it watches
        self._process.wait()
        self._socket.close()

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody has killed the guard; without it processes end as well
            self._socket.sendall(f"{line}\n".encode())


def kill_orphans() -> None:
    """Work as an `OrphanGuard` until the process that has started it ends, and all that it watches have ended."""
    watched: dict[int, float] = {}
    with inherited_socket() as inherited, inherited.makefile("r") as lines:
        for line in lines:
            pid, *grace_s = line.split()
            watched.pop(int(pid), None)
            watched |= {int(pid): float(limit) for limit in grace_s}
    closed = time.monotonic()
    while watched := {pid: grace_s for pid, grace_s in watched.items() if is_alive(pid)}:
        for pid, grace_s in watched.items():
            if time.monotonic() - closed >= grace_s:
                kill_tree(pid)
                _kill_session(pid)
        time.sleep(_POLL_S)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


async def all_ended(children: Iterable[ChildProcess], *, timeout_s: float | None = None) -> bool:
    """Wait for all children; return whether they have ended within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(child.ended() for child in children))
    except TimeoutError:
        return False
    return True


def environment(
    folders: Sequence[str] = (), *, threads: int | None = None, gpus: Sequence[str] | None = None
) -> dict[str, str]:
    """Return the variables of a child process: this one's, with CPU threads and GPUs if given.

    folders: the import path of "module:attribute" names. gpus: all that it sees; an empty sequence is the CPU.
    """
    return {**os.environ, **child_variables(folders, threads=threads, gpus=gpus)}


def child_variables(
    folders: Sequence[str] = (), *, threads: int | None = None, gpus: Sequence[str] | None = None
) -> dict[str, str]:
    """Return those of `environment` that a child process has beside this one's."""
    variables = {**child_environment(folders), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    if gpus is not None:
        variables[VISIBLE_GPUS] = ",".join(gpus)
    return variables


def last_lines(log: Path | IO[bytes], *, count: int = LAST_LINES) -> str:
    """Return the end of a log, which its process may still have open, or a note that there is nothing to read."""
    if isinstance(log, Path):
        try:
            with log.open("rb") as file:
                return last_lines(file, count=count)
        except OSError as error:  # such as a run whose folder was deleted
            return f"(its log cannot be read: {error})"
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), _LAST_BYTES, max(0, size - _LAST_BYTES)).decode(errors="replace")
    return "\n".join(text.splitlines()[-count:]) or "(its log is empty)"


def write_stacks_on_signal() -> None:
    """Let `STACKS` write the stacks of all threads to standard error, a worker's log; also while C code runs."""
    faulthandler.register(STACKS, all_threads=True, chain=False)


def inherited_socket() -> socket.socket:
    """Return the child's end of the socket of `ChildProcess.connected`."""
    return socket.socket(fileno=int(sys.argv[-1]))


def end_with(inherited: socket.socket, *, grace_s: float = GRACE_S) -> None:
    """End this process `grace_s` after its parent has closed the socket or has ended."""
    _end_after(inherited.fileno(), 0, grace_s=grace_s)  # a hang-up is always reported


def end_after(pid: int) -> None:
    """End this process when process `pid` of this machine has ended; elsewhere than on Linux do nothing."""
    if sys.platform != "linux":
        return
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    _end_after(ended, select.POLLIN, grace_s=0.0)


def in_daemon_thread(work: Callable[[], T], *, name: str) -> Future[T]:
    """Run blocking work in a thread that does not keep this process from ending, unlike those of an executor."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _end_after(fd: int, events: int, *, grace_s: float) -> None:
    def watch() -> None:
        polled = select.poll()
        polled.register(fd, events)
        polled.poll()
        time.sleep(grace_s)  # a process that is idle ends by itself
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


class ProcessName(NamedTuple):
    """A process among those of all machines."""

    pid: int
    host: str
    """Host name of its machine."""
    started: str
    """Its start in clock ticks since its machine's: pods have the same ids and host names one after the other."""

    @classmethod
    def of_this_process(cls) -> ProcessName:
        return cls(os.getpid(), socket.gethostname(), _started(os.getpid()))

    @classmethod
    def parse(cls, text: str) -> ProcessName | None:
        """Return the process that `text` names; None if it names none."""
        pid, host, started, *_ = (*text.split(), "", "", "")
        return cls(int(pid), host, started) if pid.isdecimal() else None

    @property
    def text(self) -> str:
        """The text for `parse`."""
        return " ".join([str(self.pid), self.host, self.started])

    @property
    def is_here(self) -> bool:
        """Whether its machine has the name of this one."""
        return self.host in ("", socket.gethostname())

    @property
    def is_alive(self) -> bool:
        """Whether it is a process of this machine that has not ended."""
        return self.is_here and is_alive(self.pid) and self.started in ("", _started(self.pid))

    def __str__(self) -> str:
        return f"process {self.pid}" if self.is_here else f"process {self.pid} of {self.host}"


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine has this id and has not ended."""
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except PermissionError:
        return True  # it belongs to another user
    except (ProcessLookupError, OverflowError):
        return False
    if fields := _stat(pid):
        return fields[0] != "Z"  # its parent has not asked for its exit status yet
    return not Path("/proc/self/stat").exists()  # no Linux, or it has ended meanwhile


def process_tree(root: int) -> list[int]:
    """Return a process and all that it has started, directly or not, that still run; elsewhere than on Linux itself."""
    tree = [root]
    for pid in tree:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread, or its process, has ended
                tree += [int(child) for child in children.read_text().split()]
    return tree


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process so far, its threads included; 0 for one that there is not."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def resident_bytes(pid: int) -> int:
    """Return the memory of a process that is not swapped out; 0 for one that there is not."""
    fields = _stat(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def kill_tree(root: int) -> None:
    """Kill a process of this machine and all that it has started, directly or not: parents before their children.

    A child that it starts meanwhile, and elsewhere than on Linux any child, is not killed.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(entry.name)):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, ())
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _started(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent and so on; none without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def unnamed_memory() -> int:
    """Return a descriptor of anonymous memory to share with child processes: of size 0, freed with its last user."""
    if sys.platform == "linux":
        return os.memfd_create("cosmos-rl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def rdma_devices(*, devices: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return this machine's RDMA devices: InfiniBand, RoCE."""
    return sorted(device.name for device in devices.iterdir()) if devices.is_dir() else []
