"""Processor time, memory, disk, network and GPUs of the machines of a run, from system/*.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_rl_core.ops.dashboard.lines import FileRows

MOST_POINTS = 400
MOST_FILES = 256
"""Files beyond them, by name, are not read."""
RATES = ("cpu", "memory", "disk_free", "received", "sent")
"""Columns of a machine over time; of the other ones the last sample is shown."""


class MachineHistory:
    """Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, FileRows] = {}

    def read(self) -> dict[str, Any]:
        """Return `machines` and `processes`, each over time, in seconds since the first sample."""
        for path in sorted(self._folder.glob("*.jsonl"))[:MOST_FILES]:
            self._files.setdefault(path, FileRows(path, most_bytes=2**20))
        samples = [rows for file in list(self._files.values()) if (rows := file.read())]
        start = min((rows[0].get("time", 0.0) for rows in samples), default=0.0)
        by_host: dict[str, list[Mapping[str, Any]]] = {}
        for row in sorted((row for rows in samples for row in rows if row.get("machine")), key=lambda row: row["time"]):
            by_host.setdefault(str(row.get("host")), []).append(row)
        return {
            "machines": [_machine(host, rows, start=start) for host, rows in sorted(by_host.items())],
            "processes": [_process(rows, start=start) for rows in samples],
        }


def _machine(host: str, rows: Sequence[Mapping[str, Any]], *, start: float) -> dict[str, Any]:
    last, rows = rows[-1]["machine"], _thin(rows)
    machines = [row["machine"] for row in rows]
    return {
        "host": host,
        "at": [round(row["time"] - start, 1) for row in rows],
        **{name: [machine.get(name) for machine in machines] for name in RATES},
        **{name: last.get(name) for name in ("cpus", "memory_total", "disk_total")},
        "gpus": [_gpu(gpu, machines) for gpu in last.get("gpus", ())],
    }


def _gpu(last: Mapping[str, Any], machines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    index = last.get("index")
    over_time = [next((g for g in machine.get("gpus", ()) if g.get("index") == index), {}) for machine in machines]
    columns = {name: [gpu.get(name) for gpu in over_time] for name in ("busy", "memory")}
    return {"index": index, "name": last.get("name", ""), "memory_total": last.get("memory_total"), **columns}


def _process(rows: Sequence[Mapping[str, Any]], *, start: float) -> dict[str, Any]:
    largest, last = max(row.get("memory", 0) for row in rows), rows[-1]
    rows = _thin(rows)
    return {
        "process": last.get("process", ""),
        "host": last.get("host", ""),
        "processes": max(row.get("processes", 1) for row in rows),
        "largest": largest,
        "at": [round(row.get("time", start) - start, 1) for row in rows],
        "cpu": [row.get("cpu") for row in rows],
        "memory": [row.get("memory") for row in rows],
    }


def _thin(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return at most MOST_POINTS rows, the last one among them."""
    stride = -(-len(rows) // MOST_POINTS)
    return rows[(len(rows) - 1) % stride :: stride]
