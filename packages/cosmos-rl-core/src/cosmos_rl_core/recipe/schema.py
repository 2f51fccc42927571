"""JSON Schema of a domain's recipes, for editors, and the keys of a section as a table.

#:schema ./recipe.schema.json       # the first line of a recipe: Even Better TOML and taplo read it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, create_model

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError, closest
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.sections import DataRegularizationSection, EvalSection, RolloutSection
from cosmos_rl_core.settings.problems import as_toml


def recipe_schema(domain: DomainBase) -> dict[str, Any]:
    """Return the JSON Schema of a recipe of this domain, with the domain's keys of [model], [data] and the others."""
    data = (domain.Data, Field(default=None, description="Rows, with the keys of [data]."))
    sampling = (domain.Sampling, Field(default=None, description="Sampling parameters."))
    evaluation = create_model("EvalSection", __base__=EvalSection, data=data, loss_data=data)
    regularization = create_model("DataRegularizationSection", __base__=DataRegularizationSection, data=data)
    rollout = create_model("RolloutSection", __base__=RolloutSection, sampling=sampling)
    sections: dict[str, Any] = {
        "model": (domain.Model, Field(default=None)),
        "data": data,
        "rollout": (rollout, Field(default=None)),
        "eval": (evaluation, Field(default=None)),
        "data_regularization": (regularization, Field(default=None)),
    }
    recipe = create_model("Recipe", __base__=RunConfig, __doc__=f"A recipe of the domain {domain.name}.", **sections)
    schema = _without_null(recipe.model_json_schema())
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _without_null(schema: Any) -> Any:
    """Drop null as a type and as a default: TOML has none, a key without a value is left out."""
    if isinstance(schema, list):
        return [_without_null(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _without_null(value) for key, value in schema.items() if key != "default" or value is not None}
    choices = kept.get("anyOf")
    if isinstance(choices, list) and {"type": "null"} in choices:
        rest = [choice for choice in choices if choice != {"type": "null"}]
        del kept["anyOf"]
        kept = rest[0] | kept if len(rest) == 1 else {**kept, "anyOf": rest}
    return kept


def keys_of(schema: Mapping[str, Any], section: str) -> list[tuple[str, str, str, str]]:
    """Return key, type, default and meaning of each key of a section such as "rollout.sampling"; "" is the recipe.

    Raises UserError for a section that there is not, with the closest one.
    """
    here, path = schema, ""
    for name in section.split(".") if section else ():
        keys = _resolved(schema, here).get("properties", {})
        if name not in keys:
            near = closest(name, list(keys))
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(keys)}"
            raise UserError(f"[{path}] has no {name!r}; {hint}" if path else f"no section is called {name!r}; {hint}")
        here, path = keys[name], f"{path}.{name}" if path else name
    properties: Mapping[str, Any] = _resolved(schema, here).get("properties", {})
    return [(name, *_described(schema, each)) for name, each in properties.items()]


def _described(schema: Mapping[str, Any], each: Mapping[str, Any]) -> tuple[str, str, str]:
    resolved = _resolved(schema, each)
    is_table = "properties" in resolved
    default = as_toml(each["default"]) if "default" in each and not is_table else ""
    return (
        "table" if is_table else _type(schema, resolved),
        default,
        " ".join(str(resolved.get("description", "")).split()),
    )


def _resolved(schema: Mapping[str, Any], each: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema behind a reference; of an array of tables that of its entries."""
    if "$ref" in each:
        return {**schema["$defs"][each["$ref"].rpartition("/")[2]], **{k: v for k, v in each.items() if k != "$ref"}}
    items = each.get("items")
    if isinstance(items, Mapping) and "$ref" in items:
        return _resolved(schema, items)
    return each


def _type(schema: Mapping[str, Any], each: Mapping[str, Any]) -> str:
    choices: Sequence[Mapping[str, Any]] = each.get("anyOf", ())
    if choices:
        return " or ".join(dict.fromkeys(_type(schema, _resolved(schema, choice)) for choice in choices))
    if "enum" in each:
        return ", ".join(as_toml(value) for value in each["enum"])
    return str(each.get("type", "table" if "properties" in each else "any"))
