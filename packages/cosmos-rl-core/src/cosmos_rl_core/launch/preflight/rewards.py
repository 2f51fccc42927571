"""One call of each reward before the start, with a specimen of a group.

    rewards.py:12 takes (prompt, response), and a reward is called with one argument, a RolloutGroup

Exceptions that name a mistake in the code, and results that are not one number per rollout, are problems. Others may
come from the made-up responses, in which a pattern or a key is not found, and are notes.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cosmos_rl_core.assemble import build_reward, with_prompt_media
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.launch.preflight.child import FAILED, can_fork, run_forked
from cosmos_rl_core.processes import in_daemon_thread
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.reward.rubric import Rubric, WeightedReward
from cosmos_rl_core.settings.base import Problem
from cosmos_rl_core.settings.problems import as_toml
from cosmos_rl_core.types import RolloutGroup

CALL_S = 8.0
"""Maximum time to make a reward and call it once; a slower one is left to the run."""
MISTAKES = (NameError, ImportError, SyntaxError, SystemExit)
NOT_FINITE = re.compile(r" returned \S*(nan|inf)\S* for rollout ")
EXAMPLE = "def my_reward(group): return [1.0 if 'yes' in rollout.text else 0.0 for rollout in group.rollouts]"


def reward_problems(
    config: RunConfig,
    domain: DomainBase,
    rows: Sequence[Mapping[str, Any]],
    *,
    origin: str,
    functions: Mapping[str, Any],
) -> list[Problem]:
    """Call each reward of a domain that makes specimens; of others, compare the arguments.

    functions: by label, in place of those that the recipe names.
    """
    if config.has_episodes:
        rows = ()  # of an episode's turns there is no specimen
    group = None
    if rows and (specimen := domain.specimen(config, rows[0], origin=f"{origin}:1")) is not None:
        group = with_prompt_media(config, domain, specimen)
    problems: list[Problem] = []
    for place, section in enumerate(config.reward.functions):
        make = partial(build_reward, section.name, domain, options=section.options, given=functions.get(section.title))
        wrong = Problem(key=f"reward.functions.{place}.name", given=as_toml(section.name), wrong="")
        problems += _within(CALL_S, partial(_problems, make, section.title, group, wrong), wrong=wrong)
    return problems


def _problems(make: Callable[[], Any], title: str, group: RolloutGroup | None, wrong: Problem) -> list[Problem]:
    """Make a reward and call it; `wrong` is the problem to complete."""
    try:
        function = make()
    except UserError:
        return []  # `check` reports it
    except Exception as error:  # a reward's own code may raise anything
        return [replace(wrong, wrong=f"cannot be made: {type(error).__name__}: {error}")]
    if text := _arguments(function):
        return [replace(wrong, wrong=text, suggestion=EXAMPLE)]
    if group is None or getattr(function, "loads_model", False):
        return []
    # `_within` has given up before the rubric's own limit, whose message names a key of the recipe
    rubric = Rubric([WeightedReward(name=title, weight=1.0, function=function)], timeout_s=2 * CALL_S)
    try:
        asyncio.run(rubric.score(group))
    except SampleError as error:
        cause = error.__cause__
        is_note = not _is_mistake(cause) if cause else NOT_FINITE.search(error.reason) is not None
        return [replace(wrong, wrong=f"{error.reason} (called once, with a made-up response)", is_note=is_note)]
    finally:
        rubric.close()
    return []


def _is_mistake(cause: BaseException) -> bool:
    """Whether the code is wrong for every response.

    None is the result of a search that finds nothing in this one. Row and media are those of a real prompt.
    """
    if isinstance(cause, AttributeError | TypeError):
        return "NoneType" not in str(cause)
    if isinstance(cause, KeyError):
        line = traceback.extract_tb(cause.__traceback__)[-1].line or ""
        return ".media[" in line or ".row[" in line
    return isinstance(cause, MISTAKES)


def _arguments(function: Any) -> str:
    """The reason that a function cannot be called with one group; "" if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of an extension module
        return ""
    try:
        signature.bind(None)
    except TypeError:
        code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
        place = f"{Path(code.co_filename).name}:{code.co_firstlineno} " if code else ""
        return f"{place}takes {signature}, and a reward is called with one argument, a RolloutGroup"
    return ""


def _within(limit_s: float, work: Callable[[], list[Problem]], *, wrong: Problem) -> list[Problem]:
    """Return the result of work and raise what it raises, or the problem that it takes longer or ends its process.

    A forked process, where that is possible, ends at the limit in any call, also in one that keeps Python's lock.
    """
    late = replace(wrong, wrong=f"was not called, as it took longer than {CALL_S:g} s", is_note=True)
    if not can_fork():
        done = in_daemon_thread(work, name="preflight")
        wait([done], timeout=limit_s)
        return done.result() if done.done() else [late]
    ended = run_forked(lambda: msgspec.json.encode(work()), limit_s=limit_s)
    if ended.result:
        return msgspec.json.decode(ended.result, type=list[Problem])
    if ended.is_late:
        return [late]
    if ended.status == FAILED:
        raise RuntimeError("a check of a reward has failed itself, with the traceback above")
    text = f"has ended the process of the checks with status {ended.status}, as it would end each worker"
    return [replace(wrong, wrong=text)]
