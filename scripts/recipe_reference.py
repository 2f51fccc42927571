"""Write docs/recipes.md: every key of a recipe, its default and its meaning, read from the models that validate it.

.venv/bin/python scripts/recipe_reference.py            # write the page
.venv/bin/python scripts/recipe_reference.py --check    # exit 1 if it is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from cosmos_rl_core.algorithms.table import TABLE
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.sections import SamplingSection
from cosmos_rl_core.settings.base import Strict, descriptions
from cosmos_rl_core.settings.problems import as_toml
from cosmos_rl_llm.config import LLMDataConfig, LLMModelConfig, LLMTorchOptions
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.rewards import REWARDS

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
DOMAIN_TABLES: dict[str, type[Strict]] = {
    "model": LLMModelConfig,
    "data": LLMDataConfig,
    "rollout.sampling": SamplingSection,
}
"""Sections whose keys are the domain's: shown as the llm domain has them."""
INTRO = """\
# Recipes: every key

<!-- Written by scripts/recipe_reference.py from the models that validate recipes. Change those, and run it. -->

A recipe is a TOML file. `cosmos-rl init llm DIR` writes a commented one to start from, and `cosmos-rl check FILE`
reports every problem of a recipe with its line; with `--deep` also those of tokenizer, lengths of rows, rewards and
machine, as `cosmos-rl run`, `launch` and `run()` of a program do first. `section.key=value` on the command line
replaces a value. An unknown key is an error. A run writes all keys with their values to `resolved.toml` in its
directory.

`cosmos-rl keys rollout.sampling` shows the keys of a section. Editors such as VS Code with Even Better TOML complete
and check keys by the JSON Schema in the first line of a recipe, `#:schema ./recipe.schema.json`. `init` writes both;
for another recipe, `cosmos-rl schema llm > recipe.schema.json` writes the schema. `cosmos-rl --install-completion`
completes commands in the shell.

Names of counts end in the counted unit (`prompts_per_step`), durations in `_s`, sizes in `_bytes`. A *term* is the unit
of a rollout that has a log-probability: in the llm domain a token.
"""


def render() -> str:
    """Return the page."""
    parts = [INTRO]
    for name, field in RunConfig.model_fields.items():
        model = DOMAIN_TABLES.get(name) or _model(field.annotation)
        assert model is not None, f"[{name}] is no section"
        parts += _section(name, model)
    parts += _section("rollout.options", LLMTorchOptions)
    parts += _section("rollout.options", VllmEngineOptions, title='`[rollout.options]` of engine = "vllm"')
    for name, reward in sorted(REWARDS.items()):
        assert isinstance(reward, type) and issubclass(reward, Strict)
        parts += _section("reward.functions.options", reward, title=f'`options` of the reward "{name}"')
    return "\n".join(parts)


def _section(at: str, model: type[Strict], *, title: str = "") -> Iterator[str]:
    """Heading, text and table of one section, then those inside it."""
    brackets = f"[[{at}]]" if at == "reward.functions" else f"[{at}]"
    yield f"## {title or f'`{brackets}`'}\n"
    yield f"{_text(model, at)}\n"
    texts = descriptions(model)
    fields = model.model_fields.items()
    rows = [row for name, field in fields if (row := _row(name, field, texts.get(name, ""), at)) is not None]
    if rows:
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])
    if at == "algorithm":
        yield _algorithm_defaults()
    for name, field in fields:
        inner = DOMAIN_TABLES.get(f"{at}.{name}") or _model(field.annotation)
        if inner is not None:
            yield from _section(f"{at}.{name}", inner)


def _text(model: type[Strict], at: str) -> str:
    """The model's docstring without the section's name; with a note for sections that the domain defines."""
    text = " ".join((model.__doc__ or "").split())
    for prefix in (f"[{at}]: ", f"[[{at}]]: ", f'[{at}] of engine = "torch".'):  # the heading says that
        text = text.removeprefix(prefix)
    text = (text or 'options of engine = "torch"').rstrip(".")
    text = text[0].upper() + text[1:] + "."
    note = " The domain's own; these are the keys of `llm`." if at in DOMAIN_TABLES else ""
    return text + note


def _row(name: str, field: FieldInfo, text: str, at: str) -> str | None:
    """One line of the table; None for a section, which has a table of its own."""
    if f"{at}.{name}" in DOMAIN_TABLES or _model(field.annotation) is not None:
        return None
    shown = "required" if field.is_required() else _default(field)
    assert text, f"{at}.{name} has no docstring"
    meaning = _cell(text)
    kind = _cell(_type(field.annotation) + _bounds(field))
    if at in ("eval", "data_regularization") and name == "data":
        kind = "table"
    return f"| `{name}` | {kind} | {shown} | {meaning} |"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "not set" if value is None else f"`{as_toml(value)}`"


def _type(annotation: Any) -> str:
    """A type in the recipe's words: "a" or "b", integer, list of string."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f'"{value}"' for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(a) for a in arguments if a is not type(None))
    if origin is tuple:
        inner = [a for a in arguments if a is not Ellipsis]
        return f"list of {_type(inner[0])}" if Ellipsis in arguments else f"{len(inner)} x {_type(inner[0])}"
    if origin in (dict, Mapping):
        return "table"
    return {str: "string", int: "integer", float: "number", bool: "boolean", Any: "any"}[annotation]


def _bounds(field: FieldInfo) -> str:
    found = []
    for bound in field.metadata:
        match bound:
            case Ge(ge=value):
                found.append(f"≥ {value:g}")
            case Gt(gt=value):
                found.append(f"> {value:g}")
            case Le(le=value):
                found.append(f"≤ {value:g}")
            case Lt(lt=value):
                found.append(f"< {value:g}")
    return f", {', '.join(found)}" if found else ""


def _model(annotation: Any) -> type[Strict] | None:
    """The model of a section: X, or tuple[X, ...]."""
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Strict)), None)


def _algorithm_defaults() -> str:
    lines = [
        "An algorithm's row replaces some of these defaults; the recipe's own keys come last",
        "([algorithms](algorithms/index.md)).",
        "",
        "| name | its defaults |",
        "|---|---|",
    ]
    for row in TABLE.values():
        keys = ", ".join(f"`{key} = {as_toml(value)}`" for key, value in row.defaults.items())
        lines.append(f"| `{row.name}` | {keys} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    page = render()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page else "docs/recipes.md is out of date: run this script")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
