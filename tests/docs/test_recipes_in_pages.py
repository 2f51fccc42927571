"""Recipes in the pages, and the keys that the text names, are valid."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping

import pytest
from pages import PAGES, ROOT, blocks, name_of, prose

from cosmos_rl_core.monitor.config import DEFAULT_RULES, MonitorConfig
from cosmos_rl_core.ops.reward_service.settings import ServerSettings
from cosmos_rl_core.recipe.load import load, load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.schema import recipe_schema
from cosmos_rl_core.settings.problems import validated

CORE = ROOT / "packages/cosmos-rl-core/src/cosmos_rl_core"
DOMAINS = ("llm", "vla", "wfm")
DOMAIN_OF = {
    "vla": ("docs/vla", "docs/openvla", "docs/simulators", "packages/cosmos-rl-vla"),
    "wfm": (
        "docs/wfm",
        "docs/ema",
        "docs/monitor",
        "docs/algorithms/ddrl",
        "docs/algorithms/flow",
        "docs/algorithms/nft",
        "docs/algorithms/same_number",
    ),
}
"""Pages whose parts of recipes are of another domain than llm."""
TOML = blocks("toml")
RECIPES = [block for block in TOML if "[[rewards]]" not in block.text]
SERVERS = [block for block in TOML if "[[rewards]]" in block.text]


def domain_of(page: str) -> str:
    of_page = [name for name, starts in DOMAIN_OF.items() if page.startswith(starts)]
    return of_page[0] if of_page else "llm"


def is_given(key: str, recipe: object) -> bool:
    """Whether the block itself has the key or its table."""
    for part in key.split("."):
        if isinstance(recipe, list) and part.isdigit() and int(part) < len(recipe):
            recipe = recipe[int(part)]
        elif isinstance(recipe, Mapping) and part in recipe:
            recipe = recipe[part]
        else:
            return False
    return True


@pytest.mark.parametrize("block", RECIPES, ids=str)
def test_a_part_of_a_recipe_has_known_keys_and_values(block):
    recipe = tomllib.loads(block.text)
    assert recipe.keys() <= RunConfig.model_fields.keys(), "a block begins with its section"
    run = {"domain": domain_of(block.page), "max_steps": 100, **recipe.get("run", {})}
    model = {"path": "model", **recipe.get("model", {})}
    found = load({**recipe, "run": run, "model": model}).problems
    assert [str(each) for each in found if is_given(each.key, recipe)] == []


@pytest.mark.parametrize("block", SERVERS, ids=str)
def test_a_reward_servers_file_is_valid(block):
    validated(ServerSettings, tomllib.loads(block.text))


def test_the_rules_of_the_monitors_page_are_the_defaults():
    (block,) = [block for block in RECIPES if block.page == "docs/monitor.md" and "rules = [" in block.text]
    assert validated(MonitorConfig, tomllib.loads(block.text)["monitor"]).rules == DEFAULT_RULES


def keys_of(schema: Mapping, here: Mapping) -> set[str]:
    """All dotted keys below a place of a JSON schema; `*` stands for any name, or for tables of free form."""
    while "$ref" in here:
        here = schema["$defs"][here["$ref"].rsplit("/", 1)[1]]
    if any(name in here for name in ("anyOf", "items")):
        choices = here.get("anyOf", []) + ([here["items"]] if "items" in here else [])
        return {key for choice in choices for key in keys_of(schema, choice)}
    found = set()
    for name, inner in here.get("properties", {}).items():
        found |= {name} | {f"{name}.{key}" for key in keys_of(schema, inner)}
    if here.get("additionalProperties") not in (None, False):
        found.add("*")
    return found


@pytest.fixture(scope="module")
def known():
    """Keys of recipes of every domain."""
    schemas = [recipe_schema(load_domain(name)) for name in DOMAINS]
    return {key for schema in schemas for key in keys_of(schema, schema)}


def is_key(key: str, known: set[str]) -> bool:
    parts = [part for part in key.split(".") if not part.isdigit()]
    free = (".".join([*parts[:depth], "*"]) for depth in range(1, len(parts)))
    return ".".join(parts) in known or any(each in known for each in free)


NAMES = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?: ?=[^`]*)?`")
"""`rollout.group_size`, `rollout.group_size = 8`."""
BRACKETED = re.compile(r"`\[+([a-z_.]+)\]+(?: ([a-z_]+))?(?: ?=[^`]*)?`")
"""`[rollout.sampling]`, `[rollout] group_size`, `[[reward.functions]]`."""
NOT_KEYS = {"rollout.text", "rollout.media", "rollout.exchanges", "model.load_weights", "distillation"}
"""Python, and a section of upstream's."""
FOREIGN = {"CHANGELOG.md", "docs/migrate.md"}
"""Pages with keys of earlier versions or of other programs."""
EXTRAS = {
    extra
    for file in ROOT.glob("packages/*/pyproject.toml")
    for extra in tomllib.loads(file.read_text(encoding="utf-8"))["project"].get("optional-dependencies", {})
}
"""`[wandb]` in lines of pip."""
FILES = ("json", "jsonl", "toml", "md", "py", "sqsh", "log", "mp4", "safetensors", "jinja", "txt", "pem", "lock")


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in FOREIGN], ids=name_of)
def test_keys_that_the_text_names_are_known(page, known):
    text = prose(page)
    named = [match[1] for match in NAMES.finditer(text)]
    named = [key for key in named if key.split(".")[0] in RunConfig.model_fields and not key.endswith(FILES)]
    named += [".".join(filter(None, match.groups())) for match in BRACKETED.finditer(text)]
    assert sorted({key for key in named if not is_key(key, known)} - NOT_KEYS - EXTRAS) == []


REMEDIES = [*(CORE / "ops/doctor").glob("*.py"), CORE / "ops/dashboard/health.py"]
IN_TEXT = re.compile(r"(?<![\w./])([a-z]+(?:\.[a-z_]+)+)(?![\w./(])|\[([a-z.]+)\] ([a-z_]+)")
"""rollout.group_size, [rollout] group_size."""


@pytest.mark.parametrize("file", REMEDIES, ids=lambda file: file.name)
def test_keys_that_remedies_name_are_known(file, known):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {match[1] or f"{match[2]}.{match[3]}" for text in texts for match in IN_TEXT.finditer(text)}
    named = {key for key in named if key.split(".")[0] in RunConfig.model_fields and not key.endswith(FILES)}
    assert sorted(key for key in named if not is_key(key, known)) == []
