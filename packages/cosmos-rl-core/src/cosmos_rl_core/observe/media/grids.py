"""Grids of samples, which rollout replicas leave on disk, shown where the curves of a run are.

rollout replica   writes media/step_000012/grid_rollout-0.gif, then a line in media/index_rollout-0.jsonl:
                  {"step": 12, "grid": "step_000012/grid_rollout-0.gif", ...}
controller        reads the new lines of every index, and shows each grid they name

Any `interfaces.Recorder` that writes such lines has its .gif or .png shown.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from cosmos_rl_core.observe.sinks import Sink


class Grids:
    """Shows what is new.

    grids = Grids(run_dir / "media", sinks)       # what is there already was shown by an earlier life of the run
    grids.show_new()                               # now and then
    """

    def __init__(self, directory: Path, sinks: Sequence[Sink]) -> None:
        self._directory = directory
        self._sinks = tuple(sinks)
        self._read = {index: index.stat().st_size for index in self._indices()}
        """Bytes of each index that were dealt with."""

    def show_new(self) -> None:
        """Show each grid that has grown since the last call, once."""
        for index in self._indices():
            grown = dict(filter(None, map(_sheet, self._new_lines(index))))
            for grid, step in grown.items():
                with contextlib.suppress(FileNotFoundError):  # cleaned away by the user: nothing is lost by it
                    for sink in self._sinks:
                        sink.show(step, self._name(index), index.parent / grid)

    def _indices(self) -> list[Path]:
        """Those of training and of evaluations."""
        return sorted([*self._directory.glob("index*.jsonl"), *self._directory.glob("eval/index*.jsonl")])

    def _new_lines(self, index: Path) -> list[bytes]:
        """The whole lines that were added."""
        with index.open("rb") as file:
            file.seek(self._read.get(index, 0))
            lines = [line for line in file if line.endswith(b"\n")]
        self._read[index] = self._read.get(index, 0) + sum(map(len, lines))
        return lines

    def _name(self, index: Path) -> str:
        """samples/rollout-0, samples/eval/rollout-0."""
        replica = index.stem.removeprefix("index").removeprefix("_")
        return "/".join(["samples", *index.parent.relative_to(self._directory).parts, *([replica] if replica else [])])


def _sheet(line: bytes) -> tuple[str, int] | None:
    """The grid that a line of an index names, and its step; None for a line that names none, or is damaged."""
    try:
        held = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match held:
        case {"grid": str(grid), "step": int(step)}:
            return grid, step
    return None
