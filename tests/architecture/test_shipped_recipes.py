"""Every recipe we ship loads, survives its own resolved dump, and is valid under the schema that editors use."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from cosmos_rl_core.cli.init import init
from cosmos_rl_core.recipe.load import dump_resolved, load_config, load_domain
from cosmos_rl_core.recipe.schema import recipe_schema

ROOT = Path(__file__).parents[2]
RECIPES = sorted([*ROOT.glob("packages/*/src/*/recipe.toml"), *ROOT.glob("cookbook/**/*.toml")])


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shipped_recipe_loads(path, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)
    config = load_config(path)
    assert load_config(tomllib.loads(dump_resolved(config))) == config


@pytest.mark.parametrize("domain", ["llm", "vla", "wfm"])
def test_the_schema_accepts_every_shipped_recipe_and_refuses_a_misspelt_key(domain):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = jsonschema.Draft7Validator(recipe_schema(load_domain(domain)))
    recipes = [tomllib.loads(path.read_text(encoding="utf-8")) for path in RECIPES]
    recipes = [recipe for recipe in recipes if recipe["run"]["domain"] == domain]
    assert len(recipes) > 1
    for recipe in recipes:
        schema.validate(recipe)
        for section, key in (("run", "max_step"), ("model", "pth"), ("data", "pth"), ("policy", "prompt_per_step")):
            wrong = recipe | {section: recipe.get(section, {}) | {key: 1}}
            assert [key in error.message for error in schema.iter_errors(wrong)] == [True]


@pytest.mark.skipif(shutil.which("taplo") is None, reason="taplo is not installed: pip install taplo")
@pytest.mark.parametrize("domain", ["llm", "vla", "wfm"])
def test_an_editor_checks_the_recipe_of_init_against_the_schema_beside_it(domain, tmp_path):
    recipe = init(domain, tmp_path)

    def lint() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["taplo", "lint", recipe], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    sound = lint()
    assert sound.returncode == 0, sound.stderr
    recipe.write_text(recipe.read_text().replace("max_steps = ", "max_step = ", 1))
    wrong = lint()
    assert wrong.returncode == 1 and "max_step" in wrong.stderr
