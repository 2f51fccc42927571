"""Follows a run that a platform has started, from the terminal: its logs, its end, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from cosmos_rl_core.ops.clusters.launcher import FOLDER, ClusterRun

CHECK_S = 0.5


def follow(
    run: ClusterRun,
    *,
    is_alive: Callable[[], bool],
    stop: Callable[[bool], object],
    say: Callable[[str], None],
) -> bool:
    """Print the logs of a run with the names of their processes, until it has ended.

    stop: called on the first Ctrl-C or SIGTERM with False, on the second one with True; this returns after the second.
    Returns whether the user has stopped the run. Call it in the main thread.
    """
    received: list[int] = []
    woken = threading.Event()

    def interrupted(number: int, frame: FrameType | None) -> None:
        received.append(number)
        woken.set()  # at once: `ray job stop` kills this process after three seconds

    handled, logs = 0, Logs(run.directory / FOLDER)
    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            alive = is_alive()  # first: the last lines are written before the end
            for line in logs.read():
                say(line)
            if len(received) > handled:
                handled = len(received)
                stop(handled > 1)
                if handled == 1:
                    say("the run stops: it saves and ends; Ctrl-C again ends it at once")
            if not alive or handled > 1:
                return handled > 0
            woken.wait(CHECK_S)
            woken.clear()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Logs:
    """The files NAME.log of a folder, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, int] = {}

    def read(self) -> Iterator[str]:
        """Yield the whole lines since the last call, those of workers as "NAME: line"."""
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._read.get(path.stem, 0))
                complete_lines = file.read().rpartition(b"\n")[0]
            if complete_lines:
                self._read[path.stem] = self._read.get(path.stem, 0) + len(complete_lines) + 1
                name = "" if path.stem == "controller" else f"{path.stem}: "
                yield from (f"{name}{line}" for line in complete_lines.decode(errors="replace").split("\n"))
