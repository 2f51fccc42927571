"""What a domain may be able to do beyond `interfaces.Domain`; who asks for it looks with isinstance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ReadsPrompts(Protocol):
    """A domain that takes prompts as people write them, for `cosmos-rl generate`; others take rows as they are."""

    def prompt_row(self, data: Any, given: str | Mapping[str, Any], *, where: str, folder: Path) -> Mapping[str, Any]:
        """Return the row of a text, or of an object with columns, as `Domain.load_rows` would.

        data: the [data] section. where: its place, for messages. folder: what paths in it are relative to.

        Raises UserError for one that lacks what a prompt must have.
        """
        ...


@runtime_checkable
class SpreadsEngines(Protocol):
    """A domain with engines that can be spread over several GPUs."""

    def spread_engine(self, name: str, options: Mapping[str, Any], *, tp_size: int) -> Mapping[str, Any]:
        """Return [rollout.options] for an engine over `tp_size` GPUs. Raises UserError for one that cannot be."""
        ...
