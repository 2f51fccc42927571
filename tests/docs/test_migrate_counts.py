"""docs/migrate.md says how many recipes of NVIDIA's Cosmos-RL lose no key, and which keys the others lose."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import tomli_w

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.migrate.command import migrate
from cosmos_rl_core.recipe.load import load_config

TABLE = Path(__file__).parent / "support" / "cosmos_rl_keys.tsv"
PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"


def recipes():
    """Recipes by name, as TOML."""
    names, tables = {}, defaultdict(dict)
    for line in TABLE.read_text().splitlines():
        if line.startswith("#"):
            number, tab, name = line.removeprefix("# ").partition("\t")
            names |= {int(number): name} if tab else {}
            continue
        key, value, numbers = line.split("\t")
        for first, _, last in (part.partition("-") for part in numbers.split()):
            for number in range(int(first), int(last or first) + 1):
                *sections, name = key.split(".")
                here = tables[number]
                for section in sections:
                    here = here.setdefault(section, {})
                here[name] = json.loads(value)
    return {names[number]: tomli_w.dumps(tables[number]) for number in names}


@pytest.fixture(scope="module")
def results():
    """The migrated recipes by name, or the error."""

    def attempt(text):
        try:
            return migrate(text)
        except UserError as error:
            return str(error)

    return {name: attempt(text) for name, text in recipes().items()}


def test_every_recipe_that_is_written_loads(results):
    for migrated in results.values():
        if not isinstance(migrated, str):
            load_config(migrated.recipe)


def test_one_names_a_model_that_does_not_exist_here(results):
    (error,) = [result for result in results.values() if isinstance(result, str)]
    assert "there is no such family here" in error


def test_the_page_has_the_counts_and_the_keys_that_are_lost(results):
    written = {name: result for name, result in results.items() if not isinstance(result, str)}
    lost = {name: result.refused for name, result in written.items() if result.refused}
    whole = len(written) - len(lost)
    counts = f"{len(results)} recipes, {len(written)} give a recipe that loads, {whole} of them without a key"
    page = " ".join(PAGE.read_text().split())
    assert counts in page
    assert whole >= 50
    for name, keys in lost.items():
        common = {key.rpartition(".")[0] + ".*" if len(keys) > 1 else key for key in keys}
        assert f"| `{name}` | {', '.join(f'`{key}`' for key in sorted(common))} |" in page
