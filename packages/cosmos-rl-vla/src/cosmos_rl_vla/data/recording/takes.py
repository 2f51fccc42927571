"""Which episodes are to be recorded, and what was seen in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.data.recording.expert import Expert
from cosmos_rl_vla.data.recording.writer import Demonstration

PRIVILEGED = "privileged"
"""Column of numbers that the policy is not told; what [data] aux_columns is for."""

_ATTEMPTS = 5
"""Initial states tried for each episode that is wanted, before a task is given up."""


@dataclass(eq=False, slots=True)
class Take:
    """One episode, as it is played."""

    task: str
    init: int
    losses: int = 0
    """Times it was begun again since its process was lost."""
    success: bool = False
    images: list[dict[str, np.ndarray]] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    """As `Expert` shows them."""
    actions: list[np.ndarray] = field(default_factory=list)
    """[D] each, what was wanted; none of a look."""

    def forget(self) -> None:
        """Begin again."""
        for frames in (self.images, self.states, self.actions):
            frames.clear()

    def demonstration(self, expert: Expert, *, instruction: str) -> Demonstration:
        """Return it as it is written."""
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
    """The episodes of one task: as many successes as are wanted, from the first initial states that give them.

    A further state is begun for each failure only. So which are kept does not depend on how many are played at a time.
    """

    def __init__(self, task: str, *, wanted: int, first_init: int, look: bool = False) -> None:
        """look: of beginnings alone, each of which is a success."""
        self.task, self.look, self.wanted = task, look, wanted
        self.kept = 0
        """Successes that were handed over."""
        self._first = first_init
        self._begun = self._emitted = 0
        self._ended: dict[int, Take] = {}

    @property
    def attempts(self) -> int:
        """Episodes that were begun."""
        return self._begun

    @property
    def done(self) -> bool:
        """Whether all that is wanted was handed over."""
        return self.kept == self.wanted and self._emitted == self._begun

    def next(self) -> Take | None:
        """Begin another episode; None where enough are running or have succeeded.

        Raises UserError where too many have failed.
        """
        failed = sum(not take.success for take in self._ended.values()) + self._emitted - self.kept
        if self._begun - failed >= self.wanted:
            return None
        if self._begun >= _ATTEMPTS * self.wanted:
            if self._begun > self._emitted + len(self._ended):
                return None  # those that are running may succeed
            raise UserError(
                f"the expert failed in {failed} of {self._begun} episodes of {self.task!r}: give it more time (options "
                "max_steps), more speed or less noise"
            )
        take = Take(task=self.task, init=self._first + self._begun)
        self._begun += 1
        return take

    def end(self, take: Take) -> None:
        """Take an episode back that is over."""
        self._ended[take.init] = take

    def successes(self) -> Iterator[Take]:
        """Hand over successes in the order of their initial states, up to the first that is not over."""
        while (take := self._ended.pop(self._first + self._emitted, None)) is not None:
            self._emitted += 1
            if take.success:
                self.kept += 1
                yield take
