"""monitor.jsonl: a line a check of the monitor: what it saw, what followed, and what it remembers from there on."""

from __future__ import annotations

import json
import math
from pathlib import Path

from cosmos_rl_core.monitor.metrics import Metrics
from cosmos_rl_core.monitor.monitor import State, Verdict
from cosmos_rl_core.observe.sinks import keep_earlier

NAME = "monitor.jsonl"


class History:
    """The file of one run.

    history = History(run_dir, first_step=20)      # a resumed run goes on with what is of before
    monitor = HackMonitor(config, state=history.state)
    history.add(metrics, monitor.observe(metrics), monitor.state)
    """

    def __init__(self, run_dir: Path, *, first_step: int) -> None:
        """Drop the history at `first_step` and later, which are taken again."""
        self._path = run_dir / NAME
        keep_earlier(self._path, first_step)
        self.state = _last_state(self._path) or State()
        """What the monitor remembered after the newest check that is kept."""

    def add(self, metrics: Metrics, verdict: Verdict, state: State) -> None:
        """Write down one check."""
        line = {
            "step": metrics.step,
            **{name: value if math.isfinite(value) else None for name, value in metrics.named().items()},
            "action": verdict.action,
            "text": verdict.text,
            "state": state.as_json(),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


def read_healthy(run_dir: Path) -> int | None:
    """Return the step of the last check at which no bound was crossed, in a run that may be going on; None before."""
    state = _last_state(run_dir / NAME)
    return state.last_good if state else None


def _last_state(path: Path) -> State | None:
    """What the newest line remembers; None where there is none. A line that is being written, or damaged, is none."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            return State.from_json(json.loads(line)["state"])
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return None
