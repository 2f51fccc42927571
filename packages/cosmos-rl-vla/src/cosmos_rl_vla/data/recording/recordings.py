"""Selects the episodes to record, and stores their observations and actions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.data.recording.expert import Expert
from cosmos_rl_vla.data.recording.writer import Demonstration

PRIVILEGED = "privileged"
"""Column of numbers that the policy does not get; for [data] aux_columns."""

_ATTEMPTS = 5
"""Initial states tried per requested episode, before a task fails."""


@dataclass(eq=False, slots=True)
class Recording:
    """One episode in progress."""

    task: str
    init: int
    losses: int = 0
    """Number of restarts after its process was lost."""
    success: bool = False
    images: list[dict[str, np.ndarray]] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    """States of `Expert`."""
    actions: list[np.ndarray] = field(default_factory=list)
    """[D] each, without noise; empty for a look."""

    def forget(self) -> None:
        """Discard all frames."""
        for frames in (self.images, self.states, self.actions):
            frames.clear()

    def demonstration(self, expert: Expert, *, instruction: str) -> Demonstration:
        """Return the episode to write."""
        shown = expert.split(np.stack(self.states))
        none = np.zeros_like(shown.actions)
        return Demonstration(
            task=instruction,
            images={camera: np.stack([frame[camera] for frame in self.images]) for camera in self.images[0]},
            states=shown.states,
            actions=np.stack(self.actions) if self.actions else none,
            has_action=np.full(len(none), bool(self.actions)),
            columns={PRIVILEGED: shown.privileged} if shown.privileged.shape[1] else {},
        )


class Series:
    """The episodes of one task: the requested number of successes, from the first initial states that succeed.

    A further state is begun only after a failure, so the selection is independent of the number of concurrent episodes.
    """

    def __init__(self, task: str, *, wanted: int, first_init: int, look: bool = False) -> None:
        """look: record initial observations alone, each of which is a success."""
        self.task, self.look, self.wanted = task, look, wanted
        self.kept = 0
        """Number of successes returned."""
        self._first = first_init
        self._begun = self._emitted = 0
        self._ended: dict[int, Recording] = {}

    @property
    def attempts(self) -> int:
        """Number of episodes begun."""
        return self._begun

    @property
    def done(self) -> bool:
        """Whether all requested successes were returned."""
        return self.kept == self.wanted and self._emitted == self._begun

    def next(self) -> Recording | None:
        """Begin another episode; None if enough are running or have succeeded.

        Raises UserError if too many have failed.
        """
        failed = sum(not recording.success for recording in self._ended.values()) + self._emitted - self.kept
        if self._begun - failed >= self.wanted:
            return None
        if self._begun >= _ATTEMPTS * self.wanted:
            if self._begun > self._emitted + len(self._ended):
                return None  # the running ones may succeed
            raise UserError(
                f"the expert failed in {failed} of {self._begun} episodes of {self.task!r}: give it more time (options "
                "max_steps), more speed or less noise"
            )
        recording = Recording(task=self.task, init=self._first + self._begun)
        self._begun += 1
        return recording

    def end(self, recording: Recording) -> None:
        """Add a finished episode."""
        self._ended[recording.init] = recording

    def successes(self) -> Iterator[Recording]:
        """Yield successes in the order of their initial states, up to the first unfinished episode."""
        while (recording := self._ended.pop(self._first + self._emitted, None)) is not None:
            self._emitted += 1
            if recording.success:
                self.kept += 1
                yield recording
