"""From a TOML recipe and overrides to a RunConfig, and back to TOML with every key resolved."""

from __future__ import annotations

import copy
import os
import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms.table import find_algorithm
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError, closest
from cosmos_rl_core.gpus import machine_gpus
from cosmos_rl_core.recipe.run import RL_ONLY, RunConfig, conflicts
from cosmos_rl_core.recipe.sections import AUTO, RewardFunctionSection
from cosmos_rl_core.settings.base import ConfigError, Problem
from cosmos_rl_core.settings.problems import (
    AnyModel,
    as_toml,
    each_once,
    in_file_order,
    is_wrong,
    known_tables,
    neighbour,
    problems,
    validated,
)
from cosmos_rl_core.settings.source import RecipeSource, TextSpan

SFT_SAMPLED = tuple(section for section in RL_ONLY if section != "rollout")
"""Sections without effect when a supervised recipe is only sampled."""


Recipe = RunConfig | str | Path | Mapping[str, Any]
"""A TOML file, its content, or a validated config."""


def load_config(
    source: Recipe,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
    generating: bool = False,
) -> RunConfig:
    """Return the validated config of a recipe, with "section.key=value" overrides applied.

    `values` are applied after the overrides, by dotted key: {"run.max_steps": 10}. [run] domain names the domain, whose
    own models validate [model], [data] and [eval.data]. With `generating`, nothing is trained: a supervised recipe may
    then have [rollout] settings, and no reward is required. Raises ConfigError with every problem of the recipe, and
    UserError for a file that cannot be read.
    """
    return load(source, overrides, values=values, generating=generating).valid()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A recipe with its problems: what is valid of it can still be checked against data, model and machine."""

    config: RunConfig
    """Has the valid sections alone; complete if there are no problems."""
    domain: DomainBase | None
    """None if [run] domain names none."""
    problems: Sequence[Problem] = ()
    """In the order of the file."""
    source: RecipeSource | None = None
    """The text of the file; None for a recipe that was given as a mapping."""
    engine: str = ""
    """The engine that was chosen and why, "engine: torch (no GPU)"; empty where the recipe names one."""

    @property
    def broken(self) -> frozenset[str]:
        """Sections that have a problem, and those that a misspelt section was meant to be."""
        return frozenset(_broken_sections(self.problems))

    @property
    def wrong(self) -> frozenset[str]:
        """Keys that have a problem, and sections that a misspelt one was meant to be: no check may read them.

        So is the engine that these keep from being chosen.
        """
        wrong = {problem.key for problem in self.problems} | (self.broken - {each.section for each in self.problems})
        undecided = self.config.rollout.engine == AUTO and not self.config.is_sft
        return frozenset(wrong | ({"rollout.engine"} if undecided else set()))

    def valid(self) -> RunConfig:
        """Return the config. Raises ConfigError with every problem."""
        if self.problems:
            raise ConfigError(self.problems, source=self.source)
        return self.config


def load(
    source: Recipe,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
    row_files: Mapping[str, str] | None = None,
    generating: bool = False,
    continues: bool = False,
    launched: bool = False,
) -> LoadedRecipe:
    """As `load_config`, for a caller that goes on to check the valid sections.

    row_files: files in place of the rows that [data] and "eval.data" name. continues: keep the engine of an earlier run
    in the recipe's directory. launched: the processes start on machines of [cluster], not here.

    Raises UserError, and no ConfigError.
    """
    if isinstance(source, RunConfig):
        if not (overrides or values or row_files or (generating and source.rollout.engine == AUTO)):
            return LoadedRecipe(config=source, domain=load_domain(source.run.domain))
        source = tables_of(source, generating=generating)
    file = None if isinstance(source, Mapping) else Path(source)
    text = "" if file is None else _read_text(file)
    written = dict(source) if isinstance(source, Mapping) else _parsed(text, name=str(source))
    raw, all_problems = apply_overrides(written, overrides, values)
    _name_after_file(raw, "" if file is None else str(file))
    domain, domain_problems = _find_domain(raw)
    all_problems += domain_problems
    if domain is not None and row_files:
        all_problems += _replace_rows(raw, domain, row_files)
    tables = _all_tables(domain) | _algorithm_table(raw)
    parts, part_problems = _domain_parts(raw, domain, tables)
    unsound = {problem.section for problem in part_problems} | (set(_OF_DOMAIN) if domain is None else set())
    config, core_problems = _core(raw, tables, parts, unsound, generating=generating)
    all_problems += part_problems + core_problems
    overridden = {override.partition("=")[0].strip() for override in overrides} | {*(values or ()), *(row_files or ())}
    loaded = LoadedRecipe(
        config=config,
        domain=domain,
        problems=in_file_order(each_once(all_problems), raw),
        source=None if file is None else RecipeSource(name=str(source), text=text, overridden=overridden),
    )
    if domain is None or config.rollout.engine != AUTO or (config.is_sft and not generating):
        return loaded
    return loaded if is_wrong(_ENGINE_READS, loaded.wrong) else _with_engine(loaded, domain, continues, launched)


_ENGINE_READS = {
    "cluster",
    "model",
    "rollout.options",
    "rollout.parallel",
    "rollout.sampling",
    "run.device",
    "run.placement",
}
"""Keys and sections that the choice of an engine reads."""


def _with_engine(loaded: LoadedRecipe, domain: DomainBase, continues: bool, launched: bool) -> LoadedRecipe:
    """Put the name of an engine in place of "auto", with the line that says which and why, if there is a choice.

    It is made here, before anything starts: plan, controller and workers, and resolved.toml for those that come later,
    have the engine's own name. A launch relies on [cluster] gpus, and does not know the packages of an image.
    """
    config = loaded.config
    name, why = _earlier_engine(config) if continues else "", "as the run began"
    if not name and launched:
        name, why = domain.choose_engine(config, gpu=config.cluster.gpus, packages_known=not config.cluster.has_image)
    elif not name:
        name, why = domain.choose_engine(config, gpu=bool(machine_gpus(os.environ, config.run.device)))
    chosen = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": name})})
    return replace(loaded, config=chosen, engine=f"engine: {name} ({why})" if why and len(domain.engines) > 1 else "")


def _earlier_engine(config: RunConfig) -> str:
    """The engine in resolved.toml of the run's directory; empty without an earlier run, and for supervised training."""
    resolved = config.run.directory / "resolved.toml"
    return read_toml(resolved).get("rollout", {}).get("engine", "") if resolved.is_file() else ""


def apply_overrides(
    raw: Mapping[str, Any], overrides: Sequence[str], values: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[Problem]]:
    """Return a copy of a config with each "section.key=value" applied, and the problems found.

    A value is parsed as TOML; if that fails it is a plain string. A number in the key indexes an array:
    reward.functions.0.weight=2. `values`, by dotted key, are applied last and unparsed.
    """
    changed = copy.deepcopy(dict(raw))
    override_problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            override_problems.append(
                Problem(key=override, wrong="is not an override", suggestion="write section.key=value")
            )
        elif problem := _put(changed, parts, _toml_value(text.strip())):
            override_problems.append(problem)
    for key, value in (values or {}).items():
        if problem := _put(changed, key.split("."), value):
            override_problems.append(problem)
    return changed, override_problems


def _toml_value(text: str) -> Any:
    """Parse a TOML value; anything that is not TOML, such as a bare word, is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, or an integer or nesting beyond Python's limits
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _put(root: dict[str, Any], parts: Sequence[str], value: Any) -> Problem | None:
    """Set root[a][b][c] = value, creating missing tables."""
    here: Any = root
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(here, dict):
            if last:
                here[part] = value
            else:
                here = here.setdefault(part, {})
        elif isinstance(here, list) and part.isdigit() and int(part) < len(here):
            if last:
                here[int(part)] = value
            else:
                here = here[int(part)]
        else:
            return Problem(key=".".join(parts), given=as_toml(value), wrong=_no_place(here, parts[:depth]))
    return None


def _no_place(here: Any, above: Sequence[str]) -> str:
    key = ".".join(above)
    if isinstance(here, list):
        return f"{key} has {len(here)} entries, counted from 0"
    return f"{key} is {as_toml(here)}, not a table"


def _replace_rows(raw: dict[str, Any], domain: DomainBase, files: Mapping[str, str]) -> list[Problem]:
    """Let sections read their rows from files, with their other keys; [eval.data] inherits those of [data].

    Raises UserError for a domain that reads no row files.
    """
    if not domain.row_keys:
        raise UserError(f"rows: the {domain.name} domain generates its own rows from [data] and accepts none")
    written = {section: _value_at(raw, section) for section in ("data", "eval.data")}
    tables = {section: table if isinstance(table, Mapping) else {} for section, table in written.items()}
    tables["eval.data"] = {**tables["data"], **tables["eval.data"]}
    row_problems = []
    for section, file in files.items():
        others = {key: value for key, value in tables[section].items() if key not in domain.row_keys}
        row_problems.append(_put(raw, section.split("."), {**others, domain.row_keys[0]: file}))
    return [problem for problem in row_problems if problem is not None]


def load_domain(name: str) -> DomainBase:
    """Return the domain called `name` in [run] domain: an installed one, or "module:attribute"."""
    loaded = plugins.load("cosmos_rl.domains", name)
    if missing := getattr(loaded, "__abstractmethods__", None):
        raise UserError(f"domain {name!r} lacks {', '.join(sorted(missing))} (see cosmos_rl_core.Domain)")
    domain = loaded() if isinstance(loaded, type) else loaded
    if not isinstance(domain, DomainBase):
        raise UserError(f"domain {name!r} is not a cosmos_rl_core.DomainBase (see its docstring)")
    return domain


def dump_resolved(config: RunConfig) -> str:
    """Return TOML with every key that applies and its value; loading it gives an equal config."""
    tables = config.model_dump(mode="json", exclude_none=True)
    inapplicable = RL_ONLY if config.is_sft else ()
    return tomli_w.dumps({name: table for name, table in tables.items() if name not in inapplicable})


def tables_of(config: RunConfig, *, generating: bool = False) -> dict[str, Any]:
    """Return a config as JSON that `load_config` accepts, including keys without a value."""
    refused = () if not config.is_sft else SFT_SAMPLED if generating else RL_ONLY
    return {name: table for name, table in config.model_dump(mode="json").items() if name not in refused}


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises UserError with the file, and the line of a syntax error."""
    return _parsed(_read_text(path), name=str(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        near = neighbour(path, pattern="*.toml")
        raise UserError(f"{path}: no such file{f'; {near}' if near else ''}") from error
    except IsADirectoryError as error:
        inside = sorted(str(file) for file in path.glob("*.toml"))
        hint = f"; did you mean {' or '.join(inside)}?" if inside else ""
        raise UserError(f"{path}: is a folder, and a recipe is a .toml file{hint}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def _parsed(text: str, *, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(_syntax_error(error, RecipeSource(name=name, text=text))) from error
    except ValueError as error:
        raise UserError(f"{name}: an integer of more than {sys.get_int_max_str_digits()} digits") from error
    except RecursionError as error:
        raise UserError(f"{name}: arrays or tables are nested too deeply") from error


def _syntax_error(error: tomllib.TOMLDecodeError, source: RecipeSource) -> str:
    """The message of a syntax error, with the line and a caret."""
    wrong = str(error).partition(" (at ")[0]
    place = re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
    if place is None:
        return f"{source.name} (at the end): {wrong}"
    start = source.offset(int(place[1]), int(place[2]))
    shown = source.underlined(TextSpan(start, start + 1))
    word = re.match(r"[A-Za-z_][^#\n]*", source.text[start:])
    bare = wrong == "Invalid value" and word is not None
    remedy = f'\n      = help: write text in quotes: "{word[0].strip()}"' if bare and word else ""
    return f"{source.name}:{place[1]}:{place[2]}: {wrong}\n{shown}{remedy}"


def _name_after_file(raw: dict[str, Any], file: str) -> None:
    """Name an unnamed run after its recipe file; after the folder if the file is run.toml."""
    run = raw.setdefault("run", {})
    if file and isinstance(run, dict):
        path = Path(file).resolve()
        run.setdefault("name", path.parent.name if path.stem == "run" else path.stem)


def _find_domain(raw: Mapping[str, Any]) -> tuple[DomainBase | None, list[Problem]]:
    run = raw["run"]
    name = run.get("domain") if isinstance(run, Mapping) else None
    if not isinstance(name, str) or not name:
        known = ", ".join(plugins.names("cosmos_rl.domains")) or "none"
        missing = Problem(key="run.domain", wrong="is required", suggestion=f"installed: {known}")
        return None, [missing] if name is None and isinstance(run, Mapping) else []
    try:
        return load_domain(name), []
    except UserError as error:
        return None, [Problem(key="run.domain", given=as_toml(name), wrong=str(error))]


def _all_tables(domain: DomainBase | None) -> dict[str, list[str]]:
    """Known keys of core and of the domain, for suggestions."""
    tables = known_tables(RunConfig)
    if domain is not None:
        for at in _PLACES:
            tables |= known_tables(_model_at(domain, at), at=at)
    return tables


def _algorithm_table(raw: Mapping[str, Any]) -> dict[str, list[str]]:
    """Known keys of [algorithm.options]."""
    name = _value_at(raw, "algorithm.name")
    try:
        options = find_algorithm(name).Options if isinstance(name, str) else None
    except UserError:
        return {}  # the name itself will be the error
    return {} if options is None else known_tables(options, at="algorithm.options")


_PLACES = ("model", "data", "eval.data", "eval.loss_data", "data_regularization.data", "rollout.sampling")
"""Sections whose keys are defined by the domain."""
_OF_DOMAIN = ("model", "data", "eval", "rollout", "data_regularization")
"""The outermost sections of these."""
_ALWAYS = ("model", "data", "rollout.sampling")
"""The ones that always exist, even if the recipe leaves them out."""


def _model_at(domain: DomainBase, at: str) -> type[BaseModel]:
    return {"model": domain.Model, "rollout.sampling": domain.Sampling}.get(at, domain.Data)


def _domain_parts(
    raw: Mapping[str, Any], domain: DomainBase | None, tables: Mapping[str, Sequence[str]]
) -> tuple[dict[str, BaseModel], list[Problem]]:
    """Validate the sections whose keys are defined by the domain."""
    if domain is None:
        return {}, []
    parts: dict[str, BaseModel] = {}
    part_problems: list[Problem] = []
    for at in _PLACES:
        section = _value_at(raw, at)
        if section is None and at not in _ALWAYS:
            continue
        part, wrong = _without_problems(_model_at(domain, at), {} if section is None else section, tables, at=at)
        part_problems += wrong
        if part is not None:
            parts[at] = part
    return parts, part_problems


def _without_problems(
    model: type[AnyModel], values: Any, tables: Mapping[str, Sequence[str]], *, at: str = ""
) -> tuple[AnyModel | None, list[Problem]]:
    """Validate a part of the recipe, and if that fails once more without its wrong keys; None if they are needed."""
    try:
        return validated(model, values), []
    except ValidationError as error:
        key_problems = problems(error, tables=tables, at=at)
        right = copy.deepcopy(values)
        for details in error.errors(include_url=False):
            _remove(right, details["loc"])
    try:
        return validated(model, right), key_problems
    except ValidationError:
        return None, key_problems


def _remove(here: Any, location: Sequence[int | str]) -> None:
    """Remove a key; of an array, whose entries are numbered, the whole."""
    *tables, last = location or [""]
    for depth, name in enumerate(location):
        if isinstance(name, int):
            *tables, last = location[:depth]
            break
    for name in tables:
        here = here.get(name) if isinstance(here, dict) else None
    if isinstance(here, dict):
        here.pop(last, None)


def _value_at(raw: Mapping[str, Any], at: str) -> Any:
    """The recipe's value at a dotted key, or None."""
    here: Any = raw
    for name in at.split("."):
        here = here.get(name) if isinstance(here, Mapping) else None
    return here


def _with_parts(config: RunConfig, parts: Mapping[str, BaseModel]) -> RunConfig:
    """Insert the sections that the domain validated. Rows that are held out have the keys of [data].

    Without rewards of the recipe's own those of its [environment] or [agent] are trained on.
    """
    reward = config.reward
    if config.has_episodes and not reward.functions and not config.is_sft:
        reward = reward.model_copy(update={"functions": (RewardFunctionSection(name="environment"),)})
    evaluated = parts.get("eval.data") or (None if config.eval.held_out is None else parts.get("data"))
    return config.model_copy(
        update={
            "model": parts.get("model"),
            "data": parts.get("data"),
            "reward": reward,
            "eval": config.eval.model_copy(update={"data": evaluated, "loss_data": parts.get("eval.loss_data")}),
            "data_regularization": config.data_regularization.model_copy(
                update={"data": parts.get("data_regularization.data")}
            ),
            "rollout": config.rollout.model_copy(update={"sampling": parts.get("rollout.sampling")}),
        }
    )


def _core(
    raw: Mapping[str, Any],
    tables: Mapping[str, Sequence[str]],
    parts: Mapping[str, BaseModel],
    unsound: Collection[str],
    *,
    generating: bool,
) -> tuple[RunConfig, list[Problem]]:
    """Validate the sections of core, then the rules between valid sections.

    `unsound` names sections in which the domain found a problem. The returned config has only the valid sections; it is
    complete if no problem is returned.
    """
    refused = SFT_SAMPLED if generating else RL_ONLY
    config, core_problems = _without_problems(RunConfig, raw, tables)
    if config is None:
        broken = _broken_sections(core_problems)
        sound = {name: section for name, section in raw.items() if name not in broken}
        config = validated(RunConfig, {"run": {"domain": "unknown"}} | sound)
    if config.is_sft:  # such a section must be removed: problems inside it do not matter
        core_problems = [problem for problem in core_problems if problem.section not in refused]
    config = _with_parts(config, parts)
    broken = _broken_sections(core_problems) | set(unsound) | ({"rollout"} - {at.partition(".")[0] for at in parts})
    sections = raw.keys() - (set(RL_ONLY) - set(refused))
    clashes = [conflict for conflict in conflicts(config, sections=sections) if not broken & conflict.sections]
    if generating:
        clashes = [conflict for conflict in clashes if conflict.key not in ("reward.functions", "eval.held_out")]
    return config, core_problems + [conflict.problem(config) for conflict in clashes]


def _broken_sections(all_problems: Sequence[Problem]) -> set[str]:
    """Sections with a problem, and the likely intended section of a misspelt one."""
    broken = {problem.section for problem in all_problems}
    meant = {closest(name, list(RunConfig.model_fields)) for name in broken}
    return broken | {name for name in meant if name}
