"""The fork server: an interpreter without site-packages that forks a protected process for each program.

    client --a socket, and perhaps a channel--> server --fork--> watcher --fork--> the program
                 request, reply                                  limits of time and output

The server reads nothing that is secret: the watcher reads the request of one program. A program that is process 1 of
its namespace takes all that it has started with it. The server ends with the client's control socket, and a watcher
kills its program when the client closes the request's socket.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from . import remote
from .protection import Protection, become_nobody

MODULES = (
    "array bisect cmath collections copy dataclasses datetime decimal enum fractions functools heapq importlib.abc "
    "inspect io itertools json math operator queue random re statistics string struct textwrap threading traceback "
    "typing"
)
"""Imported once, for all programs."""
LENGTH_BYTES = 8
PATIENCE = 4
"""Maximum time of a run, in multiples of its time of the processor."""
_CHUNK = 1 << 16


def main() -> None:
    """Serve until the control socket closes."""
    settings = json.loads(sys.argv[-2])
    control = socket.socket(fileno=int(sys.argv[-1]))
    gave_up_root = become_nobody()
    sys.path[:] = [path for path in sys.path if path != settings["home"]] + settings["folders"]
    for name in (*MODULES.split(), *settings["packages"]):
        importlib.import_module(name)
    folders = [os.path.dirname(os.__file__), *settings["folders"]]
    protection = Protection(settings["layers"], folders, files_bytes=settings["files_bytes"])
    report = {"missing": protection.missing, "landlock": protection.landlock_version, "nobody": gave_up_root}
    control.sendall(json.dumps({**report, "scratch": protection.scratch}).encode() + b"\n")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for watchers
    gc.freeze()
    while True:
        _, descriptors, *_ = socket.recv_fds(control, 1, 2)
        if not descriptors:
            return
        if os.fork() == 0:
            control.detach()
            _watched(protection, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _watched(protection: Protection, descriptors: list[int]) -> NoReturn:
    """Fork the program of a request, and reply with what has become of it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection = descriptors[0]
    request = json.loads(_read(connection, int.from_bytes(_read(connection, LENGTH_BYTES))))
    protection.separate()
    stdin = os.memfd_create("stdin")
    with open(os.dup(stdin), "wb") as file:
        file.write(request["stdin"].encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    pipes = [os.pipe(), os.pipe(), os.pipe()]  # stdout, stderr, and a byte when the program is protected
    kept = [stdin, pipes[0][1], pipes[1][1], *descriptors[1:], pipes[2][1]]
    child = os.fork()
    if child == 0:
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in kept]  # above those that they get
        for place, descriptor in enumerate(high):
            os.dup2(descriptor, place)
        protection.enter(cpu_s=_cpu_s(request), memory_bytes=request["memory_bytes"], keep=len(kept))
        os.write(len(kept) - 1, b"p")
        os.close(len(kept) - 1)
        _run(request)
    for descriptor in kept:
        os.close(descriptor)
    stdout, stderr, protected = (readable for readable, _ in pipes)
    is_protected = os.read(protected, 1) == b"p"  # nothing of the program runs before
    reply = _watch(connection, child, [stdout, stderr], request)
    reply = json.dumps(reply if is_protected else {**reply, "status": "unprotected"}).encode()
    with contextlib.suppress(BrokenPipeError), open(connection, "wb") as file:
        file.write(reply)
    os._exit(0)


def _cpu_s(request: dict[str, Any]) -> int:
    return int(request["timeout_s"]) + 2


def _read(descriptor: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = os.read(descriptor, min(num_bytes - len(data), 1 << 20))
        if not part:
            os._exit(0)  # the client has gone
        data += part
    return data


def _watch(connection: int, child: int, outputs: list[int], request: dict[str, Any]) -> dict[str, Any]:
    """Collect the program's output until it ends or a limit is reached, kill all of it, and return the reply."""
    began, limit, timeout_s = time.monotonic(), request["output_bytes"], request["timeout_s"]
    deadline = began + timeout_s
    texts = {output: bytearray() for output in outputs}
    poll, status = select.poll(), ""
    ended = os.pidfd_open(child)
    for descriptor in (connection, ended, *outputs):
        poll.register(descriptor, select.POLLIN)
        os.set_blocking(descriptor, False)
    while not status:
        left = deadline - time.monotonic()
        events = dict(poll.poll(max(0.0, left * 1000)))
        for output in texts.keys() & events.keys():
            if not _collect(output, texts[output], limit=limit):
                poll.unregister(output)
        causes = {
            "output": any(len(text) > limit for text in texts.values()),
            "abandoned": connection in events,  # nobody waits for the reply
            "ended": ended in events,
            "timeout": left <= 0 and (deadline := _extended(child, began, timeout_s)) <= time.monotonic(),
        }
        status = next((cause for cause, applies in causes.items() if applies), "")
    for kill in (os.kill, os.killpg):  # the second for what a program without a namespace has started
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    _, code, usage = os.wait4(child, 0)
    for output, text in texts.items():
        _collect(output, text, limit=limit)
    exit_code = os.waitstatus_to_exitcode(code)
    if status == "ended":
        status = _status(exit_code, usage.ru_utime + usage.ru_stime >= _cpu_s(request))
    stdout, stderr = (bytes(text[:limit]).decode(errors="replace") for text in texts.values())
    seconds = time.monotonic() - began
    return {"status": status, "exit_code": exit_code, "stdout": stdout, "stderr": stderr, "seconds": seconds}


def _extended(child: int, began: float, timeout_s: float) -> float:
    """Return the time at which a program may have used its time of the processor, if others have used it instead."""
    used_s = time.clock_gettime(~child << 3 | 2)  # the process's clock, as clock_getcpuclockid returns it
    return min(time.monotonic() + timeout_s - used_s, began + PATIENCE * timeout_s)


def _collect(output: int, text: bytearray, *, limit: int) -> bool:
    """Read what a program has written, until `text` is above the limit; return whether it may write more."""
    with contextlib.suppress(BlockingIOError):
        while len(text) <= limit:
            data = os.read(output, _CHUNK)
            if not data:
                return False
            text += data
    return True


def _status(exit_code: int, used_its_time: bool) -> str:
    if exit_code == remote.NO_MEMORY:
        return "memory"
    if exit_code == -signal.SIGKILL:  # by the kernel
        return "timeout" if used_its_time else "memory"
    return "error" if exit_code else "passed"


def _run(request: dict[str, Any]) -> NoReturn:
    """Run the program in this process, and end it as `multiprocessing` does, without tearing Python down."""
    random.seed(0)  # the same program has the same result in each run
    for name in ("exit", "quit"):  # which site adds elsewhere
        setattr(builtins, name, sys.exit)
    sys.argv = [remote.FILE]
    sys.set_int_max_str_digits(0)
    code: object
    try:
        code = remote.ROLES[request["role"]](request["source"])
    except SystemExit as end:
        code = end.code
    except Exception:  # of data that cannot be sent, such as a list that contains itself
        traceback.print_exc()
        code = 1
    threading._shutdown()  # joins threads  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201
        code = 1
    with contextlib.suppress(OSError, ValueError):  # closed by the program
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit((code or 0) & 0xFF)
