"""Timing spans of a process, as a Chrome trace.

    timeline = Timeline("policy-0")
    with timeline.span("forward_backward", step=3):
        ...
    timeline.write(run_dir / "logs" / "policy-0.timeline.json")
    merge(sorted(run_dir.glob("logs/*.timeline.json")), run_dir / "timeline.json")

The files open in chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

_MICROSECONDS = 1e6


class _Event(NamedTuple):
    name: str
    start: float
    end: float
    track: str
    args: dict[str, Any]


class _File(msgspec.Struct):
    """A written timeline."""

    traceEvents: list[dict[str, Any]]
    otherData: dict[str, float]
    """`wall_minus_clock_s`: add it to a time of this file to get wall-clock time, which all files share."""
    displayTimeUnit: str = "ms"


class Timeline:
    """Spans of one process. Thread-safe; recording takes about a microsecond."""

    def __init__(
        self,
        process: str,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
        max_events: int = 500_000,
    ) -> None:
        """`clock` and `wall` return seconds; of more than `max_events`, the newest are kept."""
        self.process = process
        self._clock = clock
        self._wall_minus_clock_s = wall() - clock()
        self._events: deque[_Event] = deque(maxlen=max_events)  # append is atomic
        self._running: dict[int, _Span] = {}
        self._totals: dict[str, float] = {}
        self._lock = threading.Lock()
        self._ended_by: tuple[BaseException | None, str] = (None, "")

    def span(self, name: str, *, track: str = "", **args: Any) -> _Span:
        """Return a context manager that records the duration of its body.

        `track` is its row in the viewer, by default the thread's name. Spans of a row must nest, so overlapping
        asyncio tasks need a row each. The viewer shows `args` on a click.
        """
        return _Span(self, name, track or threading.current_thread().name, args)

    def total(self, *names: str) -> float:
        """Return the total seconds in spans of these names, including running ones. Cheap."""
        now = self._clock()
        with self._lock:
            running = sum(now - span.start for span in self._running.values() if span.name in names)
            return running + sum(self._totals.get(name, 0.0) for name in names)

    def span_of(self, error: BaseException) -> str:
        """Return the name of the innermost span that `error` has ended, if it is the last error; else ""."""
        return self._ended_by[1] if self._ended_by[0] is error else ""

    def write(self, path: Path) -> None:
        """Write the recorded spans, replacing the file atomically."""
        pid = os.getpid()
        events = list(self._events)
        tracks = {track: i for i, track in enumerate(sorted({event.track for event in events}))}
        rows = [_label("process_name", self.process, pid=pid, tid=0)]
        rows += [_label("thread_name", track, pid=pid, tid=tid) for track, tid in tracks.items()]
        rows += [_row(event, pid=pid, tid=tracks[event.track]) for event in events]
        _replace(path, _File(traceEvents=rows, otherData={"wall_minus_clock_s": self._wall_minus_clock_s}))


class _Span:
    __slots__ = ("_args", "_timeline", "_track", "name", "start")

    def __init__(self, timeline: Timeline, name: str, track: str, args: dict[str, Any]) -> None:
        self.name = name
        self._timeline = timeline
        self._track = track
        self._args = args

    def __enter__(self) -> None:
        self.start = self._timeline._clock()
        with self._timeline._lock:
            self._timeline._running[id(self)] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeline = self._timeline
        args = self._args if kind is None else {**self._args, "error": kind.__name__}
        end = timeline._clock()
        timeline._events.append(_Event(self.name, self.start, end, self._track, args))
        if error is not None and timeline._ended_by[0] is not error:
            timeline._ended_by = (error, self.name)
        with timeline._lock:
            del timeline._running[id(self)]
            timeline._totals[self.name] = timeline._totals.get(self.name, 0.0) + end - self.start


def merge(paths: Sequence[Path], out: Path) -> None:
    """Merge the timelines of several processes into one file that starts at zero.

    Missing files (of processes killed before they wrote one) are skipped. Processes on different machines are aligned
    by their wall clocks. Raises ValueError for a file that is not a timeline.
    """
    files = [_read(path) for path in paths if path.exists()]
    starts = [
        event["ts"] + file.otherData["wall_minus_clock_s"] * _MICROSECONDS
        for file in files
        for event in file.traceEvents
        if "ts" in event
    ]
    zero = min(starts, default=0.0)
    merged: list[dict[str, Any]] = []
    for pid, file in enumerate(files):
        shift = file.otherData["wall_minus_clock_s"] * _MICROSECONDS - zero
        for event in file.traceEvents:
            event["pid"] = pid
            if "ts" in event:
                event["ts"] += shift
            merged.append(event)
    _replace(out, _File(traceEvents=merged, otherData={"wall_minus_clock_s": zero / _MICROSECONDS}))


def _read(path: Path) -> _File:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a timeline: {error}") from error
    if "wall_minus_clock_s" not in file.otherData:
        raise ValueError(f"{path} is not a timeline of this program: it lacks wall_minus_clock_s")
    return file


def _label(kind: str, name: str, *, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _row(event: _Event, *, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.name,
        "pid": pid,
        "tid": tid,
        "ts": event.start * _MICROSECONDS,
        "dur": (event.end - event.start) * _MICROSECONDS,
        "args": event.args,
    }


def _replace(path: Path, file: _File) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # the user may have removed the run's directory
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(msgspec.json.encode(file))
    os.replace(partial, path)
