"""The training loop of a policy replica.

    controller ----- batch of step v (no group older than max_staleness) -----> forward_backward, each microbatch
        ^                                                                           |
        |                                           gradients summed over the policy replicas (several replicas)
        |                                                                           |
        |                                                              vote, wait for the commit
        |                                                                           v
        +------------------------- metrics <---------- publish v+1 <----------- optim_step

consumes   batches of step v, in order
produces   weights of version v + 1, one set of metrics a step
waits for  a batch (sent once enough groups are ready), then the commit
unblocks   rollout replicas that may only generate with newer weights

A policy replica that is lost before the commit ends the epoch: the others redo the step with the same batch. After the
commit all of them take it. With max_staleness = 0 no replica generates during a step, which makes the loop synchronous.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from cosmos_rl_core.errors import EpochOver
from cosmos_rl_core.types import StepResult, TrainStep

if TYPE_CHECKING:
    from cosmos_rl_core.train.learner import PolicyLearner


class Steps(Protocol):
    """The controller's side of a policy replica."""

    async def next_batch(self, step: int) -> TrainStep | None:
        """The work of this step, or None when the run is over."""
        ...

    async def commit(self, step: int) -> None:
        """Vote for the step; return once every member has voted and the commit is durable. Raises EpochOver."""
        ...

    async def report(self, result: StepResult, sync: Mapping[str, float]) -> None:
        """Metrics of the step; saves a checkpoint where one is due."""
        ...


async def train(steps: Steps, learner: PolicyLearner) -> None:
    """Train until the controller has no more batches."""
    await learner.publish()
    while (step := await steps.next_batch(learner.version)) is not None:
        try:
            await learner.forward_backward(step)
            await learner.sum_gradients()
            await steps.commit(learner.version)
        except EpochOver:
            await learner.undo()
            continue
        result = await learner.optim_step()
        sync = await learner.publish()
        await steps.report(result, sync)
