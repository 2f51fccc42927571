"""One run directory as the page reads it. Everything comes from files, so that a dead or copied run is shown too."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cosmos_rl_core.control.status import SILENT_S, live_controller, lost_host
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.machine import FOLDER
from cosmos_rl_core.observe.metrics import notes
from cosmos_rl_core.observe.record import EVENTS, OUTCOME, RUN, last_checkpoint, resume_command
from cosmos_rl_core.ops.dashboard.curves import Curves
from cosmos_rl_core.ops.dashboard.health import LAST, health
from cosmos_rl_core.ops.dashboard.lines import FileRows, read_object, short
from cosmos_rl_core.ops.dashboard.machines import MachineHistory
from cosmos_rl_core.ops.dashboard.rollouts import Rollouts
from cosmos_rl_core.ops.dashboard.timeline import RunTimeline

RECIPE = "resolved.toml"
MARKS = (RECIPE, "metrics.jsonl", "status.json")
"""Files of which a run directory has at least one."""
LOG_BYTES = 64 * 2**10
PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".gif": "image/gif", ".mp4": "video/mp4"}
SECRET = ("token", "secret", "password", "api_key", "apikey")
"""Ends of keys whose values are not shown."""
SPARK_POINTS = 60
RECENT_S = 60.0
"""Least time in which waits are measured."""


class RecordedRun:
    """One run directory."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.curves = Curves(path / "metrics.jsonl")
        self.rollouts = Rollouts(path / "rollouts")
        self.timeline = RunTimeline(path / "spans")
        self.machines = MachineHistory(path / FOLDER)
        self._evaluations = FileRows(path / "eval.jsonl")
        self._monitor = FileRows(path / "monitor.jsonl")
        self._events = FileRows(path / EVENTS, most_bytes=2**20)
        self._history = FileRows(path / "status.jsonl")

    def recipe(self) -> dict[str, Any]:
        """Return resolved.toml, without secrets; empty if it cannot be read."""
        try:
            return without_secrets(tomllib.loads((self.path / RECIPE).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            return {}

    def status(self) -> dict[str, Any]:
        """Return status.json with `life`: done, interrupted, failed, stopped, live, silent, dead, elsewhere or unknown.

        elsewhere: last seen on another machine, where its controller may be alive. unknown: without a status.
        """
        status = read_object(self.path / "status.json")
        outcome = read_object(self.path / OUTCOME)
        return {**status, "life": self._life(status, outcome), "age_s": round(time.time() - status.get("time", 0.0), 1)}

    def _life(self, status: dict[str, Any], outcome: dict[str, Any]) -> str:
        if outcome.get("state"):
            return str(outcome["state"])
        if not status:
            return "unknown"
        if status.get("phase") == "finished":
            return "done"
        seen_s = time.time() - status.get("time", 0.0)
        try:
            live = bool(live_controller(self.path, seen_s=seen_s))
        except (OSError, UserError):
            live = False
        if not live:
            return "elsewhere" if lost_host(self.path) else "dead"
        return "silent" if seen_s > SILENT_S else "live"

    def summary(self) -> dict[str, Any]:
        """Return the line of the run in the list of runs."""
        self.curves.update()
        recipe, status = self.recipe(), self.status()
        reward = "reward_mean" if "reward_mean" in self.curves.names else "loss"
        evaluations = self._evaluations.read()
        held_out = [row for row in evaluations if "eval/reward_mean" in row or "eval/loss" in row]
        spark = self.curves.points(axis="step", names=[reward], most=SPARK_POINTS)["series"].get(reward, {})
        return {
            "id": self.name,
            "path": str(self.path),
            "life": status["life"],
            "phase": status.get("phase", ""),
            "domain": recipe.get("run", {}).get("domain", ""),
            "algorithm": recipe.get("algorithm", {}).get("name", ""),
            "steps": self.curves.steps,
            "max_steps": recipe.get("run", {}).get("max_steps"),
            "metric": reward,
            "last": self.curves.mean(reward, last=10),
            "spark": spark.get("mean", []),
            "held_out": [_held_out(row) for row in (held_out[:1] + held_out[-1:] if held_out else [])],
            "time_s": short(float(self.curves.axis("time_s")[-1])) if self.curves.steps else None,
            "started": read_object(self.path / RUN).get("started"),
        }

    def overview(self) -> dict[str, Any]:
        """Return all that is shown beside the curves."""
        self.curves.update()
        status, outcome = self.status(), read_object(self.path / OUTCOME)
        live = status["life"] in ("live", "silent")
        checks, recipe = self._monitor.read(), self.recipe()
        resume = resume_command(self.path, checkpoint=last_checkpoint(self.path))
        findings = health(
            self.curves,
            status=status,
            outcome=outcome,
            live=live,
            shares=self._recent_shares(),
            monitor=checks,
            recipe=recipe,
            resume=resume,
        )
        return {
            "id": self.name,
            "status": status,
            "outcome": outcome,
            "start": _start(read_object(self.path / RUN)),
            "health": [finding._asdict() for finding in findings],
            "evaluations": self._evaluations.read(),
            "names": self.curves.names,
            "notes": notes(self.curves.names),
            "steps": self.curves.steps,
        }

    def _recent_shares(self) -> dict[str, float]:
        """Return the shares of spans in as much time as the last steps took, up to the present."""
        times = self.curves.axis("time_s")[-LAST - 1 :]
        self.timeline.update()
        length = float(times[-1] - times[0]) if len(times) else 0.0
        return self.timeline.recent_shares(length=max(RECENT_S, length), end=self.now())

    def members(self) -> dict[str, Any]:
        """Return members and waits, now and over time."""
        self.timeline.update()
        history = self._history.read()
        start = history[0].get("time", 0.0) if history else 0.0
        thin = history[:: max(1, len(history) // 500)]
        return {
            "status": self.status(),
            "history": [
                {
                    "at": round(row.get("time", 0.0) - start, 1),
                    "step": row.get("step"),
                    "samples": row.get("samples", {}),
                }
                for row in thin
            ],
            "waiting": self.timeline.waits(end=self.now()),
            "events": self._events.read()[-400:],
        }

    def now(self) -> float:
        """Return the end of spans that are open: now for a live run, else the last time it was seen alive."""
        status = self.status()
        return time.time() if status["life"] == "live" else float(status.get("time", time.time()))

    def logs(self) -> list[dict[str, Any]]:
        """Return name, size and end of each log."""
        logs = []
        for path in [*sorted((self.path / "logs").glob("*.log")), *sorted((self.path / "launch").glob("*.log"))]:
            with path.open("rb") as file:
                size = path.stat().st_size
                file.seek(max(0, size - LOG_BYTES))
                text = file.read().decode(errors="replace")
            name = path.name if path.parent.name == "logs" else f"launch/{path.name}"
            logs.append({"name": name, "bytes": size, "text": text})
        return logs

    def gallery(self) -> list[dict[str, Any]]:
        """Return the samples with pictures, videos or episodes, the newest first."""
        root = self.path / "media"
        latest: dict[tuple[str, int, Any], dict[str, Any]] = {}
        for index in sorted(root.glob("**/index*.jsonl")):
            place = index.parent.relative_to(root)
            for row in FileRows(index).read():
                if not isinstance(row.get("step"), int):
                    continue
                stem = place / f"step_{row['step']:06d}" / f"sample_{row.get('sample')}"
                file = next(
                    (stem.with_suffix(end) for end in PICTURES if (root / stem.with_suffix(end)).is_file()), None
                )
                if file is None:
                    continue
                details = read_object((root / stem).with_suffix(".json"))
                kind = "evaluation" if place.parts[:1] == ("eval",) else "training"
                latest[kind, row["step"], row.get("sample")] = {**row, **details, "kind": kind, "file": str(file)}
        return sorted(latest.values(), key=lambda row: (-row["step"], row["kind"]))[:400]

    @property
    def has_media(self) -> bool:
        """Whether there is a gallery, of training or of evaluations."""
        media = self.path / "media"
        return any(next(folder.glob("index*.jsonl"), None) is not None for folder in (media, media / "eval"))

    def picture(self, name: str) -> Path | None:
        """Return a file of media/ that the page shows; None for any other path."""
        root = (self.path / "media").resolve()
        path = (root / name).resolve()
        return path if path.is_relative_to(root) and path.is_file() and path.suffix in PICTURES else None


def _held_out(row: dict[str, Any]) -> float | None:
    return row.get("eval/reward_mean", row.get("eval/loss"))


def _start(start: dict[str, Any]) -> dict[str, Any]:
    if not start:
        return {}
    command = [_word(str(word)) for word in start.get("command", ())]
    return {**start, "command": command, "earlier": [_start(each) for each in start.get("earlier", ())]}


def _word(word: str) -> str:
    key, equals, _ = word.partition("=")
    return f"{key}=***" if equals and key.lower().endswith(SECRET) else word


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a recipe with *** in place of the values of secret keys."""
    if isinstance(value, dict):
        return {name: without_secrets(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(inner, key) for inner in value]
    return "***" if key.lower().endswith(SECRET) and value else value


def find_runs(paths: Iterable[Path], known: Mapping[str, RecordedRun] | None = None) -> dict[str, RecordedRun]:
    """Return the runs in these directories by name: each one is a run, or has runs at most two folders down.

    known: runs found before, which keep their names and stay, also if they were removed.

    Raises UserError if a directory does not exist.
    """
    runs = dict(known or {})
    paths_of_runs = {run.path for run in runs.values()}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: no such directory")
        folders = [path] if _is_run(path) else sorted(d for d in (*path.glob("*"), *path.glob("*/*")) if _is_run(d))
        for folder in folders:
            folder = folder.resolve()
            if folder not in paths_of_runs:
                paths_of_runs.add(folder)
                name = _free_name(folder, runs)
                runs[name] = RecordedRun(folder, name)
    return runs


def _free_name(folder: Path, taken: Mapping[str, RecordedRun]) -> str:
    """Return the folder's name, behind the names of as many folders above it as make it differ from the others."""
    name = folder.name
    for parent in folder.parents:
        if name not in taken:
            return name
        name = f"{parent.name}-{name}"
    return str(folder)


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in MARKS)


def as_json(value: Any) -> bytes:
    """Return JSON for a browser, which has no NaN."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return short(value) if isinstance(value, float) else value
