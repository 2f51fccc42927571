"""What the pages at the root and in docs/ say can be followed: examples load, links lead somewhere."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from cosmos_rl_core.recipe.load import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("cookbook/**/*.md"), *ROOT.glob("packages/*/*.md")]
)


def example(page, language):
    """The first block of a language in a page."""
    return (ROOT / page).read_text(encoding="utf-8").split(f"```{language}\n")[1].split("```")[0]


def test_the_recipe_in_the_readme_loads_and_is_the_python_example():
    recipe = tomllib.loads(example("README.md", "toml"))
    tree = ast.parse(example("README.md", "python"))
    (tables,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "run"
    )
    assert load_config(recipe) == load_config(ast.literal_eval(tables.args[0]))


def anchors(page):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_source_files_exist(page):
    """`control/ledger/leasing.py` and the like are files of a package, or of the page's own folder."""
    sources = [path for path in ROOT.glob("packages/*/src/*/**/*.py")]
    tests = ROOT.glob("packages/*/tests")
    roots = [ROOT, page.parent, *tests, *ROOT.glob("packages/*/src"), *{path.parent for path in sources}]
    for name in re.findall(r"`([\w/.-]+\.(?:py|toml))`", page.read_text(encoding="utf-8")):
        known = any((root / name).exists() for root in roots) or name in ILLUSTRATIONS
        assert known, f"{page.name} names {name}, which is not there"


ILLUSTRATIONS = {"pyproject.toml", "resolved.toml", "run.toml", "recipe.toml", "config.py", "my_rewards.py", "demo.py"}
"""Names of files that stand for one of their kind, or that a run writes."""
