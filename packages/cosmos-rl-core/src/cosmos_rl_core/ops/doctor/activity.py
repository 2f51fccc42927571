"""Present work of the processes of a run: open spans, beside the durations of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cosmos_rl_core.observe.trace import EARLIER, FLUSH_S, POLICY_WAITS, ROLLOUT_WAITS
from cosmos_rl_core.ops.dashboard.timeline import ProcessSpans

OUTER = ("rollout", "evaluate", "turn")
"""Spans with others inside."""
BESIDE = "wait for weights"
"""Span that is open beside the work of a rollout, until the policy publishes again."""
STALLED = 6
"""A span that is open for this many times its usual duration is stalled,"""
STALLED_S = 60.0
"""and for this long."""
SLOW_S = 5.0
"""The same for one that is slow."""
FIRST_S = 1800.0
"""The same, of a span that has never ended."""
RECENT = 200
"""Closed spans that a usual duration is taken from."""
SKEW_S = 5.0


class Activity(NamedTuple):
    """An open span."""

    process: str
    """Name of the file of spans: the worker's, or "policy-0 rank 1"."""
    span: str
    seconds: float
    usual_s: float | None
    """Median of earlier ones; None for the first."""
    args: Mapping[str, Any]

    @property
    def is_stalled(self) -> bool:
        if self.span == BESIDE:
            return False
        if self.usual_s is None:
            return self.seconds > FIRST_S
        return self.seconds > STALLED_S and self.seconds > STALLED * self.usual_s

    @property
    def is_slow(self) -> bool:
        return self.seconds > SLOW_S and self.seconds > STALLED * (self.usual_s or 0.0)

    @property
    def worker(self) -> str:
        """Its replica."""
        return self.process.partition(" rank ")[0]


class Spans:
    """The spans of all processes of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._paths = sorted(path for path in run_dir.glob("spans/*.jsonl") if not path.stem.endswith(EARLIER))
        self._processes = {path.stem: ProcessSpans(path) for path in self._paths}
        for process in self._processes.values():
            process.update()

    def open(self, *, now: float) -> list[Activity]:
        """Return what each process is in, longest first; waits and enclosing spans are left out."""
        activities = []
        for name, process in self._processes.items():
            begun = _began(process)
            for span in process.open.values():
                if span.name in (*POLICY_WAITS, *ROLLOUT_WAITS, *OUTER) or span.at < begun:
                    continue  # the second: of an earlier process of this name
                activities.append(Activity(name, span.name, now - span.at, self.usual(name, span.name), span.args))
        return sorted(activities, key=lambda activity: -activity.seconds)

    def usual(self, process: str, name: str) -> float | None:
        """Return the median duration of a process's spans of this name; None if none has ended."""
        ended = [span.dur for span in self._processes[process].spans if span.name == name]
        return median(ended[-RECENT:]) if ended else None

    def longest(self, name: str) -> tuple[str, float] | None:
        """Return the process with the longest closed span of this name, and its duration."""
        ended = [(s.dur, process) for process, spans in self._processes.items() for s in spans.spans if s.name == name]
        if not ended:
            return None
        seconds, process = max(ended)
        return process, seconds

    def last_seen(self, process: str) -> float:
        """Return the newest time in a process's spans, in Unix seconds of its machine."""
        spans = self._processes[process]
        opened = (span.at + FLUSH_S for span in spans.open.values())
        return max([*opened, *(span.at + span.dur for span in spans.spans[-RECENT:])], default=0.0)

    def silent_s(self, *, now: float) -> dict[str, float]:
        """Return the seconds since the newest span of each process."""
        return {name: max(0.0, now - self.last_seen(name)) for name in self._processes}

    def skews(self) -> dict[str, float]:
        """Return the seconds by which a process's clock is ahead of the one that dates its file, if more than SKEW_S.

        Spans are written about a second after their end, so this is of use for a run that is live.
        """
        skews = {path.stem: self.last_seen(path.stem) - path.stat().st_mtime for path in self._paths}
        return {name: skew for name, skew in skews.items() if abs(skew) > SKEW_S and self.last_seen(name)}


def of_worker(activities: Iterable[Activity], worker: str) -> Activity | None:
    """Return the longest of a worker, without those beside its work; None if nothing of it is open."""
    return next((each for each in activities if each.worker == worker and each.span != BESIDE), None)


def _began(process: ProcessSpans) -> float:
    """Return the start of the newest build: that of the present process."""
    builds = [span.at for span in process.spans if span.name == "build"]
    builds += [span.at for span in process.open.values() if span.name == "build"]
    return max(builds, default=0.0)
