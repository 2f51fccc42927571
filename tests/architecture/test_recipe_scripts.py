"""Scripts of the cookbook: each takes --seed, and hands it to every run that it starts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "cookbook").glob("*/recipe.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.parent.name)
def test_a_script_takes_a_seed_and_its_runs_get_it(script):
    text = script.read_text(encoding="utf-8")
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    options = [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "parser.add_argument"]
    runs = [call for call in calls if ast.unparse(call.func) == "run"]
    assert "'--seed'" in options
    assert runs and text.count("run.seed=") >= len(runs)


def test_demonstrations_are_recorded_with_their_progress():
    recorders = [script for script in SCRIPTS if "record(" in script.read_text(encoding="utf-8")]
    assert recorders and all("progress=print" in script.read_text(encoding="utf-8") for script in recorders)
