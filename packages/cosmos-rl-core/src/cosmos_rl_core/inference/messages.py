"""Messages between `cosmos-rl generate` and its processes, over a socket pair.

command   --Task-->               instance      the connection is open as long as the command runs
          <--Answer, Failed--
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 2**30
"""Maximum size of a message; a task contains all of its rows."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    sample: int
    """Index in the list, from 0; determines the seed."""
    columns: dict[str, Any]
    origin: str


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one instance."""

    name: str
    recipe: dict[str, Any]
    """The resolved recipe, section by section."""
    checkpoint: str
    """Folder or URL of the checkpoint; empty for the weights of the recipe's model."""
    averaged: bool
    """Whether to use the average of the weights, if the checkpoint has one."""
    version: int
    """Number of optimizer steps in those weights."""
    rows: list[Row]
    num_samples: int
    """Rollouts per row."""
    rows_at_once: int | None
    """Rows in work at the same time; None: 1 if rollouts are media, `TEXTS_AT_ONCE` if they are text."""
    scored: bool
    """Whether to compute the rewards of [reward]."""
    media: str
    """Folder for images and videos; empty: none are written."""
    threads: int
    """CPU threads for tensor work."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result of one row."""

    sample: int
    lines: list[dict[str, Any]]
    """One line per rollout, or a single one with `error`."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The instance failed."""

    message: str
    user: bool
    """True: an error that the user can fix."""


Reply = Answer | Failed
