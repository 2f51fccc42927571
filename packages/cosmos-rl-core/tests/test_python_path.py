"""The folder of a recipe is looked up last: what lies beside a recipe hides nothing of Python's."""

import os
import subprocess
import sys
import token
from pathlib import Path

import pytest

from cosmos_rl_core import plugins, run
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import PYTHON, VARIABLE, add_folders, child_environment, import_from

HIDING = "raise RuntimeError('this is not the token of the standard library')"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe beside files that are called like modules of Python's and of an installed package."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("token", "types", "tokenize", "yaml"):
        (tmp_path / f"{name}.py").write_text(HIDING)
    (tmp_path / "beside_the_recipe.py").write_text("import token\n\n\ndef reward(group):\n    return token.ENDMARKER\n")
    (tmp_path / "run.toml").write_text("")
    return tmp_path / "run.toml"


def test_a_recipes_folder_comes_last(recipe):
    before = list(sys.path)
    import_from(recipe)
    assert sys.path[: len(before)] == before
    assert sys.path[len(before) :] == [str(recipe.parent), *([] if str(Path.cwd()) in before else [str(Path.cwd())])]
    assert plugins.load("cosmos_rl.rewards", "beside_the_recipe:reward")(None) == token.ENDMARKER


def test_the_order_is_that_of_the_folders_and_each_is_there_once(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/python"])
    monkeypatch.setenv(VARIABLE, os.pathsep.join(["/parent", "/a"]))
    add_folders(["/a", "/b"])
    add_folders(["/b"])
    assert sys.path == ["/python", "/a", "/b", "/parent"]
    assert child_environment(["/a"]) == {VARIABLE: os.pathsep.join(["/a", "/parent", str(Path.cwd())])}


def test_a_child_process_imports_from_the_recipes_folder_and_keeps_pythons_own(recipe):
    code = (
        "import token, types, sys; from cosmos_rl_core import plugins;"
        "print(plugins.load('cosmos_rl.rewards', 'beside_the_recipe:reward')(None))"
    )
    done = subprocess.run(
        [*PYTHON, "-c", code],
        env={**os.environ, **child_environment([str(recipe.parent)])},
        cwd=recipe.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{token.ENDMARKER}\n", "")


def test_an_attribute_that_is_missing_is_named_with_the_file(recipe):
    import_from(recipe)
    with pytest.raises(UserError, match=r"beside_the_recipe \(.*beside_the_recipe\.py\) has no attribute 'other'"):
        plugins.load("cosmos_rl.rewards", "beside_the_recipe:other")


@pytest.mark.slow
def test_the_workers_of_a_run_keep_pythons_own_modules(recipe, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    tables = {
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "name": "last", "max_steps": 1, "placement": "local"},
        "model": {"actions": 3, "contexts": 6},
        "data": {"rows": 6},
        "rollout": {"engine": "tiny", "group_size": 2, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "beside_the_recipe_too:reward"}]},
        "policy": {"prompts_per_step": 1},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
        "logging": {"sinks": ["jsonl"]},
    }
    (recipe.parent / "beside_the_recipe_too.py").write_text(
        "import token\n\n\ndef reward(group):\n    return [float(token.NAME)] * len(group.rollouts)\n"
    )
    result = run(tables, [f"run.output_dir={recipe.parent / 'out'}"], python_path=[str(recipe.parent)])
    assert result.metrics[0]["reward_mean"] == token.NAME
