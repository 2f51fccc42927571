"""Console output: plain tables, and for a run a live panel on a terminal, otherwise one line per step."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_LINE_EVERY_S = 1.0
_NUM_REMEMBERED = 40
_STARTING_S = 10.0
_NUM_STARTING = 4
"""Workers that start are named up to this number."""
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-:=+*#"


class Console:
    """Shows one run.

        console.phase("loading the model")
        console.step(0, {"reward_mean": 0.12, "staleness_mean": 0.4, "terms_per_s": 3400.0})
        console.summary({"reward": "0.12 -> 0.93", "files": "outputs/demo"})
        console.close()

    Shown metrics, if present: reward_mean, loss, staleness_mean, staleness_max, terms_per_s, sync_s, members. If the
    stream is not a terminal, at most one line per second is written, and always the last one.
    """

    def __init__(
        self,
        run_name: str,
        max_steps: int,
        output_dir: Path,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stream` is standard output by default; `clock` returns seconds."""
        self._run_name = run_name
        self._max_steps = max_steps
        self._output_dir = output_dir
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._rewards: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._times: deque[tuple[float, int]] = deque(maxlen=_NUM_REMEMBERED)
        self._phase = "starting"
        self._num_done = 0
        self._metrics: Mapping[str, float] = {}
        self._held_back = ""
        self._last_line_at = -math.inf
        self._starting = ""
        self._starting_due, self._starting_every_s = math.inf, _STARTING_S
        rich = RichConsole(file=self._stream, highlight=False)
        self._bars = _BARS if rich.encoding.startswith("utf") else _ASCII_BARS
        self._live: Live | None = None
        if rich.is_terminal and not rich.is_dumb_terminal:
            self._live = Live(get_renderable=self._panel, console=rich, refresh_per_second=4)
            self._live.start()
        else:
            self._write(f"{run_name}: files in {output_dir}")

    def phase(self, text: str) -> None:
        """Show the current phase of the run."""
        if text == self._phase:
            return
        self._phase = text
        if self._live is None:
            self._release()
            self._write(f"{self._run_name}: {text}")

    def starting(self, workers: Sequence[tuple[str, str, float]]) -> None:
        """Show workers that start: name, phase, seconds. Without a terminal, a line after 10 s, then ever rarer."""
        named = [f"{name} {phase} {seconds:.0f} s" for name, phase, seconds in workers[:_NUM_STARTING]]
        more = len(workers) - len(named)
        self._starting = ", ".join([*named, f"{more} more"] if more > 0 else named)
        if self._live is not None:
            return
        if not workers:
            self._starting_due, self._starting_every_s = math.inf, _STARTING_S
        elif self._starting_due == math.inf:
            self._starting_due = self._clock() + self._starting_every_s
        elif self._clock() >= self._starting_due:
            self._release()
            self._write(f"starting: {self._starting}")
            self._starting_every_s *= 2
            self._starting_due = self._clock() + self._starting_every_s

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step. `step` counts from 0."""
        self._num_done = step + 1
        self._metrics = metrics
        self._times.append((self._clock(), self._num_done))
        if math.isfinite(metrics.get("reward_mean", math.nan)):
            self._rewards.append(metrics["reward_mean"])
        if self._live is None:
            self._held_back = self._line()
            is_due = self._clock() - self._last_line_at >= _LINE_EVERY_S
            if is_due or self._num_done >= self._max_steps:
                self._release()

    def note(self, text: str) -> None:
        """Show a permanent message: a dropped prompt, a lost worker."""
        if self._live is None:
            self._release()
            self._write(text)
        else:
            self._live.console.print(Text(text))

    def summary(self, rows: Mapping[str, object], *, state: str = "done") -> None:
        """Show the closing table, in the given order: label, value. state: how the run ended."""
        live = self._live
        self.close()
        if live is None:
            width = max((len(label) for label in rows), default=0)
            self._write("")
            self._write(f"{self._run_name}: {state}")
            for label, value in rows.items():
                self._write(f"  {label.ljust(width)}  {value}")
            return
        table = Table(title=Text(f"{self._run_name}: {state}", style="bold"), title_justify="left", show_header=False)
        for label, value in rows.items():
            table.add_row(Text(label), Text(str(value), overflow="fold"))
        live.console.print(table)

    def close(self) -> None:
        """Write a delayed line, or stop the live panel."""
        if self._live is None:
            self._release()
        else:
            self._live.stop()

    # -- one line per step

    def _line(self) -> str:
        width = len(str(self._max_steps))
        parts = [f"step {self._num_done:>{width}}/{self._max_steps}"]
        parts += [f"{label} {value}" for label, value in self._labelled().items()]
        return "  ".join(parts)

    def _release(self) -> None:
        if self._held_back:
            self._write(self._held_back)
            self._held_back = ""
            self._last_line_at = self._clock()

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    # -- the live panel

    def _panel(self) -> Panel:
        counter = Text(f"step {self._num_done}/{self._max_steps}  ")
        progress = Table.grid(expand=True)
        progress.add_column(no_wrap=True)
        progress.add_column(ratio=1)
        progress.add_row(counter, ProgressBar(total=max(self._max_steps, 1), completed=self._num_done))
        metrics = Table.grid(padding=(0, 2))
        if self._starting:
            metrics.add_row(Text("starting", style="dim"), Text(self._starting), Text(""))
        for label, value in self._labelled().items():
            curve = sparkline(list(self._rewards), bars=self._bars) if label == "reward" else ""
            metrics.add_row(Text(label, style="dim"), Text(value), Text(curve, style="green"))
        title = Text(f"{self._run_name}: {self._phase}")
        return Panel(Group(progress, metrics), title=title, title_align="left", subtitle=Text(str(self._output_dir)))

    # -- both

    def _labelled(self) -> dict[str, str]:
        """Return label -> text of the present metrics, in display order."""
        m = self._metrics
        metrics = {}
        if "reward_mean" in m:
            metrics["reward"] = f"{m['reward_mean']:.3f}"
        if "loss" in m:
            metrics["loss"] = f"{m['loss']:.4f}"
        if "staleness_mean" in m:
            most = f" (max {m['staleness_max']:.0f})" if "staleness_max" in m else ""
            metrics["staleness"] = f"{m['staleness_mean']:.2f}{most}"
        if "terms_per_s" in m:
            metrics["terms/s"] = f"{m['terms_per_s']:,.0f}"
        if "sync_s" in m:
            metrics["sync"] = f"{m['sync_s']:.2f} s"
        if "members" in m:
            metrics["members"] = f"{m['members']:.0f}"
        remaining_s = self._remaining_s()
        if remaining_s is not None:
            metrics["left"] = duration(remaining_s)
        return metrics

    def _remaining_s(self) -> float | None:
        """Extrapolate from the last steps; None before there are two, and at the end."""
        (first_at, first), (last_at, last) = (self._times[0], self._times[-1]) if self._times else ((0, 0),) * 2
        if last == first or last >= self._max_steps:
            return None
        return (last_at - first_at) / (last - first) * (self._max_steps - last)


def sparkline(values: Sequence[float], *, bars: str = _BARS) -> str:
    """Return one of `bars` per value: the first for the lowest value, the last for the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """Return a readable duration: "45 s", "4 min 10 s", "2 h 05 min"."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def table(rows: Sequence[Sequence[object]], *, header: Sequence[str] = ()) -> str:
    """Return rows as left-aligned columns two spaces apart, under an upper-case header."""
    cells = [[str(cell) for cell in row] for row in rows]
    if header:
        cells.insert(0, [title.upper() for title in header])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)
