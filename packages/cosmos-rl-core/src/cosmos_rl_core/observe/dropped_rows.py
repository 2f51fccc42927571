"""rows_dropped.jsonl: rows of the data that were not trained on; one line per row with its reason and first step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

FILE = "rows_dropped.jsonl"


def write_dropped(run_dir: Path, *, step: int, reasons: Sequence[str]) -> None:
    """Append the reasons of the rows that were dropped in a step."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / FILE).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"step": step, "reason": reason}, ensure_ascii=False) + "\n" for reason in reasons)


def first_reasons(run_dir: Path, *, first_step: int, count: int) -> list[str]:
    """Return the reasons of the first `count` rows that were dropped in `first_step` or later."""
    if not (run_dir / FILE).is_file():
        return []
    with (run_dir / FILE).open(encoding="utf-8") as file:
        lines = (json.loads(line) for line in file if line.endswith("\n"))
        found = (line["reason"] for line in lines if line["step"] >= first_step)
        return [reason for _, reason in zip(range(count), found, strict=False)]
