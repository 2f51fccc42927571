"""Timing spans of a process: written while it runs, merged into one Chrome trace at the end of the run.

    timeline = Timeline("policy-0")
    timeline.stream(run_dir / "spans" / "policy-0.jsonl")
    with timeline.span("forward_backward", step=3):
        ...
    timeline.close()
    merge(sorted(run_dir.glob("spans/*.jsonl")), run_dir / "timeline.json")

A line of the file is a finished span, or (`"open": true`) one that has run for longer than FLUSH_S: what a process that
hangs or was killed was doing. The merged file opens in chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from cosmos_rl_core.observe.record import append_lines

_MICROSECONDS = 1e6
FLUSH_S = 1.0
"""Interval of writing."""
FILE_BYTES = 32 * 2**20
"""Maximum size of a file. A full one is renamed to NAME.earlier.jsonl, which it replaces, and a new one begins."""
EARLIER = ".earlier"
WAITS = "waits"
"""Row of the spans in which a process waits for others."""
POLICY_WAITS, ROLLOUT_WAITS = ("wait for batch", "wait for commit"), ("wait for leases",)
"""Spans of a policy and of a rollout without work, because others work."""

row: ContextVar[str] = ContextVar("row", default="")
"""Row of the spans of this task, in place of the thread's name."""


class SpanLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a file of spans."""

    name: str
    at: float
    """Start, in Unix seconds."""
    dur: float = 0.0
    """Seconds."""
    track: str = ""
    args: dict[str, Any] = {}
    open: bool = False
    """Whether it had not ended when it was written."""


class Timeline:
    """Spans of one process. Thread-safe; recording takes about a microsecond."""

    def __init__(
        self,
        process: str,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
        max_events: int = 100_000,
    ) -> None:
        """`clock` and `wall` return seconds; of more than `max_events` unwritten spans, the newest are kept."""
        self.process = process
        self._clock = clock
        self._began = clock()
        self._wall_minus_clock_s = _wall_minus_clock_s(wall, clock)
        self._events: deque[SpanLine] = deque(maxlen=max_events)  # append is atomic
        self._running: dict[int, _Span] = {}
        self._totals: dict[str, float] = {}
        self._lock = threading.Lock()
        self._ended_by: tuple[BaseException | None, str] = (None, "")
        self._path: Path | None = None
        self._closed = threading.Event()
        self._writer: threading.Thread | None = None

    def span(self, name: str, *, track: str = "", **args: Any) -> _Span:
        """Return a context manager that records the duration of its body.

        `track` is its row in the viewer, by default that of the task (`row`) or the thread's name. Spans of a row must
        nest, so overlapping asyncio tasks need a row each. The viewer shows `args` on a click.
        """
        return _Span(self, name, track or row.get() or threading.current_thread().name, args)

    def total(self, *names: str) -> float:
        """Return the total seconds in spans of these names, including running ones. Cheap."""
        now = self._clock()
        with self._lock:
            running = sum(now - span.start for span in self._running.values() if span.name in names)
            return running + sum(self._totals.get(name, 0.0) for name in names)

    def waited(self) -> tuple[float, float]:
        """Return the total seconds without work, those of a running wait included, and the seconds since the start."""
        return self.total(*POLICY_WAITS, *ROLLOUT_WAITS), self._clock() - self._began

    def span_of(self, error: BaseException) -> str:
        """Return the name of the innermost span that `error` has ended, if it is the last error; else ""."""
        return self._ended_by[1] if self._ended_by[0] is error else ""

    def stream(self, path: Path) -> None:
        """Append spans to a file from now on, every FLUSH_S, those recorded so far included."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._writer = threading.Thread(target=self._write_regularly, name="spans", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Write the rest."""
        self._closed.set()
        if self._writer is not None:
            self._writer.join()
            self._write(older_than_s=0.0)

    def _write_regularly(self) -> None:
        while not self._closed.wait(FLUSH_S):
            self._write(older_than_s=FLUSH_S)

    def _write(self, *, older_than_s: float) -> None:
        """Append the finished spans, and the open ones of this age that were not written yet."""
        assert self._path is not None
        now = self._clock()
        with self._lock:
            running = [span for span in self._running.values() if now - span.start >= older_than_s]
        lines = [span.line(open=True) for span in running if not span.written]
        for span in running:
            span.written = True
        while self._events:
            lines.append(self._events.popleft())
        if not lines:
            return
        if self._path.exists() and self._path.stat().st_size > FILE_BYTES:
            os.replace(self._path, self._path.with_name(f"{self._path.stem}{EARLIER}.jsonl"))
        append_lines(self._path, [msgspec.json.encode(line) for line in lines])


class _Span:
    __slots__ = ("_args", "_timeline", "_track", "name", "start", "written")

    def __init__(self, timeline: Timeline, name: str, track: str, args: dict[str, Any]) -> None:
        self.name = name
        self.written = False
        self._timeline = timeline
        self._track = track
        self._args = args

    def add(self, **args: Any) -> None:
        """Add values that are known at the end."""
        self._args.update(args)

    def line(self, *, open: bool = False, dur: float = 0.0, error: str = "") -> SpanLine:
        at = self.start + self._timeline._wall_minus_clock_s
        args = {**self._args, "error": error} if error else dict(self._args)
        return SpanLine(name=self.name, at=at, dur=dur, track=self._track, args=args, open=open)

    def __enter__(self) -> _Span:
        self.start = self._timeline._clock()
        with self._timeline._lock:
            self._timeline._running[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeline = self._timeline
        seconds = timeline._clock() - self.start
        timeline._events.append(self.line(dur=seconds, error="" if kind is None else kind.__name__))
        if error is not None and timeline._ended_by[0] is not error:
            timeline._ended_by = (error, self.name)
        with timeline._lock:
            del timeline._running[id(self)]
            timeline._totals[self.name] = timeline._totals.get(self.name, 0.0) + seconds


def read_spans(lines: Iterable[bytes]) -> list[SpanLine]:
    """Return the spans of a file, each once; those without an end are `open`. Damaged lines are skipped."""
    spans: dict[tuple[str, float, str], SpanLine] = {}
    decode = msgspec.json.Decoder(SpanLine).decode
    for line in lines:
        try:
            span = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # torn by a kill
        key = (span.name, span.at, span.track)
        if not span.open or key not in spans:
            spans[key] = span
    return list(spans.values())


def merge(paths: Sequence[Path], out: Path) -> None:
    """Merge files of spans into a Chrome trace that starts at zero.

    Missing files are skipped. Machines are aligned by their wall clocks.
    """
    processes: dict[str, list[SpanLine]] = {}
    for path in paths:
        if path.exists():
            name = path.stem.removesuffix(EARLIER)
            processes.setdefault(name, []).extend(read_spans(path.read_bytes().splitlines()))
    zero = min((span.at for spans in processes.values() for span in spans), default=0.0)
    merged: list[dict[str, Any]] = []
    for pid, (process, spans) in enumerate(processes.items()):
        tracks = {track: i for i, track in enumerate(sorted({span.track for span in spans}))}
        merged.append(_label("process_name", process, pid=pid, tid=0))
        merged += [_label("thread_name", track, pid=pid, tid=tid) for track, tid in tracks.items()]
        merged += [_event(span, zero, pid=pid, tid=tracks[span.track]) for span in spans]
    partial = out.with_name(out.name + ".partial")
    partial.write_bytes(
        msgspec.json.encode({"traceEvents": merged, "displayTimeUnit": "ms", "otherData": {"wall_s": zero}})
    )
    os.replace(partial, out)


def _wall_minus_clock_s(wall: Callable[[], float], clock: Callable[[], float]) -> float:
    """Read two clocks together: of several readings the quickest, in which nothing else ran."""

    def read() -> tuple[float, float]:
        before, now, after = clock(), wall(), clock()
        return after - before, now - (before + after) / 2

    return min(read() for _ in range(5))[1]


def _label(kind: str, name: str, *, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(span: SpanLine, zero: float, *, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "pid": pid,
        "tid": tid,
        "ts": (span.at - zero) * _MICROSECONDS,
        "dur": span.dur * _MICROSECONDS,
        "args": {**span.args, "open": True} if span.open else span.args,
    }
