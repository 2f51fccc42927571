"""[rollout.sampling] of robot policies: episode length, and the units of log-probabilities and rewards."""

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
    """Unit of a log-probability, and so of a ratio: a dimension of an action ("token"), an action, or a whole chunk."""
    steps: StepName = "chunk"
    """Unit of a reward and a value: a chunk of actions, or an action. "action" needs [model.critic] per = "action"."""
    max_steps: int = Field(default=100, ge=1)
    """Maximum number of simulator steps of an episode."""
    bootstrap: bool = True
    """Bootstrap the return of an episode truncated at max_steps with the critic's value of its last state. Set False if
    the limit is part of the task: truncation is then a failure, with a value of 0."""
    greedy: bool = False
    """Act without noise, as evaluations do. Such episodes cannot be trained on."""

    @property
    def max_terms(self) -> int:
        """Maximum number of actions in an episode."""
        return self.max_steps

    @property
    def least_microbatch_terms(self) -> int:
        """1: each decision is a forward pass of its own."""
        return 1

    def evaluation(self, *, temperature: float, max_terms: int | None) -> Self:
        """Return the sampling of evaluations: greedy at temperature 0, `max_terms` replaces max_steps."""
        limit = self.max_steps if max_terms is None else max_terms
        return self.model_copy(update={"greedy": temperature == 0, "max_steps": limit})

    def build(self) -> Self:
        return self
