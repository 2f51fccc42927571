"""Counts of events on the pretend CUDA device, and the current device and stream of each thread."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from dataclasses import dataclass, field

HERE = threading.local()
"""The current device (`device`) and stream (`stream`, its name) of each thread."""


@dataclass
class Record:
    """Counts by "file:line source (thread)"."""

    mismatches: Counter[str] = field(default_factory=Counter)
    synchronisations: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    stray: Counter[str] = field(default_factory=Counter)
    math_attention: Counter[str] = field(default_factory=Counter)
    varlen: Counter[str] = field(default_factory=Counter)
    """Calls of `varlen_attn`."""
    waits: Counter[str] = field(default_factory=Counter)
    """`Event.synchronize`, and that of a side stream: the host waits for the work before it, not for the GPU."""
    streams: Counter[str] = field(default_factory=Counter)
    """Copies between host and GPU by "direction, stream, thread"."""

    def clear(self) -> None:
        """Forget everything counted so far, for instance during start-up."""
        for counts in vars(self).values():
            counts.clear()

    def __str__(self) -> str:
        lines = []
        for name, counts in vars(self).items():
            lines.append(f"{name}: {counts.total()}")
            lines += [f"  {count:5d}  {place}" for place, count in counts.most_common()]
        return "\n".join(lines)

    def count(self, counter: Counter[str], event: str) -> None:
        """Count an event at the innermost line of our packages, or of the caller where there is none."""
        counter[f"{_place()}: {event} ({threading.current_thread().name})"] += 1

    def download(self, *, blocking: bool) -> None:
        """A copy to the host.

        A thread that has not chosen its device would wait for another one's where there are several.
        """
        if blocking:
            self.count(self.synchronisations, "copy to the host")
        if getattr(HERE, "device", None) is None:
            self.count(self.stray, "copy to the host, no device set")
        self._count_stream("to the host")

    def upload(self, *, blocking: bool) -> None:
        """A copy from the host."""
        if blocking:
            self.count(self.uploads, "copy to the GPU")
        self._count_stream("to the GPU")

    def _count_stream(self, direction: str) -> None:
        stream = getattr(HERE, "stream", "default stream")
        self.streams[f"{direction}, {stream}, {threading.current_thread().name}"] += 1


def _place() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/doubles/pretend_" not in frame.filename]
    ours = [frame for frame in frames if "/cosmos_rl_" in frame.filename and "/tests/" not in frame.filename]
    frame = (ours or [frame for frame in frames if "/torch/" not in frame.filename])[-1]
    return f"{frame.filename.rpartition('/src/')[2].rpartition('site-packages/')[2]}:{frame.lineno} {frame.line}"
