"""Every recipe we ship is one that loads, and survives its own resolved dump."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from cosmos_rl_core.recipe.load import dump_resolved, load_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted([*ROOT.glob("packages/*/src/*/recipe.toml"), *ROOT.glob("cookbook/**/*.toml")])


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shipped_recipe_loads(path, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)
    config = load_config(path)
    assert load_config(tomllib.loads(dump_resolved(config))) == config
