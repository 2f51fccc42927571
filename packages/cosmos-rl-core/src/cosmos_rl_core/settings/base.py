"""Strict: the base of every config section. ConfigError: all problems of a config in one error."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.source import RecipeSource


class Strict(BaseModel):
    """A frozen section of the config. Unknown keys are errors; a string under a field is its description."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in descriptions(cls).items():
            if name in properties:  # not one that has an alias
                properties[name].setdefault("description", text)
        return schema


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Return the description of each field: of `Field(description=...)`, or else the string under it.

    Strings are read from the source when they are shown. pydantic would read them at import
    (`use_attribute_docstrings`), which takes a process of a run about 40 ms.
    """
    texts: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            inherited = {name: text for name, text in texts.items() if name not in kind.__annotations__}
            texts = inherited | _strings_under_fields(kind)
    described = {name: field.description for name, field in section.model_fields.items()}
    return {name: text for name in described if (text := described[name] or texts.get(name))}


def _strings_under_fields(section: type) -> dict[str, str]:
    try:
        source = inspect.getsource(section)
    except (OSError, TypeError):  # made by `create_model`, or typed at a prompt
        return {}
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


Options = Strict
"""The public name, for the options of your own reward, algorithm or engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a config."""

    key: str
    """Dotted: "rollout.sampling.temperature"; empty if the problem concerns the whole file."""
    wrong: str
    """The problem as a phrase: "must be greater than 0"."""
    given: str = ""
    """The given value, as TOML; empty if there is none."""
    suggestion: str = ""
    """The remedy: 'did you mean "temperature"?'."""
    of_key: bool = False
    """Whether the key itself is wrong, such as an unknown one, and not its value."""
    is_note: bool = False
    """Whether it is a remark, which does not prevent a run."""

    @property
    def section(self) -> str:
        """The outermost table of the key."""
        return self.key.partition(".")[0]

    def __str__(self) -> str:
        head = f"{self.key} = {self.given}" if self.key and self.given else self.key
        parts = [part for part in (head, self.wrong) if part]
        line = ": ".join(parts)
        return f"{line}; {self.suggestion}" if self.suggestion else line


class ConfigError(UserError):
    """All problems of a config under a header that names the file: one per line, or with its line of `source`."""

    def __init__(self, problems: Sequence[Problem], *, file: str = "", source: RecipeSource | None = None) -> None:
        assert problems, "a ConfigError without a problem"
        self.problems = tuple(problems)
        self.file = source.name if source else file
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        header = f"{self.file or 'config'}: {count}"
        super().__init__("\n".join([header, *(_shown(problem, source) for problem in problems)]))


def _shown(problem: Problem, source: RecipeSource | None) -> str:
    """The problem on one line; if the file has its key, with position, line and carets, and the remedy below."""
    value = bool(problem.given) and not problem.of_key
    place = source.place(problem.key, value=value) if source else ""
    if source is None or not place:
        return f"  {problem}"
    lines = [f"{place}: {replace(problem, suggestion='')}", source.excerpt(problem.key, value=value)]
    return "\n".join([*lines, *([f"      = help: {problem.suggestion}"] if problem.suggestion else [])])
