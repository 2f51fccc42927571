"""The record of an episode, and the rollout that it becomes.

    opening | turn 0 | appended | turn 1 | ...          a branch
    prompt  |  sampled    not sampled  sampled                 loss_mask: sampled

A history that is rewritten begins a new branch: the model reads other terms there than those it sampled before. All
branches belong to one rollout, with one reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cosmos_rl_core.episodes.interfaces import Continuation, Message, Opening
from cosmos_rl_core.types import Episode, Exchange, FinishReason, Rollout, Turn

_NOTHING = np.zeros(0, np.int32)


@dataclass(eq=False, slots=True)
class _Branch:
    """One history of an episode."""

    opening: Opening
    number: int
    parts: list[tuple[np.ndarray, Turn, int]] = field(default_factory=list)
    """Appended terms, the turn after them, and the turn's number in the episode."""

    @property
    def num_terms(self) -> int:
        return sum(len(appended) + len(turn.terms) for appended, turn, _ in self.parts)


class EpisodeHistory:
    """Records one episode.

    branch = history.begin(opening)                      # 0, 1, ...
    number = history.add(branch, appended, turn, model_s=0.2)
    history.answer(number, messages, reward=1.0)
    rollout = history.rollout(continuation, finish_reason="stop")
    """

    def __init__(self) -> None:
        self._branches: list[_Branch] = []
        self._exchanges: list[Exchange] = []

    @property
    def exchanges(self) -> Sequence[Exchange]:
        """The turns so far."""
        return self._exchanges

    @property
    def num_terms(self) -> int:
        """Terms after the openings, of all branches."""
        return sum(branch.num_terms for branch in self._branches)

    def begin(self, opening: Opening) -> int:
        """Begin a branch and return its number."""
        self._branches.append(_Branch(opening, len(self._branches)))
        return len(self._branches) - 1

    def add(self, branch: int, appended: np.ndarray, turn: Turn, *, model_s: float = 0.0) -> int:
        """Record terms that were appended and the turn that was sampled after them; return the turn's number."""
        number = len(self._exchanges)
        self._branches[branch].parts.append((appended, turn, number))
        self._exchanges.append(
            Exchange(
                text=turn.text,
                reasoning=turn.reasoning,
                calls=turn.calls,
                problem=turn.problem,
                branch=branch,
                model_s=model_s,
            )
        )
        return number

    def answer(
        self,
        number: int,
        messages: Sequence[Message] = (),
        *,
        reward: float | None = None,
        metrics: dict[str, float] | None = None,
        environment_s: float = 0.0,
    ) -> None:
        """Record the environment's answer to a turn."""
        self._exchanges[number] = replace(
            self._exchanges[number],
            messages=tuple(messages),
            reward=reward,
            metrics=metrics or {},
            environment_s=environment_s,
        )

    def rollout(self, continuation: Continuation, *, finish_reason: FinishReason) -> Rollout:
        """Return the episode as a rollout with one step for each turn. Its reward is the last turn's to give.

        Branches without a turn are left out.
        """
        branches = [branch for branch in self._branches if branch.parts]
        columns = [_columns(branch) for branch in branches]
        mask, logprobs, versions, steps = _joined(columns)
        # The steps of an episode are in the order of its terms, those of branches one after another.
        order = list(dict.fromkeys(steps.tolist()))
        exchanges = tuple(self._exchanges[number] for number in order)
        rank = np.zeros(len(self._exchanges), np.int32)
        rank[order] = np.arange(len(order))
        opened = [(branch.opening, column[0]) for branch, column in zip(branches, columns, strict=True)]
        return Rollout(
            arrays=continuation.arrays(opened or [(self._branches[0].opening, _NOTHING)]),
            rollout_logprobs=logprobs.astype(np.float32),
            versions=versions.astype(np.int32),
            loss_mask=mask.astype(bool),
            text=self._exchanges[max(order)].text if order else "",
            finish_reason=finish_reason,
            episode=Episode(
                term_steps=rank[steps] if len(steps) else _NOTHING,
                values=np.zeros(len(exchanges) + 1, np.float32),
                rewards=np.zeros(len(exchanges), np.float32),
            ),
            exchanges=exchanges,
        )


def _joined(columns: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Mask, log-probabilities, versions and turns of all branches."""
    if not columns:
        return (_NOTHING,) * 4
    return tuple(np.concatenate(parts) for parts in list(zip(*columns, strict=True))[1:])


def _columns(branch: _Branch) -> tuple[np.ndarray, ...]:
    """Terms, mask, log-probabilities, versions and turns [T] of a branch.

    Appended terms belong to the turn that is sampled after them, and have the version of the last sampled term, so that
    the oldest and the newest version of a rollout are those of terms that were sampled.
    """
    columns: list[list[np.ndarray]] = [[], [], [], [], []]
    version = int(branch.parts[0][1].versions[0])
    for appended, turn, number in branch.parts:
        for terms, sampled in ((appended, False), (turn.terms, True)):
            size = len(terms)
            columns[0].append(terms.astype(np.int32))
            columns[1].append(np.full(size, sampled))
            columns[2].append(turn.logprobs if sampled else np.zeros(size, np.float32))
            columns[3].append(turn.versions if sampled else np.full(size, version, np.int32))
            columns[4].append(np.full(size, number, np.int32))
        version = int(turn.versions[-1])
    return tuple(np.concatenate(column) for column in columns)
