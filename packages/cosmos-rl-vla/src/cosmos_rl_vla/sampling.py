"""[rollout.sampling] of robot policies: how long an episode is, what of it has a log-probability and a reward."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field

from cosmos_rl_core.settings.base import Strict

TermName = Literal["token", "action", "chunk"]
StepName = Literal["chunk", "action"]


class VLASampling(Strict):
    """[rollout.sampling]: an episode and its terms."""

    unit: ClassVar[str] = "actions"
    length_key: ClassVar[str] = "max_steps"

    terms: TermName = "token"
    """What has one log-probability, and so one ratio: each dimension of an action, each action, or a whole chunk."""
    steps: StepName = "chunk"
    """What has one reward and one value: a chunk of actions, or each action. The latter needs a critic that gives one
    value an action."""
    max_steps: int = Field(default=100, ge=1)
    """Steps of the simulator after which an episode is cut off."""
    bootstrap: bool = True
    """Count the critic's estimate of what would follow an episode that the limit of steps cut off. False where the
    limit is part of the task: then it has failed, and a critic that hopes for more would never learn so."""
    greedy: bool = False
    """Act without noise, as evaluations do; nothing can be learnt from such an episode."""

    @property
    def max_terms(self) -> int:
        """Most actions of an episode."""
        return self.max_steps

    @property
    def least_microbatch_terms(self) -> int:
        """1: every decision has a forward pass of its own."""
        return 1

    def evaluation(self, *, temperature: float, max_terms: int | None) -> Self:
        """Act without noise, unless the temperature is above 0; `max_terms` is another limit of steps."""
        limit = self.max_steps if max_terms is None else max_terms
        return self.model_copy(update={"greedy": temperature == 0, "max_steps": limit})

    def build(self) -> Self:
        return self
