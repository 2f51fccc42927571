"""docs/run_directory.md names every file that a run writes."""

from __future__ import annotations

import re

from pages import ROOT

from cosmos_rl_core import run
from cosmos_rl_core.workers.directory import CONTENTS, FILES, TLS_FILES

ROWS = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/run_directory.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
NAMED = {name.split("/")[0] for row in ROWS for name in re.findall(r"`([\w./-]+)`", row)}


def test_every_file_that_overwrite_removes_is_named():
    assert {*FILES, *CONTENTS} - NAMED - {*TLS_FILES} == set()


def test_every_entry_of_a_runs_directory_is_named(tmp_path):
    result = run(
        {
            "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "placement": "inline", "max_steps": 2},
            "policy": {"prompts_per_step": 2},
            "rollout": {"sampling": {"max_tokens": 3}},
            "reward": {"functions": [{"name": "hits"}]},
            "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
            "eval": {"data": {}},
        },
        [f"run.output_dir={tmp_path / 'run'}"],
    )
    written = {path.name for path in result.run_dir.iterdir()}
    assert {"metrics.jsonl", "outcome.json", "logs"} <= written
    assert written - NAMED == set()
