"""Runs Python programs in processes that have no files, no network, no other processes, and limits.

    sandbox = Sandbox(SandboxOptions(timeout_s=2.0))
    result = await sandbox.run("print(input() * 2)", stdin="ab")      # or sandbox.run_blocking(...)
    result.status, result.stdout                                      # "passed", "abab\\n"

The first run starts a fork server, a clean interpreter without site-packages, and logs a line for each layer of
protection. This process never runs a program itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec
from pydantic import Field

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Check
from cosmos_rl_core.processes import ChildProcess, last_lines
from cosmos_rl_core.settings.base import Strict

log = logging.getLogger(__name__)
Layer = Literal["namespaces", "mounts", "landlock", "seccomp"]
Status = Literal["passed", "error", "timeout", "memory", "output", "unprotected"]
MIB = 2**20
START_S = 120.0
"""Maximum time of the fork server's start, on a busy machine."""
END_S = 10.0
"""Maximum time in which the fork server ends by itself."""
_HOME = str(Path(__file__).parent)
_LENGTH_BYTES = 8
_CHUNK = 1 << 16
_ROOTS = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")


class SandboxOptions(Strict):
    """Limits of each program, and the protection of the machine."""

    timeout_s: float = Field(default=5.0, gt=0)
    """Maximum time of the processor in a run, so that other processes do not change a result; four times as much of the
    clock."""
    memory_bytes: int = Field(default=512 * MIB, ge=64 * MIB)
    """Maximum address space of a program."""
    output_bytes: int = Field(default=64 * 1024, ge=1)
    """Maximum size of what a program writes to stdout, and to stderr; then it is killed."""
    files_bytes: int = Field(default=16 * MIB, ge=1)
    """Maximum size of all its files together: they are in memory, and gone when it ends."""
    at_once: int | None = Field(default=None, ge=1)
    """Maximum number of concurrent runs. Not set: the number of processors."""
    packages: tuple[str, ...] = ()
    """Modules of this environment that programs may import, such as "numpy"; they are imported once. Not set: only
    Python's own."""
    layers: tuple[Layer, ...] = get_args(Layer)
    """Layers of protection that are used where the machine has them."""
    bubblewrap: Literal["auto", "always", "never"] = "auto"
    """Start the fork server by bubblewrap (`bwrap`): "auto" does where the kernel has no Landlock."""
    unprotected: bool = False
    """Run programs even where files or the network are not protected from them. Only inside a virtual machine or a
    container that has nothing to lose."""


class SandboxResult(msgspec.Struct, frozen=True, kw_only=True):
    """A program's end."""

    status: Status
    """passed: it has ended with exit code 0. error: with another one, or by a signal."""
    exit_code: int
    """Minus the signal's number, of a program that was killed."""
    stdout: str
    stderr: str
    seconds: float


class SandboxLost(ConnectionError):
    """The sandbox's own process has ended, such as by a shortage of memory; another run may succeed."""


class SandboxLayers(msgspec.Struct, frozen=True):
    """The layers that a fork server has."""

    missing: dict[str, str]
    """Reasons by layer."""
    landlock: int
    nobody: bool
    """Whether it has given up root."""
    scratch: str
    """The folder of a program's own files."""
    bubblewrap: bool = False

    @property
    def has_files(self) -> bool:
        """Whether the machine's files are protected: by Landlock, or by bubblewrap with /proc hidden."""
        return "landlock" not in self.missing or (self.bubblewrap and "mounts" not in self.missing)

    def checks(self) -> Iterator[Check]:
        """Yield a line for each layer."""
        texts = {
            "namespaces": "users, processes, network, IPC and mounts of its own",
            "mounts": f"all files read-only, and {self.scratch} of limited size" if self.scratch else "read-only",
            "landlock": f"version {self.landlock}: reads Python's own folders, and nothing else",
            "seccomp": "no sockets, processes, programs or kernel interfaces",
        }
        needed = {"landlock": self.has_files, "seccomp": "seccomp" not in self.missing}
        for layer, text in texts.items():
            if (reason := self.missing.get(layer)) is None:
                yield Check("ok", f"sandbox: {layer}", text)
            elif needed.get(layer, True):
                yield Check("note", f"sandbox: {layer}", reason, _WITHOUT[layer])
            else:
                yield Check("bad", f"sandbox: {layer}", reason, f"{_WITHOUT[layer]}; see docs/sandbox.md")
        if self.bubblewrap:
            yield Check("ok", "sandbox: bubblewrap", "an empty root with Python's own folders")
        user = "nobody" if self.nobody else "this process's, without privileges"
        yield Check("ok", "sandbox: limits", f"user {user}; time, memory, output, threads and open files")


_WITHOUT = {
    "namespaces": "programs may not send signals instead; user namespaces are a setting of the kernel or the container",
    "mounts": "programs cannot write files instead",
    "landlock": "install bubblewrap, or use a kernel from 5.13 on with Landlock",
    "seccomp": "use a kernel with seccomp filters on x86_64 or aarch64",
}


class _Server(NamedTuple):
    """A fork server of this process."""

    control: socket.socket
    report: SandboxLayers
    pid: int
    """The process that has started it: a fork of that one needs another."""
    end: Callable[[], object]
    """Ends it; called with the sandbox's end, or with this process's."""


class Sandbox:
    """Runs programs, each in a process of its own."""

    def __init__(self, options: SandboxOptions | None = None) -> None:
        self.options = options or SandboxOptions()
        self._server: _Server | None = None
        self._starting = threading.Lock()
        self._free: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def started(self) -> SandboxLayers:
        """Return the layers of the fork server, which is started if it does not run.

        Raises UserError where it cannot protect the machine, unless `unprotected` is set.
        """
        with self._starting:
            if self._server is None or self._server.pid != os.getpid():
                self._server = self._start()
            return self._server.report

    def run_blocking(
        self, source: str, stdin: str = "", *, timeout_s: float | None = None, memory_bytes: int | None = None
    ) -> SandboxResult:
        """Run a program and return its end. timeout_s, memory_bytes: in place of the options'.

        Raises UserError as `started`, and SandboxLost.
        """
        request = self._request("program", source, stdin, timeout_s, memory_bytes)
        with self._connect() as connection:
            connection.sendall(request)
            return _result(b"".join(iter(lambda: connection.recv(_CHUNK), b"")))

    async def run(
        self, source: str, stdin: str = "", *, timeout_s: float | None = None, memory_bytes: int | None = None
    ) -> SandboxResult:
        """As `run_blocking`, at most `at_once` at a time. A call that is cancelled kills the program."""
        request = self._request("program", source, stdin, timeout_s, memory_bytes)
        await asyncio.to_thread(self.started)
        async with self._room():
            return await _exchange(self._connect(), request)

    async def run_tests(self, answer: str, tests: str) -> tuple[SandboxResult, SandboxResult | None]:
        """Run tests that call the names of an answer, each in a process: the tests' end, and the answer's if they fail.

        The tests' exit codes are those of `inside.remote`.
        """
        late = self.options.timeout_s + 1.0  # the answer's limit comes first, and ends the channel
        requests = self._request("answer", answer, "", None, None), self._request("tests", tests, "", late, None)
        await asyncio.to_thread(self.started)
        async with self._room():
            ours, theirs = socket.socketpair()
            with ours, theirs:
                connections = self._connect(theirs), self._connect(ours)
            answering = asyncio.create_task(_exchange(connections[0], requests[0]))
            try:
                result = await _exchange(connections[1], requests[1])
                return result, None if result.status == "passed" else await answering
            finally:
                answering.cancel()

    def _room(self) -> asyncio.Semaphore:
        """Return the limit of concurrent runs on the running event loop."""
        loop = asyncio.get_running_loop()
        if self._free is None or self._free[0] is not loop:
            self._free = loop, asyncio.Semaphore(self.options.at_once or len(os.sched_getaffinity(0)))
        return self._free[1]

    def _request(self, role: str, source: str, stdin: str, timeout_s: float | None, memory_bytes: int | None) -> bytes:
        options = self.options
        request = {
            "role": role,
            "source": source.encode(errors="replace").decode(),
            "stdin": stdin.encode(errors="replace").decode(),
            "timeout_s": timeout_s or options.timeout_s,
            "memory_bytes": memory_bytes or options.memory_bytes,
            "output_bytes": options.output_bytes,
        }
        data = msgspec.json.encode(request)
        return len(data).to_bytes(_LENGTH_BYTES) + data

    def _connect(self, channel: socket.socket | None = None) -> socket.socket:
        """Return the socket of a new run, which takes one request; a program whose socket is closed is killed."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [each.fileno() for each in (theirs, channel) if each is not None]
            try:
                self.started()
                assert self._server is not None
                socket.send_fds(self._server.control, [b"r"], descriptors)
            except BaseException as error:
                ours.close()
                if not isinstance(error, BrokenPipeError):
                    raise
                if self._server is not None:
                    self._server.end()
                self._server = None  # the next run starts another
                raise SandboxLost("the sandbox's server has ended") from error
        return ours

    def _start(self) -> _Server:
        if sys.platform != "linux":
            raise UserError(f"the sandbox runs programs on Linux alone, and this is {sys.platform}; use a container")
        way, bwrap = self.options.bubblewrap, shutil.which("bwrap")
        if way == "always" and bwrap is None:
            raise UserError('bubblewrap = "always", and there is no bwrap here; install bubblewrap')
        server = self._fork_server(bwrap if way == "always" else None)
        if way == "auto" and bwrap and "landlock" in self.options.layers and not server.report.has_files:
            server.end()
            server = self._fork_server(bwrap)
        lines = list(server.report.checks())
        for line in lines:
            (log.warning if line.level == "bad" else log.info)("%s: %s", line.name, line.text)
        if not self.options.unprotected and (bad := [line for line in lines if line.level == "bad"]):
            server.end()
            raise UserError(
                "the sandbox cannot protect this machine from the programs of a model: "
                + "; ".join(f"{line.name.removeprefix('sandbox: ')}: {line.text}, {line.fix}" for line in bad)
                + "; in a machine that has nothing to lose set unprotected = true"
            )
        return server

    def _fork_server(self, bwrap: str | None) -> _Server:
        python, options = os.path.realpath(sys.executable), self.options
        folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if options.packages else []
        settings = {
            "home": _HOME,
            "layers": options.layers,
            "files_bytes": options.files_bytes,
            "packages": options.packages,
            "folders": folders,
        }
        code = f"import sys; sys.path.insert(0, {_HOME!r}); from inside.server import main; main()"
        command = [python, "-S", "-s", "-P", "-X", "utf8", "-c", code, msgspec.json.encode(settings).decode()]
        if bwrap:
            command = [*_bubblewrap(bwrap, [sys.base_prefix, _HOME, *folders]), *command]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        variables = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **threads}
        if libraries := os.environ.get("LD_LIBRARY_PATH"):  # some interpreters need it
            variables["LD_LIBRARY_PATH"] = libraries
        with tempfile.TemporaryFile() as output:
            process, control = ChildProcess.connected(command, environment=variables, output=output)
            control.settimeout(START_S)
            try:
                with control.makefile("rb") as lines:
                    line = lines.readline()
            except TimeoutError:
                line = b""
            if not line:
                _end(process, control, os.getpid())
                raise UserError(f"the sandbox's server did not start ({process.status}): {last_lines(output, count=1)}")
        control.settimeout(None)
        report = msgspec.structs.replace(_REPORT.decode(line), bubblewrap=bool(bwrap))
        return _Server(control, report, os.getpid(), weakref.finalize(self, _end, process, control, os.getpid()))


_REPORT = msgspec.json.Decoder(SandboxLayers)
_RESULT = msgspec.json.Decoder(SandboxResult)


def _end(process: ChildProcess, control: socket.socket, pid: int) -> None:
    control.close()
    if os.getpid() != pid:  # a fork of the process that has the server
        process.release()
    elif not process.wait(END_S):
        process.kill()
        process.wait()


async def _exchange(connection: socket.socket, request: bytes) -> SandboxResult:
    loop, parts = asyncio.get_running_loop(), []
    with connection:
        connection.setblocking(False)
        await loop.sock_sendall(connection, request)
        while part := await loop.sock_recv(connection, _CHUNK):
            parts.append(part)
    return _result(b"".join(parts))


def _result(reply: bytes) -> SandboxResult:
    if not reply:
        raise SandboxLost("a process of the sandbox has ended without a result")
    result = _RESULT.decode(reply)
    if result.status == "unprotected":
        raise SandboxLost(f"a program was not run, as a layer of its protection has failed: {result.stderr}")
    return result


def _bubblewrap(bwrap: str, folders: Sequence[str]) -> list[str]:
    """The command before one that shall see these folders and the system's alone, and no network."""
    command = [bwrap, "--unshare-all", "--proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]
    for folder in (*_ROOTS, *folders):
        command += ["--ro-bind-try", folder, folder]
    return [*command, "--remount-ro", "/", "--chdir", "/", "--"]


def checks() -> Iterator[Check]:
    """Yield the lines of `cosmos-rl doctor`: a line for each layer of protection."""
    for line in Sandbox(SandboxOptions(unprotected=True)).started().checks():
        yield line._replace(level="note") if line.level == "bad" else line  # only runs that have programs need it


@cache
def _default() -> Sandbox:
    return Sandbox()


def run_python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It has Python's standard library, no network and no files but its own.
    """
    result = _default().run_blocking(code)
    if result.status == "passed":
        return result.stdout
    ends = {"timeout": "took too long", "memory": "has used too much memory", "output": "has written too much"}
    return f"{result.stdout}{result.stderr}\n[the program {ends.get(result.status, 'has failed')}]"
