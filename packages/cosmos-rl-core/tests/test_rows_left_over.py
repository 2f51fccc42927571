"""Rows that no step trains on, and files of rows that change between the starts of a run."""

import pytest

from cosmos_rl_core import run
from cosmos_rl_core.cli.app import main
from cosmos_rl_core.errors import UserError

TINY = "cosmos_rl_core.testing.tiny:TINY"
GROWING = """
from pathlib import Path

from cosmos_rl_core.testing.tiny import Tiny


class Growing(Tiny):
    def load_rows(self, data):
        count = int(Path(__file__).with_suffix(".txt").read_text())
        return [{"context": place % 5} for place in range(count)], "tiny"


GROWING = Growing()
"""


def recipe(output, *, domain=TINY, **sections):
    return {
        "run": {"domain": domain, "output_dir": str(output), "placement": "inline"},
        "prompts": {"epochs": 1},
        "model": {"actions": 3, "contexts": 5},
        "data": {"rows": 10},
        "policy": {"prompts_per_step": 4},
        "rollout": {"engine": "tiny", "group_size": 2, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
        "checkpoint": {"every_steps": 1},
        "logging": {"sinks": ["console"]},
    } | sections


def test_rows_that_fill_no_step_are_named_at_the_start_and_by_check(tmp_path, capsys):
    note = "the last 2 of 10 prompts are fewer than [policy] prompts_per_step, and are not trained on"
    run(recipe(tmp_path / "run"))
    assert note in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit) as left:
        main(["check", str(tmp_path / "run" / "resolved.toml")])
    assert left.value.code == 0
    assert note in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("keys", [{"prompts": {"epochs": 2}}, {"policy": {"prompts_per_step": 5}}])
def test_rows_that_fill_all_steps_need_no_note(tmp_path, capsys, keys):
    run(recipe(tmp_path / "run", **keys))
    assert "not trained on" not in capsys.readouterr().out


def test_a_run_is_not_continued_with_another_number_of_rows(tmp_path, monkeypatch):
    (tmp_path / "growing.py").write_text(GROWING)
    monkeypatch.syspath_prepend(tmp_path)
    continued = recipe(tmp_path / "run", domain="growing:GROWING")
    (tmp_path / "growing.txt").write_text("12")
    run(continued, ["run.max_steps=1"])
    (tmp_path / "growing.txt").write_text("16")
    with pytest.raises(UserError, match=r"had 12 rows when the run began, and has 16: .* Restore the rows"):
        run(continued, resume="auto")
    elsewhere = recipe(tmp_path / "other", domain="growing:GROWING")
    with pytest.raises(UserError, match="had 12 rows"):
        run(elsewhere, resume=str(tmp_path / "run" / "checkpoints" / "step_1"))
    (tmp_path / "growing.txt").write_text("12")
    assert run(continued, resume="auto").steps == 3
