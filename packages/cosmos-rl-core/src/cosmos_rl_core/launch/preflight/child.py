"""A forked process for checks that run the code of others: it imports what they import, and may end or hang."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple

FAILED = 1
"""Exit status of a process whose work raised; its traceback is on stderr."""


class Forked(NamedTuple):
    """The end of a forked process."""

    result: bytes
    """Empty if it did not return."""
    status: int
    is_late: bool = False


def can_fork() -> bool:
    """Return whether this process may fork: on Linux, and without other threads, whose locks a child would keep."""
    return sys.platform == "linux" and threading.active_count() == 1


def run_forked(work: Callable[[], bytes], *, limit_s: float | None = None) -> Forked:
    """Return the result of `work`, which is not empty, from a forked process; it is killed after `limit_s`."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if not (child := os.fork()):
        os.close(reading)
        status = FAILED
        try:
            result = work()
            with open(writing, "wb") as answer:
                answer.write(result)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as answer:
        # select returns as soon as the child has written, or has ended, which closes its end of the pipe
        if is_late := not select.select([answer], [], [], limit_s)[0]:
            os.kill(child, signal.SIGKILL)
        result = b"" if is_late else answer.read()
    return Forked(result, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), is_late)
