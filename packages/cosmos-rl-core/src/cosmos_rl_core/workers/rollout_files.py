"""Writes the rollouts of each step to a file while the step is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

from cosmos_rl_core.observe.rollouts import no_texts, write_rollouts
from cosmos_rl_core.optional import ShowsTerms
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.workers.context import Assignment


class RolloutFiles:
    """The files `rollouts/step_*.jsonl` of a run, written in a thread of their own."""

    def __init__(self, directory: Path, *, every: int, write: Callable[..., Path]) -> None:
        """every: steps from one file to the next; 0: none. write: `write_rollouts` with what it shows of the terms."""
        self._directory, self._every, self._write = directory, every, write
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout files")
        self._writing: Future[Path] | None = None

    @classmethod
    def of(cls, assignment: Assignment) -> Self:
        domain, config = assignment.domain, assignment.config
        texts = partial(domain.term_texts, config.model) if isinstance(domain, ShowsTerms) else no_texts
        write = partial(write_rollouts, term_texts=texts, term_groups=config.logging.term_groups)
        return cls(assignment.run_dir / "rollouts", every=config.logging.rollouts_every, write=write)

    def has(self, step: int) -> bool:
        """Return whether the step gets a file."""
        return bool(self._every) and step % self._every == 0

    def begin(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Begin to write a step's rollouts, whose advantages are final; again for a step that is computed again."""
        if self.has(step):
            self._writing = self._thread.submit(self._write, self._directory, step=step, groups=groups)

    async def written(self) -> None:
        """Return when the file that was begun last is whole. Raises OSError."""
        if self._writing is not None:
            await asyncio.wrap_future(self._writing)
            self._writing = None
