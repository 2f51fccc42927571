"""`cosmos-rl check`: validates a recipe as far as possible without a model, and summarises the run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.assemble import build_reward, engine_options, left_over, look_up_engine
from cosmos_rl_core.checkpoint.resume import resume_problems
from cosmos_rl_core.data.source import UsableRows
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.gpus import assignment_text
from cosmos_rl_core.launch.preflight.checks import (
    CODE,
    MACHINE,
    PARTS,
    directory_problems,
    problems_among,
    sink_problems,
    transport_problems,
)
from cosmos_rl_core.launch.preflight.child import FAILED, can_fork, run_forked
from cosmos_rl_core.launch.preflight.gpus import gpu_problems
from cosmos_rl_core.launch.preflight.rewards import reward_problems
from cosmos_rl_core.launch.versions import too_old
from cosmos_rl_core.recipe.load import LoadedRecipe, load, load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.base import ConfigError, Problem
from cosmos_rl_core.settings.problems import as_toml, each_once, is_wrong, problems_of
from cosmos_rl_core.settings.source import RecipeSource

DOMAIN_READS = frozenset(
    {
        "algorithm",
        "data",
        "eval.data",
        "model",
        "policy",
        "reward",
        "rollout.engine",
        "rollout.options",
        "rollout.parallel",
        "rollout.sampling",
        "teacher",
    }
)
"""Keys that `DomainBase.problems` may read."""
REWARDS_READ = frozenset({"algorithm.name", "data", "reward", "rollout.group_size", "rollout.sampling"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The rows of [data] or [eval.data]."""

    origin: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the first row."""
        return tuple(str(column) for column in self.rows[0])

    def __str__(self) -> str:
        return f"{len(self.rows)} rows of {self.origin} ({', '.join(self.columns)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A recipe with readable data and existing rewards."""

    config: RunConfig
    data: Dataset
    evaluation: Dataset | None
    warnings: Sequence[str] = ()
    """Warnings about valid keys, a sentence each."""
    notes: Sequence[str] = ()
    """Remarks of the checks before a start."""
    engine: str = ""
    """The engine that "auto" has chosen, and why; empty where the recipe names one."""

    def __str__(self) -> str:
        """A few lines on what the run will do, and one for each warning."""
        lines = [*_resume(self), *(("note", text) for text in (*self.warnings, *self.notes))]
        return "\n".join(f"  {name:<10}{text}" for name, text in lines)


def check(
    recipe: RunConfig | LoadedRecipe,
    *,
    deep: bool = False,
    resume: str | None = None,
    resumed: RunConfig | None = None,
    overwrite: bool | None = None,
    rewards: Mapping[str, Any] | None = None,
) -> Checked:
    """Read the datasets, look up model, engine and rewards. Raises ConfigError with every problem.

    Of a recipe that has problems already, the rest is checked, so that one error has all problems. deep: also the
    checks of `launch.preflight`, of this machine, the tokenizer, the rows and a call of each reward. resume: "auto" or
    the path of the checkpoint that the run shall continue from. resumed: the recipe that is compared with the
    checkpoint's, if `recipe` reads rows from other files. overwrite: whether a run that starts now may replace an
    earlier one; None if none is started. rewards: functions by label, in place of named ones.
    """
    loaded = recipe if isinstance(recipe, LoadedRecipe) else load(recipe)
    config, domain, wrong, source = loaded.config, loaded.domain, loaded.wrong, loaded.source
    problems, functions = list(loaded.problems), rewards or {}
    if domain is None:
        raise ConfigError(problems, source=source)
    if not is_wrong({"reward"}, wrong):
        problems += _reward_problems(config, domain, functions)
    problems += problems_among((*PARTS, *CODE), config, domain, wrong=wrong)
    data = None if is_wrong({"data"}, wrong) else _dataset("data", config.data, domain, problems)
    held_out = None if is_wrong({"eval.data"}, wrong) else config.eval.data
    if held_out is None or config.eval.held_out is None:
        evaluation = None if held_out is None else _dataset("eval.data", held_out, domain, problems)
    else:
        data, evaluation = _set_aside(config, data, problems)
    notes: list[Problem] = []
    if deep:
        deep_problems = problems_among(MACHINE, config, domain, wrong=wrong)
        deep_problems += _domain_problems(config, domain, wrong, data, evaluation)
        if data is not None and not config.is_sft and not is_wrong(REWARDS_READ, wrong):
            deep_problems += reward_problems(config, domain, data.rows, origin=data.origin, functions=functions)
        if not is_wrong({"run.output_dir", "run.placement"}, wrong):
            deep_problems += directory_problems(config, resume=resume is not None, overwrite=overwrite)
        if resume is not None and not wrong:
            deep_problems += resume_problems(resumed or config, config.run.directory, resume)
        problems += [problem for problem in deep_problems if not problem.is_note]
        notes = [problem for problem in deep_problems if problem.is_note]
    if data is None or problems:
        raise ConfigError(_in_order(each_once(problems), source), source=source)
    return Checked(
        config=config,
        data=data,
        evaluation=evaluation,
        warnings=(*warnings_for(config), *_gpu_warnings(config, is_checked=deep)),
        notes=tuple(map(str, notes)),
        engine=loaded.engine,
    )


def _in_order(problems: Sequence[Problem], source: RecipeSource | None) -> Sequence[Problem]:
    return sorted(problems, key=lambda problem: source.offset_of(problem.key)) if source else problems


def _domain_problems(
    config: RunConfig,
    domain: DomainBase,
    wrong: Collection[str],
    data: Dataset | None,
    held_out: Dataset | None,
) -> list[Problem]:
    """Return the problems of rows, tokenizer and simulators, as far as the valid sections show them."""
    problems: list[Problem] = []
    rows = () if data is None else data.rows
    for key, dataset in (("data", data), ("eval.data", held_out)):
        if dataset is not None and isinstance(dataset.rows, UsableRows):
            problems.append(Problem(key=key, wrong=dataset.rows.note, is_note=True))
    if not is_wrong(DOMAIN_READS, wrong):
        try:
            problems.extend(domain.problems(config, rows, () if held_out is None else held_out.rows))
        except UserError as error:
            problems += problems_of(error, key="model.path")
    if data is not None and not is_wrong({"policy"}, wrong) and (size := config.policy.prompts_per_step) > len(rows):
        times = f"a step uses each of {len(rows)} rows {size / len(rows):.3g} times"
        problems.append(Problem(key="policy.prompts_per_step", given=str(size), wrong=times, is_note=True))
    return problems


def check_names(recipe: LoadedRecipe) -> tuple[str, ...]:
    """Return a note for each name that is not installed here, for a run on machines with other files and packages.

    Raises ConfigError with the problems of the recipe itself.
    """
    config = recipe.valid()
    domain, problems = load_domain(config.run.domain), list(sink_problems(config)) + list(transport_problems(config))
    if not config.is_sft:
        problems += _reward_problems(config, domain, {})
        try:
            look_up_engine(config.rollout.engine, domain)
        except UserError as error:
            problems += problems_of(error, key="rollout.engine")
        else:
            engine_options(config, domain)
    return tuple(f"{problem}; the machines of the run must have it" for problem in problems)


def check_here(
    recipe: LoadedRecipe, resumed: RunConfig, rewards: Mapping[str, Any], *, resume: str | None, overwrite: bool
) -> Sequence[str]:
    """Return the notes of a deep `check` in this process, for a run that starts now."""
    keys = {"resume": resume, "overwrite": overwrite}
    return check(recipe, deep=True, resumed=resumed, rewards=rewards, **keys).notes


def check_in_child(
    recipe: LoadedRecipe, *, resume: str | None = None, overwrite: bool | None = None
) -> tuple[str, ...]:
    """As a deep `check`, in a forked process, and return its notes: rewards and libraries of the domain are imported
    there, while the controller of a run stays small. Elsewhere than on Linux, and beside threads, in this process.

    Raises UserError with the same message, and for a check that failed itself, unless a run starts now: it meets the
    same error, or none.
    """
    deep_check = partial(check, recipe, deep=True, resume=resume, overwrite=overwrite)
    if not can_fork():
        return tuple(deep_check().notes)
    child = run_forked(partial(_reported, deep_check))
    if child.result:
        error, notes = json.loads(child.result)
        if error:
            raise UserError(error)
        return tuple(notes)
    if child.status == FAILED:  # its traceback is above
        text = "a check failed itself, with the error above, and nothing after it was checked"
        if overwrite is None:
            raise UserError(f"{text}: it is one of cosmos-rl or of a library, and a run may end with it too")
        return (text,)
    names = ", ".join(function.title for function in recipe.config.reward.functions) or "none"
    raise UserError(
        f"a reward, or a library that the recipe imports, has ended the process of the checks with status "
        f"{child.status}, as it would end each worker; rewards: {names}"
    )


def _reported(deep_check: Callable[[], Checked]) -> bytes:
    """Return error and notes of a deep check as JSON."""
    try:
        return json.dumps(["", list(deep_check().notes)]).encode()
    except UserError as error:
        return json.dumps([str(error), []]).encode()


def warnings_for(config: RunConfig) -> Sequence[str]:
    """Return the domain's warnings about a valid recipe, and those about old libraries."""
    domain = load_domain(config.run.domain)
    return (*domain.warnings(config), *too_old())


def _gpu_warnings(config: RunConfig, *, is_checked: bool) -> list[str]:
    """Return what keeps the run from this machine's GPUs: the recipe may be for another machine."""
    try:
        problems = [] if is_checked else [each for each in gpu_problems(config) if not each.is_note]
        assignment_text(config)
    except UserError as error:
        return [f"on this machine the run could not start: {error}"]
    return [f"on this machine the run could not start: {each.wrong}; {each.suggestion}" for each in problems]


def _dataset(section: str, data: Any, domain: DomainBase, problems: list[Problem]) -> Dataset | None:
    try:
        rows, origin = domain.load_rows(data)
    except (ValueError, OSError) as error:  # a domain's errors for unreadable data
        column = re.search(r"\(data\.(\w+)", str(error))
        is_set = column is not None and column[1] in data.model_fields_set
        key = f"{section}.{column[1]}" if column and is_set else _rows_key(section, domain)
        problems += problems_of(error, key=key, section=section)
        return None
    if not rows:
        problems.append(Problem(key=_rows_key(section, domain), wrong=f"{origin} has no rows"))
        return None
    return Dataset(origin=origin, rows=rows)


def _set_aside(
    config: RunConfig, data: Dataset | None, problems: list[Problem]
) -> tuple[Dataset | None, Dataset | None]:
    """Return the rows that are trained on, and those that are held out."""
    if data is None:
        return None, None
    try:
        count = config.num_held_out(data.rows)
    except UserError as error:
        problems += problems_of(error, key="eval.held_out")
        return None, None
    return replace(data, rows=data.rows[count:]), replace(data, rows=data.rows[:count])


def _rows_key(section: str, domain: DomainBase) -> str:
    """The key that names the file of the rows; the section, of a domain that makes its own."""
    return f"{section}.{domain.row_keys[0]}" if domain.row_keys else section


def _reward_problems(config: RunConfig, domain: DomainBase, rewards: Mapping[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    for place, function in enumerate(config.reward.functions):
        if function.title in rewards:
            continue
        key, written = f"reward.functions.{place}.name", as_toml(function.name)
        try:
            if domain.reward(function.name) is None:
                plugins.locate("cosmos_rl.rewards", function.name, beside=domain.rewards)
            reward = build_reward(function.name, domain, options=function.options)
        except UserError as error:
            problems.append(Problem(key=key, given=written, wrong=str(error)))
        else:
            if not callable(reward):
                problems.append(Problem(key=key, given=written, wrong="is not a function"))
    return problems


def _resume(checked: Checked) -> list[tuple[str, str]]:
    config = checked.config
    run, policy = config.run, config.policy
    steps = run.max_steps or len(checked.data.rows) * (config.prompts.epochs or 1) // policy.prompts_per_step
    what = f"{config.algorithm.name} of {run.domain}, {steps} steps, {run.placement}, into {run.output_dir}"
    what = "; ".join([what, *left_over(config, len(checked.data.rows) - config.num_held_out(checked.data.rows))])
    evaluation, held_out = "none", checked.evaluation
    if held_out is not None:
        count = len(config.eval.first(held_out.rows))
        evaluation = f"the first {count} of {held_out}" if count < len(held_out.rows) else str(held_out)
    if config.is_sft:
        step = f"{policy.prompts_per_step} rows, at most {policy.microbatch_terms} terms a pass"
        rewards = "none (supervised)"
    else:
        rollout = config.rollout
        step = (
            f"{policy.prompts_per_step} prompts x {rollout.group_size} rollouts x up to "
            f"{rollout.sampling.max_terms} {rollout.sampling.unit}, at most {config.sync.max_staleness} versions stale"
        )
        rewards = ", ".join(f"{f.weight:g} x {f.title}" for f in config.reward.functions)
    return [
        ("run", what),
        ("data", str(checked.data)),
        ("eval", evaluation),
        ("step", step),
        ("rewards", rewards),
        *([("engine", checked.engine.removeprefix("engine: "))] if checked.engine else []),
    ]
