"""monitor.jsonl: one line per check of the monitor: metrics, action, and the state after it."""

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

    history = History(run_dir, first_step=20)      # a resumed run keeps the earlier checks
    monitor = HackMonitor(config, state=history.state)
    history.add(metrics, monitor.observe(metrics), monitor.state)
    """

    def __init__(self, run_dir: Path, *, first_step: int) -> None:
        """Drop the checks at `first_step` and later: they will be repeated."""
        self._path = run_dir / NAME
        keep_earlier(self._path, first_step)
        self.state = _last_state(self._path) or State()
        """State of the monitor after the newest check that is kept."""

    def add(self, metrics: Metrics, verdict: Verdict, state: State) -> None:
        """Append one check."""
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
    """Return the step of the last check without a crossed bound, or None. The run may still be active."""
    state = _last_state(run_dir / NAME)
    return state.last_good if state else None


def _last_state(path: Path) -> State | None:
    """State of the newest readable line, or None. Incomplete and damaged lines are skipped."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            return State.from_json(json.loads(line)["state"])
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return None
