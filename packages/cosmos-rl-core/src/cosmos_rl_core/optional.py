"""Optional abilities of a domain or a weight sync; callers check for them with isinstance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from cosmos_rl_core.recipe.run import RunConfig


@runtime_checkable
class NamesModules(Protocol):
    """A domain or a weight sync with modules that are imported once, in the process from which workers are forked."""

    def worker_modules(self, config: RunConfig) -> Sequence[str]:
        """Return the modules that policy and rollout workers import; none if they must not be forked.

        Their import must start no thread and use no GPU. Modules of a recipe's "module:attribute" names are left out.
        """
        ...
