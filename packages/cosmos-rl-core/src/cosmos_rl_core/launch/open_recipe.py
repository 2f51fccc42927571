"""Rewards as functions and rows as mappings, passed by a program together with a recipe.

    open_recipe("run.toml", rewards=[brevity], rows=[{"prompt": "1 + 1 ="}])

A recipe is text that other processes read. So a function is written into it as "module:attribute" with the folder of
its module, and rows as a file in the run's directory. A function without such a name (a lambda, a closure, a notebook
cell) is passed as an object, for runs in one process.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import add_folders
from cosmos_rl_core.recipe.load import LoadedRecipe, Recipe, load, load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_core.storage.rows import keep_rows

Reward = str | Callable[..., Any]
"""A `RewardFn`, a class of one, or a name as in [[reward.functions]]."""
Weighted = Reward | tuple[Reward, float]
Rewards = Reward | Sequence[Weighted] | Mapping[str, Weighted]
"""Rewards, each with or without a weight; in a mapping by label."""
Rows = Iterable[Mapping[str, Any]]
Check = Callable[[LoadedRecipe, RunConfig, Mapping[str, Any]], Sequence[str]]
"""(recipe with the rows in temporary files, recipe as the run will have it, functions by label) -> notes."""

STARTS_AGAIN = (
    "starts a run when it is imported, so that each worker would start it again: "
    'put that under `if __name__ == "__main__":`'
)
FILES = {"data": "rows.jsonl", "eval.data": "eval_rows.jsonl"}
"""Files for rows of a program, by section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRecipe:
    """A recipe with the rewards and rows of a program."""

    config: RunConfig
    python_path: tuple[str, ...]
    """Folders for "module:attribute" names, including those of the functions."""
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Functions by label, for a run in this process."""
    rows: Mapping[str, Rows] = field(default_factory=dict)
    """Given rows by their section."""
    notes: tuple[str, ...] = ()
    """Remarks of the checks before the start."""

    def placed_in(self, folder: Path) -> OpenRecipe:
        """Return a copy whose recipe reads the rows from files in `folder`."""
        config = self.config
        if "data" in self.rows:
            data = self._read_from(folder, "data", config.data)
            evaluated = data if config.eval.held_out is not None else config.eval.data
            evaluation = config.eval.model_copy(update={"data": evaluated})
            config = config.model_copy(update={"data": data, "eval": evaluation})
        if "eval.data" in self.rows:
            held_out = self._read_from(folder, "eval.data", config.eval.data)
            config = config.model_copy(update={"eval": config.eval.model_copy(update={"data": held_out})})
        return replace(self, config=config)

    def _read_from(self, folder: Path, section: str, data: Any) -> Any:
        domain = load_domain(self.config.run.domain)
        return data.model_copy(update={domain.row_keys[0]: str(folder / FILES[section])})

    def write_rows(self, folder: Path, *, resumed: bool = False) -> None:
        """Write those files. Raises UserError like `keep_rows`."""
        for section, rows in self.rows.items():
            path = folder / FILES[section]
            keep_rows(rows, path, name=path.stem, resumed=resumed)


def open_recipe(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    *,
    python_path: Sequence[str] = (),
    rewards: Rewards | None = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    generating: bool = False,
    continues: bool = False,
    check: Check | None = None,
) -> OpenRecipe:
    """Load a recipe; `rewards` replace [reward] functions, `rows` and `eval_rows` replace [data] and [eval.data] path.

    `generating`: nothing is trained, and other processes do the work for any placement. continues: as of
    `recipe.load.load`. check: returns notes on the recipe, which may have problems, or raises ConfigError.

    Raises ConfigError for problems of the recipe, and UserError for a reward that other processes cannot import, rows
    for a domain without [data] path, and a call from a module that is imported for a recipe.
    """
    if module := plugins.importing():
        raise UserError(f"{module} {STARTS_AGAIN}")
    add_folders(python_path)
    named_rewards = _named_rewards([] if rewards is None else rewards)
    sections = {
        name: list(each) if check and isinstance(each, Iterator) else each  # the run iterates over them again
        for name, each in zip(FILES, (rows, eval_rows), strict=True)
        if each is not None
    }
    loaded = load(
        recipe,
        overrides,
        values=None if rewards is None else {"reward.functions": [one.section for one in named_rewards]},
        row_files={name: file for name, file in FILES.items() if name in sections or (generating and sections)},
        generating=generating,
        continues=continues,
    )
    inline = loaded.config.run.placement == "inline" and not generating
    if not inline:
        _must_be_importable(named_rewards)
    functions = {one.label: one.function for one in named_rewards if one.function is not None}
    notes: Sequence[str] = ()
    if check is not None:
        with _rows_in_files(loaded, sections) as (readable, config):
            notes = check(readable, config, functions)
    return OpenRecipe(
        config=loaded.valid(),
        python_path=tuple(dict.fromkeys([*python_path, *(one.folder for one in named_rewards if one.folder)])),
        rewards=functions if inline else {},
        rows=sections,
        notes=(*filter(None, [loaded.engine]), *notes),
    )


@contextmanager
def _rows_in_files(loaded: LoadedRecipe, rows: Mapping[str, Rows]) -> Iterator[tuple[LoadedRecipe, RunConfig]]:
    """Yield the recipe with the rows in temporary files, and as the run will read them from its directory.

    A ConfigError names the files alone.
    """
    valid = {name: data for name, data in rows.items() if name.partition(".")[0] not in loaded.broken}
    if loaded.domain is None or not valid:
        yield loaded, loaded.config
        return
    with TemporaryDirectory() as folder:
        with_rows = OpenRecipe(config=loaded.config, python_path=(), rows=valid)
        with_rows.write_rows(Path(folder))
        try:
            readable = replace(loaded, config=with_rows.placed_in(Path(folder)).config)
            yield readable, with_rows.placed_in(loaded.config.run.directory).config
        except ConfigError as error:
            problems = [replace(each, wrong=each.wrong.replace(f"{folder}/", "")) for each in error.problems]
            raise ConfigError(problems, source=loaded.source) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedReward:
    """A reward of a program and its name for other processes."""

    label: str
    weight: float
    name: str
    """"module:attribute", or the name as it was passed."""
    function: Callable[..., Any] | None = None
    """None for a reward that was passed by name."""
    folder: str = ""
    """Folder from which the module is imported; empty for one that was passed by name."""
    wrong: str = ""
    """The reason that other processes cannot import it; empty if they can."""

    @property
    def section(self) -> dict[str, Any]:
        """Its table in [[reward.functions]]."""
        return {"name": self.name, "label": self.label, "weight": self.weight}


def _named_rewards(rewards: Rewards) -> list[_NamedReward]:
    if isinstance(rewards, str) or callable(rewards):
        rewards = [rewards]
    items = rewards.items() if isinstance(rewards, Mapping) else [("", reward) for reward in rewards]
    named_rewards = []
    for label, weighted in items:
        reward, weight = weighted if isinstance(weighted, tuple) else (weighted, 1.0)
        if isinstance(reward, str):
            named_rewards.append(_NamedReward(label=label, weight=weight, name=reward))
        elif callable(reward):
            named_rewards.append(_find(reward, label=label, weight=weight))
        else:
            raise UserError(f"rewards: {reward!r} is neither a function nor the name of a reward")
    return named_rewards


def _find(function: Callable[..., Any], *, label: str, weight: float) -> _NamedReward:
    """Find the name by which another process can import a function."""
    kind = function if getattr(function, "__qualname__", "") else type(function)
    name: str = kind.__qualname__
    label = label or name.rpartition(".")[2].strip("<>")
    reward = _NamedReward(label=label, weight=weight, name=f"{kind.__module__}:{name}", function=function)
    if kind is not function:
        return replace(reward, wrong=f"is an object of the class {name}, and not a function or a class")
    if "<" in name:
        return replace(reward, wrong="is a lambda" if "<lambda>" in name else "is defined inside a function")
    module = sys.modules.get(kind.__module__)
    file = vars(module).get("__file__") if module else None
    if module is None or file is None:
        return replace(reward, wrong="is defined in a notebook or at a prompt")
    imported = _imported_name(module, Path(file))
    reward = replace(reward, name=f"{imported}:{name}", folder=_root(imported, Path(file)))
    if _attribute(module, name) is not function:
        return replace(reward, wrong=f"is not what {imported} has by the name {name}")
    if (other := _hidden_by(imported, reward.folder)) is not None:
        return replace(reward, wrong=f"is in {file}, while workers import {imported} from {other}; rename the file")
    if module.__name__ == "__main__" and _starts_again(Path(file)):
        return replace(reward, wrong=f"is in {file}, which {STARTS_AGAIN}")
    return reward


def _imported_name(module: ModuleType, file: Path) -> str:
    """The name by which another process imports a module: a script's is that of its file."""
    if module.__name__ != "__main__":
        return module.__name__
    spec = module.__spec__  # of `python -m package.module`
    return file.stem if spec is None else spec.name


def _root(module: str, file: Path) -> str:
    """The folder on the path that contains a module of this name."""
    depth = module.count(".") + (file.name == "__init__.py")
    return str(file.resolve().parents[depth])


def _attribute(module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _hidden_by(module: str, folder: str) -> str | None:
    """The location of another module of this name, which a process finds first, as the folder is searched last."""
    top = module.partition(".")[0]
    if top in sys.builtin_module_names:
        return "Python itself"
    elsewhere = [entry for entry in sys.path if entry and Path(entry).resolve() != Path(folder)]
    spec = PathFinder.find_spec(top, elsewhere)
    return None if spec is None or spec.origin is None else spec.origin


def _starts_again(script: Path) -> bool:
    """Whether importing a script repeats its current statement, as it is not under a test of `__name__`."""
    frame = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back
    if frame is None:  # called from another thread
        return False
    for statement in ast.parse(script.read_bytes()).body:
        if statement.lineno <= frame.f_lineno <= (statement.end_lineno or statement.lineno):
            test = ast.walk(statement.test) if isinstance(statement, ast.If) else ()
            return not any(isinstance(node, ast.Name) and node.id == "__name__" for node in test)
    return False


def _must_be_importable(rewards: Sequence[_NamedReward]) -> None:
    for reward in rewards:
        if reward.wrong:
            raise UserError(
                f"reward {reward.label!r} {reward.wrong}. Workers are separate processes, which import it by its name: "
                'write a function into its own module or script, or set [run] placement = "inline", where a run '
                "has one process"
            )
