"""Spans of a run's processes, for a window of time: lanes of work, waits and weights, and groups in flight."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from cosmos_rl_core.observe.trace import EARLIER, WAITS, SpanLine
from cosmos_rl_core.ops.dashboard.lines import GrowingFile

MOST_BYTES = 8 * 2**20
"""Read of the end of each file of spans: the newest minutes of a long run. timeline.json has all of them."""
MOST_SPANS = 60_000
"""Kept of a process; older ones are forgotten."""
GROUPS = ("rollout", "evaluate")
"""Spans of a group of rollouts, of which many overlap."""
PARTS = ("generate", "score")
"""Spans inside those."""
WEIGHTS = ("switch weights", "publish", "fence", "wait for weights")
BESIDE = ("rollout", "wait for weights")
"""Spans without a share of their own: the first has parts, the second goes on beside the work."""
_ROUNDING_S = 1e-6
LANES = ("work", WAITS, "weights")


class TimelineSpan(NamedTuple):
    at: float
    dur: float
    """Seconds; of an open span until the last line of the run."""
    name: str
    args: str
    """As JSON, to save memory."""


class ProcessSpans:
    """The spans of one process."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path, most_bytes=MOST_BYTES)
        self._decode = msgspec.json.Decoder(SpanLine).decode
        self.spans: list[TimelineSpan] = []
        self.is_cut = False
        """Whether older spans were left out."""
        self.open: dict[tuple[str, float, str], SpanLine] = {}
        """Those that have not ended yet."""

    def update(self) -> None:
        lines = self._file.new()
        if self._file.restarted:
            self.spans, self.open, self.is_cut = [], {}, self._file.is_cut
        for line in lines:
            try:
                span = self._decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            key = (span.name, span.at, span.track)
            if span.open:
                self.open[key] = span
            else:
                self.open.pop(key, None)
                self.spans.append(TimelineSpan(span.at, span.dur, span.name, msgspec.json.encode(span.args).decode()))
        if len(self.spans) > MOST_SPANS:
            del self.spans[: len(self.spans) - MOST_SPANS]
            self.is_cut = True

    def all_spans(self, *, end: float) -> list[TimelineSpan]:
        """Return all spans by start; the open ones end at `end`."""
        last = [
            TimelineSpan(
                span.at, max(0.0, end - span.at), span.name, msgspec.json.encode({**span.args, "open": True}).decode()
            )
            for span in self.open.values()
        ]
        return sorted([*self.spans, *last])


class RunTimeline:
    """The spans of all processes of a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, ProcessSpans] = {}
        self._lock = Lock()

    def update(self) -> None:
        """Read the spans that were added. Thread-safe."""
        paths = self._directory.glob("*.jsonl") if self._directory.is_dir() else ()
        with self._lock:
            for path in sorted(paths):
                if not path.stem.endswith(EARLIER):
                    self._processes.setdefault(path.stem, ProcessSpans(path)).update()

    def processes(self, *, end: float) -> dict[str, list[TimelineSpan]]:
        """Return the spans by process. end: of those that are open, in Unix seconds."""
        with self._lock:
            return {name: process.all_spans(end=end) for name, process in self._processes.items()}

    def window(self, *, start: float | None, length: float | None, pixels: int, end: float) -> dict[str, Any]:
        """Return the lanes of a window; neighbours smaller than a pixel are merged.

        start, length: in seconds from the first moment of which all spans are known; by default all of them. end: of
        spans that are open.
        """
        processes = self.processes(end=end)
        cut = [spans[0].at for name, spans in processes.items() if spans and self._processes[name].is_cut]
        zero = max(cut) if cut else min((spans[0].at for spans in processes.values() if spans), default=0.0)
        last = max((span.at + span.dur for spans in processes.values() for span in spans), default=zero)
        begin = zero if start is None else zero + start
        stop = last if length is None else begin + length
        lanes = [
            lane
            for name, spans in processes.items()
            for lane in _lanes(name, [s for s in spans if s.at + s.dur >= begin and s.at <= stop], begin, stop, pixels)
        ]
        shares = {name: _shares(spans, begin, stop) for name, spans in processes.items()}
        return {
            "zero": zero,
            "start": begin - zero,
            "length": max(stop - begin, 1e-6),
            "full": last - zero,
            "is_cut": bool(cut),
            "lanes": lanes,
            "shares": shares,
        }

    def waits(self, *, end: float) -> list[dict[str, Any]]:
        """Return what each process waited for and how long, the longest first. end: of spans that are open.

        now_s: seconds of the wait that is open; None without. share: of the time since its first span that is known.
        """
        waits = []
        for name, spans in self.processes(end=end).items():
            begin = spans[0].at if spans else end
            for wait, share in _shares(spans, begin, end).items():
                if lane_of(wait) != WAITS:
                    continue
                begun = [span.at for span in spans if span.name == wait and abs(span.at + span.dur - end) < _ROUNDING_S]
                now_s = round(end - min(begun), 3) if begun else None
                total_s = round(share * (end - begin), 3)
                waits.append({"process": name, "wait": wait, "now_s": now_s, "total_s": total_s, "share": share})
        return sorted(waits, key=lambda wait: -wait["total_s"])

    def recent_shares(self, *, length: float, end: float) -> dict[str, float]:
        """Return the share of the last `length` seconds by span, mean over the processes that have it."""
        shares_of: dict[str, list[float]] = defaultdict(list)
        for spans in self.processes(end=end).values():
            begin = max(end - length, spans[0].at) if spans else end
            shares = _shares(spans, begin, end)
            for name in {span.name for span in spans}:
                shares_of[name].append(shares.get(name, 0.0))
        return {name: fmean(shares) for name, shares in shares_of.items()}

    def pulls(self, *, end: float) -> list[dict[str, Any]]:
        """Return a record for each version that a rollout replica received: source, bytes, seconds, delay."""
        processes = self.processes(end=end)
        published: dict[Any, float] = {}
        for spans in processes.values():
            for span in spans:
                if span.name == "publish":
                    published[msgspec.json.decode(span.args).get("step")] = span.at + span.dur
        pulls = []
        for name, spans in processes.items():
            switched = {}
            for span in spans:
                if span.name == "switch weights":
                    switched[msgspec.json.decode(span.args).get("version")] = span
            for span in spans:
                args = msgspec.json.decode(span.args)
                if span.name != "wait for weights" or "version" not in args:
                    continue
                switch = switched.get(args["version"])
                live = span.at + span.dur if switch is None else switch.at + switch.dur
                since = published.get(args["version"])
                pulls.append(
                    {
                        **args,
                        "to": name,
                        "at": span.at,
                        "switch_s": None if switch is None else round(switch.dur, 6),
                        "delay_s": None if since is None or live < since else round(live - since, 6),
                    }
                )
        return sorted(pulls, key=lambda pull: pull["at"])


@cache
def lane_of(name: str) -> str:
    """Return the lane of a span, by its name; empty for a span of a group."""
    if name in GROUPS or name in PARTS:
        return ""
    if name in WEIGHTS:
        return "weights"
    return WAITS if name.startswith("wait for") else "work"


def _lanes(process: str, spans: list[TimelineSpan], begin: float, stop: float, pixels: int) -> list[dict[str, Any]]:
    pixel = (stop - begin) / max(pixels, 1)
    lanes: list[dict[str, Any]] = []
    if flight := [span for span in spans if span.name in GROUPS]:
        lanes.append({"process": process, "lane": "groups in flight", "area": _depth(flight, begin, pixel)})
    chosen: dict[str, list[TimelineSpan]] = {lane: [] for lane in (*LANES, "")}
    for span in spans:
        chosen[lane_of(span.name)].append(span)
    return lanes + [
        {"process": process, "lane": lane, "spans": _merged(chosen[lane], begin, pixel)}
        for lane in LANES
        if chosen[lane]
    ]


def _merged(spans: list[TimelineSpan], begin: float, pixel: float) -> list[list[Any]]:
    """Return [start, seconds, name, args, number of spans] of each rectangle, start from the window's begin."""
    merged: list[list[Any]] = []
    for span in spans:
        at = span.at - begin
        last = merged[-1] if merged else None
        if last and last[2] == span.name and at - last[0] - last[1] < pixel and span.dur < 2 * pixel:
            last[1], last[4] = max(last[1], at + span.dur - last[0]), last[4] + 1
        else:
            merged.append([at, span.dur, span.name, span.args, 1])
    return [[round(at, 5), round(dur, 5), *rest] for at, dur, *rest in merged]


def _depth(spans: list[TimelineSpan], begin: float, pixel: float) -> list[list[float]]:
    """Return [time, largest number at once] per pixel."""
    changes = sorted([(s.at - begin, 1) for s in spans] + [(s.at + s.dur - begin, -1) for s in spans])
    series: list[list[float]] = []
    depth = 0
    for at, change in changes:
        depth += change
        if series and at - series[-1][0] < pixel:
            series[-1][1] = max(series[-1][1], depth)
        else:
            series.append([round(at, 5), depth])
    return series


def _shares(spans: list[TimelineSpan], begin: float, stop: float) -> dict[str, float]:
    """Return the share of the window by name; of overlapping spans of a name, their union."""
    parts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if span.name in BESIDE:
            continue
        low, high = max(begin, span.at), min(stop, span.at + span.dur)
        if high > low:
            parts[span.name].append((low, high))
    return {name: round(_union(intervals) / max(stop - begin, 1e-9), 4) for name, intervals in sorted(parts.items())}


def _union(intervals: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for low, high in sorted(intervals):
        if high > end:
            total += high - (low if low > end else end)
            end = high
    return total
