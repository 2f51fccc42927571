"""Translate pydantic's errors into problems of a recipe: dotted key, given value, suggestion."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cosmos_rl_core.errors import UserError, closest
from cosmos_rl_core.settings.base import ConfigError, Problem

AnyModel = TypeVar("AnyModel", bound=BaseModel)

MOST_CHARACTERS = 60
"""Maximum length of a value in a message."""
Tables = Mapping[str, Sequence[str]]
"""Known keys by dotted table: {"rollout.sampling": ["max_tokens", ...]}; the whole config has the name ""."""


RENAMED = {
    "anchor": "data_regularization",
    "rollout.sampling.max_terms": "max_tokens",
    "eval.max_terms": "max_length",
}
"""Current names of renamed keys, by the dotted name of earlier versions."""


def validated(model: type[AnyModel], value: Any) -> AnyModel:
    """Validate in pydantic's strict JSON mode: no "8" for 8, no true for 1, but a list for a tuple."""
    return model.model_validate_json(json.dumps(value, default=_as_text), strict=True)


def _as_text(value: object) -> str:
    """The text of a path or a date. Raises UserError for a function, which a recipe can only name."""
    if callable(value):
        raise UserError(
            f"{value!r} is a function, and a recipe has text, numbers and tables: name it as module:attribute, or give "
            "a reward to run(..., rewards=[function])"
        )
    return str(value)


def engine_options(model: type[AnyModel], options: Mapping[str, Any]) -> AnyModel:
    """Return [rollout.options] validated by an engine's model. Raises ConfigError with every problem."""
    at = "rollout.options"
    try:
        return validated(model, options)
    except ValidationError as error:
        raise ConfigError(problems(error, tables=known_tables(model, at=at), at=at)) from error


def known_tables(model: type[BaseModel], *, at: str = "") -> dict[str, list[str]]:
    """Return the known keys of a model and of every section inside it; `at` names the outermost table."""
    tables = {at: list(model.model_fields)}
    for name, field in model.model_fields.items():
        for section in _sections(field.annotation):
            for table, keys in known_tables(section, at=f"{at}.{name}" if at else name).items():
                tables[table] = tables.get(table, []) + keys
    return tables


def problems(error: ValidationError, *, tables: Tables, at: str = "") -> list[Problem]:
    """Return the problems of the part of a config under the dotted key `at`."""
    return [_problem(details, tables=tables, at=at) for details in error.errors(include_url=False)]


def missing_package(module: str, *, key: str, given: str = "", install: str) -> list[Problem]:
    """Return the problem of a key whose `module` is not installed; `install` is the command that installs it."""
    if find_spec(module) is not None:
        return []
    return [Problem(key=key, given=given, wrong="needs a package that is not installed", suggestion=install)]


def problems_of(error: Exception, *, key: str, section: str = "") -> list[Problem]:
    """Return the problems in an error: those of a ConfigError, or one with the key that the message begins with.

    key: of a message that names none. section: the section that a message calls "data", such as "eval.data".
    """
    if isinstance(error, ConfigError):
        return list(error.problems)
    text = str(error)
    named = _LEADING_KEY.match(text)
    if named is None:
        return [Problem(key=key, wrong=text)]
    dotted = named["dotted"] or f"{named['table']}.{named['name']}"
    if section and dotted.startswith("data."):
        dotted = f"{section}.{dotted.removeprefix('data.')}"
    value = "" if named["given"] is None else _python_as_toml(named["given"])
    wrong, _, suggestion = text[named.end() :].partition("; ")
    if not re.match(r"(did you mean|set it|give|choose|remove|raise|lower|use|write) ", suggestion):
        wrong, suggestion = text[named.end() :], ""
    return [Problem(key=dotted, given=value, wrong=wrong, suggestion=suggestion)]


_LEADING_KEY = re.compile(
    r"(?:\[(?P<table>[a-z_.]+)\] (?P<name>[a-z_]+)|(?P<dotted>[a-z_]+(?:\.[a-z_0-9]+)+))"
    r"(?: = (?P<given>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s:;,'\"]+))?(?:: | (?!and |or |x |= ))"
)
"""The beginning of a message about a key: "model.path = 'x' is ...", "[policy.parallel] tp = 3: ..."."""


def _python_as_toml(written: str) -> str:
    """A value of a message, as Python writes it, as TOML."""
    try:
        return as_toml(ast.literal_eval(written))
    except (ValueError, SyntaxError):  # already TOML, such as true
        return written


def each_once(all_problems: Iterable[Problem]) -> list[Problem]:
    """Drop duplicates that several checks report; the first one may have the better suggestion."""
    return list({(problem.key, problem.wrong): problem for problem in reversed([*all_problems])}.values())[::-1]


def is_wrong(read: Iterable[str], wrong: Iterable[str]) -> bool:
    """Return whether one of the keys or sections `read` has, contains or is in one of the keys `wrong`."""
    return any(
        f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.") for one in read for other in [*wrong]
    )


def neighbour(path: Path, *, pattern: str = "*") -> str:
    """Return 'did you mean "NAME"?' for a file or folder beside the missing one, with a similar name; or ""."""
    folder = path.expanduser().parent
    beside = sorted(other.name for other in folder.glob(pattern)) if folder.is_dir() else []
    near = closest(path.name, beside)
    return f'did you mean "{path.parent / near}"?' if near else ""


def in_file_order(all_problems: Sequence[Problem], raw: Mapping[str, Any]) -> list[Problem]:
    """Sort by the position of the keys in the file; a missing key comes after the others of its table."""
    return sorted(all_problems, key=lambda problem: _position(problem.key, raw))


def as_toml(value: Any) -> str:
    """Return a value as (approximate) TOML, truncated to MOST_CHARACTERS."""
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(as_toml(item) for item in value) + "]"
    else:
        text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Models that occur in an annotation: X, X | None, tuple[X, ...], dict[str, X]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections(inner)]


def _problem(details: ErrorDetails, *, tables: Tables, at: str) -> Problem:
    key = ".".join([*([at] if at else []), *(str(part) for part in details["loc"])])
    value = as_toml(details["input"])
    match details["type"]:
        case "missing":
            return Problem(key=key, wrong="is required")
        case "extra_forbidden":
            return Problem(
                key=key, given=value, wrong="unknown key", suggestion=_did_you_mean(key, tables), of_key=True
            )
        case "literal_error":
            expected = str(details.get("ctx", {}).get("expected", "")).replace("'", '"')
            near = closest(str(details["input"]), re.findall(r'"([^"]*)"', expected))
            suggestion = f'did you mean "{near}"?' if near else ""
            return Problem(key=key, given=value, wrong=f"must be {expected}", suggestion=suggestion)
        case "value_error":
            where = "" if isinstance(details["input"], Mapping) else value
            return Problem(key=key, given=where, wrong=details["msg"].removeprefix("Value error, "))
        case "string_type" if isinstance(details["input"], int | float):
            quotes = f"""write it in quotes: "{value}", or '"{value}"' on a command line"""
            return Problem(key=key, given=value, wrong="must be a string", suggestion=quotes)
        case "int_type" | "float_type" | "bool_type" if _meant(details) is not None:
            kind = details["type"].removesuffix("_type").replace("int", "integer").replace("bool", "boolean")
            return Problem(
                key=key,
                given=value,
                wrong=f"must be {'an' if kind == 'integer' else 'a'} {kind}, and is a string",
                suggestion=f"write it without quotes: {_meant(details)}",
            )
        case "model_type" | "dict_type":
            return Problem(key=key, given=value, wrong=f"must be a table: [{key}]")
        case _:
            return Problem(key=key, given=value, wrong=details["msg"].replace("Input should be", "must be"))


_WRITTEN = {"int_type": r"[+-]?\d+", "float_type": r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", "bool_type": "true|false"}


def _meant(details: ErrorDetails) -> str | None:
    """The number or boolean in a string that was given for one; None for anything else."""
    text = details["input"]
    return text if isinstance(text, str) and re.fullmatch(_WRITTEN[details["type"]], text) else None


def _did_you_mean(key: str, tables: Tables) -> str:
    """Suggest a similar key of the table, a key of that name in another table, or list the table's keys."""
    path, _, name = key.rpartition(".")
    table = ".".join(part for part in path.split(".") if not part.isdigit())
    here = tables.get(table, ())
    if (renamed := RENAMED.get(key)) in here:
        return f'it is called "{renamed}" now'
    elsewhere = [other for other, keys in tables.items() if name in keys and other != table]
    near = closest(name, here, cutoff=0.6 if not elsewhere else 0.8)
    if near:
        return f'did you mean "{near}"?'
    if elsewhere:
        return f"did you mean {' or '.join(_bracketed(other, name) for other in elsewhere)}?"
    for other, keys in tables.items():
        if near := closest(name, keys, cutoff=0.85):
            return f"did you mean {_bracketed(other, near)}?"
    return f"known here: {', '.join(here)}" if here else ""


def _bracketed(table: str, key: str) -> str:
    return f"[{table}] {key}" if table else f"[{key}]"


def _position(key: str, raw: Mapping[str, Any]) -> tuple[int, ...]:
    position: list[int] = []
    here: Any = raw
    for part in key.split("."):
        if isinstance(here, Mapping):
            names = list(here)
            position.append(names.index(part) if part in names else len(names))
            here = here.get(part)
        elif isinstance(here, list | tuple) and part.isdigit():
            position.append(int(part))
            here = here[int(part)] if int(part) < len(here) else None
    return tuple(position)
