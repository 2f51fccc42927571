"""Messages between `cosmos-rl generate` and the processes that generate for it, over a socket pair.

command   --Task-->               instance      the connection stays open while the command lives
          <--Answer, Failed--
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 2**30
"""Longest message: a task has all of its rows."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    sample: int
    """Its place in the list, from 0: it decides the seed."""
    columns: dict[str, Any]
    origin: str


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance has to do."""

    name: str
    recipe: dict[str, Any]
    """The resolved recipe, section by section."""
    checkpoint: str
    """Folder or URL of the checkpoint with the weights; empty for those of the recipe's model."""
    averaged: bool
    """Whether the average of those weights is wanted, where the checkpoint holds one."""
    version: int
    """Optimizer steps in those weights."""
    rows: list[Row]
    num_samples: int
    """Rollouts of each row."""
    rows_at_once: int | None
    """Rows in work at the same time; None: one where rollouts are media, `TEXTS_AT_ONCE` where they are text."""
    scored: bool
    """Whether the rewards of [reward] are asked for."""
    media: str
    """Folder for images and videos; empty where none are to be kept."""
    threads: int
    """CPU threads of tensor work."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A row is done."""

    sample: int
    lines: list[dict[str, Any]]
    """One a rollout, or a single one with `error`."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The instance cannot go on."""

    message: str
    user: bool
    """True: something the user can mend."""


Reply = Answer | Failed
