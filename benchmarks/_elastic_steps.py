"""Step time of two policy replicas of one rank beside one replica of `dp_replicate` 2: one batch, two processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import _elastic_toy as toy
import _ragged
from _elastic_runs import CACHE, PROGRAM, log_of, started, wait_until, write_recipe

SIDES: Mapping[str, dict[str, Any]] = {
    "2 replicas of one rank": {"replicas": 2},
    "1 replica, dp_replicate 2": {"parallel": {"dp_replicate": 2}},
}
WARM = 3
"""First steps that are not counted."""
ROWS, TOKENS = 16, 48
"""Rows of a step, and tokens of a prompt and of an answer of Qwen3."""


def qwen_recipe() -> dict[str, Any]:
    """Supervised training of the Qwen3 of train_step.py, 11 million parameters, on rows of equal length."""
    model = CACHE / "qwen3"
    if not (model / "config.json").is_file():
        _ragged.write_model(model)
        (model / "chat_template.jinja").unlink(missing_ok=True)
    rows = CACHE / "numbers.jsonl"
    numbers = [" ".join("<unk>" for _ in range(TOKENS))] * 2
    rows.write_text((json.dumps({"prompt": numbers[0], "answer": numbers[1]}) + "\n") * 64)
    return {
        "run": {"domain": "llm", "name": "elastic", "max_steps": 0},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(rows), "chat_template": "none", "response_column": "answer"},
        "algorithm": {"name": "sft"},
        "policy": {"prompts_per_step": ROWS, "threads": 1, "optimizer": {"learning_rate": 1e-4}},
        "logging": {"sinks": ["jsonl"]},
    }


def toy_recipe() -> dict[str, Any]:
    """The toy model of the kills."""
    tables = toy.recipe()
    del tables["policy"]["replicas"]
    return tables


RECIPES = {"Qwen3 of 11M": qwen_recipe, "toy of 0.5M": toy_recipe}


def step_s(model: str, side: str, *, steps: int) -> float:
    """Return the median seconds of a step in a run of its own."""
    tables = RECIPES[model]()
    tables["run"]["max_steps"] = steps
    tables["policy"] |= SIDES[side]
    path, run_dir = write_recipe("steps", tables)
    log = log_of("steps")
    with started([PROGRAM, "run", str(path)], log) as process:
        wait_until(lambda: process.poll() is not None, f"the end of {side}", log=log)
        rows = _rows(run_dir / "metrics.jsonl")
        assert len(rows) == steps, log.read_text()[-3000:]
    return median(row["step_s"] for row in rows[WARM:])


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
