"""Shows grids of samples, written by rollout replicas, in the sinks of a run.

rollout replica   writes media/step_000012/grid_rollout-0.gif, then a line in media/index_rollout-0.jsonl:
                  {"step": 12, "grid": "step_000012/grid_rollout-0.gif", ...}
controller        reads the new lines of every index and sends each named grid to the sinks

The .gif and .png files of any `interfaces.Recorder` that writes such lines are shown.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from cosmos_rl_core.observe.sinks import Sink


class Grids:
    """Sends new grids to the sinks.

    grids = Grids(run_dir / "media", sinks)       # existing grids were shown before the run was resumed
    grids.show_new()                               # periodically
    """

    def __init__(self, directory: Path, sinks: Sequence[Sink]) -> None:
        self._directory = directory
        self._sinks = tuple(sinks)
        self._read = {index: index.stat().st_size for index in self._indices()}
        """Number of processed bytes of each index."""

    def show_new(self) -> None:
        """Show each grid that was written since the last call, once."""
        for index in self._indices():
            grown = dict(filter(None, map(_grid_of, self._new_lines(index))))
            for grid, step in grown.items():
                with contextlib.suppress(FileNotFoundError):  # removed by the user
                    for sink in self._sinks:
                        sink.show(step, self._name(index), index.parent / grid)

    def _indices(self) -> list[Path]:
        """Index files of training and of evaluations."""
        return sorted([*self._directory.glob("index*.jsonl"), *self._directory.glob("eval/index*.jsonl")])

    def _new_lines(self, index: Path) -> list[bytes]:
        """The complete lines added since the last call."""
        with index.open("rb") as file:
            file.seek(self._read.get(index, 0))
            lines = [line for line in file if line.endswith(b"\n")]
        self._read[index] = self._read.get(index, 0) + sum(map(len, lines))
        return lines

    def _name(self, index: Path) -> str:
        """samples/rollout-0, samples/eval/rollout-0."""
        replica = index.stem.removeprefix("index").removeprefix("_")
        return "/".join(["samples", *index.parent.relative_to(self._directory).parts, *([replica] if replica else [])])


def _grid_of(line: bytes) -> tuple[str, int] | None:
    """The grid and step in a line of an index; None for a damaged line or one without a grid."""
    try:
        held = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match held:
        case {"grid": str(grid), "step": int(step)}:
            return grid, step
    return None
