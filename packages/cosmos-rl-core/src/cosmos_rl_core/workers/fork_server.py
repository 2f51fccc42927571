"""A process that imports a run's modules once and forks its workers, which share the memory of the imports.

    with opened() as server:                                             # begins with the modules of every run
        server.load(modules, folders=folders, log=path)
        child = server.start(arguments, environment=..., output=log)     # at once; the fork follows the imports

    run   <--one byte: torch's libraries are open--                                server
          --one byte; descriptors of the modules' names and of a log-->
          --one byte; descriptors of a status socket, the request and the log-->
          <--process id, exit status: on the worker's status socket--

At a fork the server has one thread, no event loop and no GPU: otherwise it ends, and workers are started as commands.
It is the parent of the workers and reports how they end. They do not end with it. After the run it waits for them and
kills rollouts that stay: a call that keeps Python's lock hides the end of the run from its worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from cosmos_rl_core.imports import PYTHON, WORKER, WORKER_MODULE, add_folders
from cosmos_rl_core.processes import ChildProcess, environment, inherited_socket, machine_gpus, unnamed_memory

EVERY_RUN = (WORKER_MODULE, *(f"cosmos_rl_core.workers.{name}" for name in ("policy", "rollout", "steps")))
"""Modules of the workers of every run."""
LONGEST_COMMAND = 4096
"""Bytes for a worker's command line, as `ps` shows it."""
ROLLOUT_S = 10.0
"""Maximum seconds that a rollout worker lives on after the run. Others may save."""
_MOST_DESCRIPTORS = 16
_NUMBER = struct.Struct("i")


class ForkServer:
    """The server of one run. It is closed after its workers have ended."""

    def __init__(self, *, environment: Mapping[str, str]) -> None:
        """Start the server, which begins to import the modules of every run."""
        command = [*PYTHON, "-m", __name__, " " * LONGEST_COMMAND]
        output = unnamed_memory()  # until there is a log
        try:
            self._process, self._socket = ChildProcess.connected(command, environment=environment, output=output)
        finally:
            os.close(output)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server. Its workers go on."""
        self._socket.close()
        if self._process.exit_code is None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_libraries(self) -> None:
        """Wait until the server has opened torch's libraries, which takes two of its threads, or until it has ended."""
        self._socket.recv(1)

    def load(self, modules: Sequence[str], *, folders: Sequence[str] = (), log: Path) -> None:
        """Import the other modules of the run, once; those that cannot be imported are left to the workers.

        folders: the import path of "module:attribute" names. log: the file for output of all imports.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        names = unnamed_memory()
        try:
            os.write(names, json.dumps({"modules": modules, "folders": folders}).encode())
            with log.open("ab") as output, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended
                socket.send_fds(self._socket, [b"\0"], [names, output.fileno()])
        finally:
            os.close(names)

    def start(
        self, arguments: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes], keeps: Sequence[int] = ()
    ) -> ForkedProcess | None:
        """Start a worker with these arguments; None if the server has ended. The others are as in `ChildProcess`."""
        request = unnamed_memory()
        ours, theirs = socket.socketpair()
        try:
            os.write(request, json.dumps({"arguments": arguments, "environment": environment}).encode())
            socket.send_fds(self._socket, [b"\0"], [theirs.fileno(), request, output.fileno(), *keeps])
        except (BrokenPipeError, ConnectionResetError):
            ours.close()
            return None
        finally:
            theirs.close()
            os.close(request)
        return ForkedProcess(_Forked(ours))


@contextlib.contextmanager
def opened() -> Iterator[ForkServer | None]:
    """A server that begins to import; None where workers must not be forked: with GPUs, or not on Linux."""
    if sys.platform != "linux" or machine_gpus(os.environ):
        yield None
        return
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // 2)  # of libraries that do not take torch's number
    with ForkServer(environment=environment(threads=threads)) as server:
        if cores == 2:  # both are the server's: this process has time left until the server needs its modules
            server.wait_for_libraries()
        yield server


class ForkedProcess(ChildProcess):
    """A worker of a fork server."""

    _process: _Forked

    def __init__(self, process: _Forked) -> None:
        self._process, self._ended = process, None

    @property
    def started(self) -> bool:
        """Whether the server has forked it; if it is False after the end, the server had ended, or it was killed."""
        return self._process.started

    @property
    def status(self) -> str:
        return "unknown, its fork server had ended" if self._process.orphaned else super().status

    def kill(self) -> None:
        if self._process.withdraw():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has ended, or has no session of its own yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)


class _Forked:
    """A forked process with the methods of `subprocess.Popen` that `ChildProcess` uses. Safe in several threads."""

    def __init__(self, status: socket.socket) -> None:
        self._socket = status
        self._pid = 0
        self._code = 1
        self._forked, self._ended = threading.Event(), threading.Event()
        self.orphaned = False
        """Whether it ended after its server, so that its exit status is lost."""
        threading.Thread(target=self._follow, name="forked worker", daemon=True).start()

    def _follow(self) -> None:
        """Wait for the fork and the end."""
        with self._socket:
            self._pid = self._receive() or 0
            self._forked.set()
            if self._pid:
                code = self._receive()
                if code is None:
                    _await_end(self._pid)
                    self.orphaned = True
                else:
                    self._code = code
            self._ended.set()

    def _receive(self) -> int | None:
        """The next number; None if the server has ended."""
        data = self._socket.recv(_NUMBER.size, socket.MSG_WAITALL)
        return _NUMBER.unpack(data)[0] if len(data) == _NUMBER.size else None

    @property
    def started(self) -> bool:
        return self._pid > 0

    @property
    def pid(self) -> int:
        """Its id. Waits until it is forked. Raises ProcessLookupError if the server ended before."""
        self._forked.wait()
        if not self._pid:
            raise ProcessLookupError("the fork server ended before it forked this worker")
        return self._pid

    def poll(self) -> int | None:
        return self._code if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("forked worker", timeout or 0.0)
        return self._code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def withdraw(self) -> bool:
        """Take the request back if nothing was forked yet; return whether there is a process to kill."""
        if not self._forked.is_set():
            with contextlib.suppress(OSError):  # the socket was closed meanwhile
                self._socket.shutdown(socket.SHUT_RDWR)
            self._forked.wait()
        return self.started and not self._ended.is_set()


def _await_end(pid: int) -> None:
    """Wait for the end of a process that is not a child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    os.close(handle)


# -- the server's side


def main() -> None:
    server = inherited_socket()
    gc.disable()
    preload_torch()
    with contextlib.suppress(BrokenPipeError):  # the run has ended
        server.send(b"\0")
    _import(EVERY_RUN)
    if (modules := _other_modules(server)) is None:
        return
    _import(modules)
    gc.freeze()  # a collection writes to every object that it visits, and a write copies a shared page
    if _other_threads():  # OpenBLAS ends its own at the first fork
        if pid := os.fork():
            os.waitpid(pid, 0)
        else:
            os._exit(0)
    if number := _other_threads():
        print(f"imports have left {number} threads running: workers are started one by one", file=sys.stderr)  # noqa: T201
        return
    _serve(server)


def preload_torch() -> None:
    """Shorten the import of torch that follows, by 0.15 s: a thread opens its libraries, which takes no lock of Python.

    Meanwhile sympy is imported, which torch needs, and which takes as long. It is Python alone: a compiled module would
    wait for the dynamic loader, so that those of Python's that sympy needs come first.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    _import(("cmath", "decimal", "inspect", "random", "shutil", "unicodedata"))
    opening = threading.Thread(target=_open_libraries, args=(Path(torch.origin).parent / "lib",))
    opening.start()
    _import(("sympy",))
    opening.join()


def _open_libraries(folder: Path) -> None:
    """Open torch's libraries as its import does, which reports what fails."""
    dlopen = ctypes.CDLL(None).dlopen  # a foreign call, unlike ctypes.CDLL(path), releases Python's lock
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    if dlopen(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL):
        dlopen(os.fsencode(folder / "libtorch_python.so"), os.RTLD_NOW)


def _other_threads() -> int:
    return len(os.listdir("/proc/self/task")) - 1


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # the worker that needs it reports the error
            importlib.import_module(module)


def _other_modules(server: socket.socket) -> list[str] | None:
    """Receive the modules and folders of `ForkServer.load`, and continue in its log; None if the run has ended."""
    if not (received := _descriptors(server)):
        return None
    names, log = received
    os.write(log, os.pread(1, os.fstat(1).st_size, 0))
    os.dup2(log, 1)
    os.dup2(log, 2)
    asked = json.loads(os.pread(names, os.fstat(names).st_size, 0))
    os.close(names)
    os.close(log)
    add_folders(asked["folders"])
    return asked["modules"]


def _descriptors(server: socket.socket) -> list[int]:
    """Receive the descriptors of a request; none if the run has ended."""
    try:
        return socket.recv_fds(server, 1, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)[1]
    except ConnectionResetError:  # it has left the first byte unread
        return []


def _serve(server: socket.socket) -> None:
    """Fork on request and report ends, until the run closes its end of the socket."""
    running: dict[int, tuple[int, socket.socket]] = {}
    rollouts: set[int] = set()
    poll = select.poll()
    poll.register(server, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                poll.unregister(descriptor)
                rollouts.discard(descriptor)
                _report_end(descriptor, *running.pop(descriptor))
                continue
            if not (received := _descriptors(server)):
                poll.unregister(server)
                return _end_rollouts(running, poll, rollouts)
            is_rollout = "rollout" in _asked(received[1])["arguments"]  # --role rollout
            status, pid = socket.socket(fileno=received[0]), os.fork()
            if pid == 0:
                server.close()
                for handle, (_, other) in running.items():
                    os.close(handle)
                    other.close()
                _become_worker(status, request=received[1], log=received[2])
            for each in received[1:]:
                os.close(each)
            handle = os.pidfd_open(pid)
            running[handle] = pid, status
            if is_rollout:
                rollouts.add(handle)
            poll.register(handle, select.POLLIN)
            try:
                status.send(_NUMBER.pack(pid), socket.MSG_NOSIGNAL)
            except OSError:  # killed before it was forked
                os.kill(pid, signal.SIGKILL)


def _end_rollouts(running: dict[int, tuple[int, socket.socket]], poll: select.poll, rollouts: set[int]) -> None:
    """Kill rollout workers that have not ended `ROLLOUT_S` after the run."""
    deadline = time.monotonic() + ROLLOUT_S
    while rollouts and (left_s := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(1000 * left_s):
            poll.unregister(handle)
            rollouts.discard(handle)
    for handle in rollouts:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running[handle][0], signal.SIGKILL)


def _asked(request: int) -> dict[str, Any]:
    return json.loads(os.pread(request, os.fstat(request).st_size, 0))


def _report_end(handle: int, pid: int, status: socket.socket) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # the run has ended
        status.send(_NUMBER.pack(code), socket.MSG_NOSIGNAL)
    status.close()
    os.close(handle)


def _become_worker(status: socket.socket, *, request: int, log: int) -> None:
    """Work as the command `python -m cosmos_rl_core.workers.main` does, and exit."""
    code = 1
    try:
        status.close()
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        asked = _asked(request)
        os.close(request)
        os.close(log)
        os.environ.clear()
        os.environ.update(asked["environment"])
        _show_command([*WORKER, *asked["arguments"]])
        gc.enable()
        code = _work(asked["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(arguments: Sequence[str]) -> int:
    import numpy as np
    import torch

    from cosmos_rl_core.workers.main import run_worker
    from cosmos_rl_core.workers.node import from_arguments

    np.random.seed()  # otherwise the same numbers in all workers; Python's and torch's are seeded elsewhere
    worker, node = from_arguments(arguments, program="worker")
    if worker.threads is not None:
        torch.set_num_threads(worker.threads)  # OMP_NUM_THREADS was read in the server
    return run_worker(worker, node, forked=True)


def _show_command(command: Sequence[str]) -> None:
    """Write the command line over the server's, for `ps`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end: proc(5)
    text = b"".join(os.fsencode(word) + b"\0" for word in command)
    if start and len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
