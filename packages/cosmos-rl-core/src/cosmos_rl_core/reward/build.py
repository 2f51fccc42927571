"""Builds rewards from their names and options, in a run and in worker processes; other plug-ins with `build`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError


def build_by_name(name: str, options: Mapping[str, Any]) -> Any:
    """Return a reward by its name in recipes: an installed one, "domain:reward", or "module:attribute".

    Raises UserError like `build`, and for an unknown name.
    """
    domain_name, _, own = name.rpartition(":")
    if ":" in domain_name or domain_name in plugins.names("cosmos_rl.domains"):
        return build(_of_domain(domain_name, own), options, where=f"reward {name}")
    factory: Any = plugins.load("cosmos_rl.rewards", name)
    return build(factory, options, where=f"reward {name}", is_attribute=":" in name)


def build(factory: Any, options: Mapping[str, Any], *, where: str, is_attribute: bool = False) -> Any:
    """Return the reward of a factory, which is called with the options.

    is_attribute: of "module:attribute", which is a factory when it is a class, and otherwise the reward itself, which
    then gets the options as keyword arguments. where: the reward, for messages. Raises UserError for something that
    cannot be called, options that it does not accept, and files that it cannot read.
    """
    if not callable(factory):
        raise UserError(f"{where} is {factory!r}, not a function")
    if is_attribute and not inspect.isclass(factory):
        return partial(factory, **options) if options else factory
    try:
        return factory(**options)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(_refusal(factory, options, error, where=where)) from error
    except OSError as error:  # a file it loads
        raise UserError(f"{where} cannot be built: {error}") from error


def _refusal(factory: Any, options: Mapping[str, Any], error: Exception, *, where: str) -> str:
    if "pydantic" in sys.modules:  # a worker process may not have it
        from pydantic import ValidationError

        from cosmos_rl_core.settings.problems import known_tables, problems

        if isinstance(error, ValidationError):
            option_problems = problems(error, tables=known_tables(factory, at="options"), at="options")
            return f"{where}: {', and '.join(map(str, option_problems))}"
    return f"{where} does not take options {dict(options)}: {error}{_known_options(factory, options)}"


def _known_options(factory: Any, options: Mapping[str, Any]) -> str:
    """The options of a factory, for a message, if these do not fit its signature."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # of C
        return ""
    try:
        signature.bind(**options)
    except TypeError:
        return f"; known options: {', '.join(signature.parameters) or 'none'}"
    return ""


def _of_domain(name: str, reward: str) -> Callable[..., Any]:
    plugin: Any = plugins.load("cosmos_rl.domains", name)
    domain: Any = plugin() if inspect.isclass(plugin) else plugin
    factory = domain.reward(reward)
    if factory is None:
        known = ", ".join(domain.rewards)
        raise UserError(f"domain {name} has no reward called {reward!r}; known: {known}")
    return factory
