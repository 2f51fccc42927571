"""Whether engine and policy compute the same, known before the first step.

engine: rollouts of a long prompt, with their log-probabilities -> policy: its own of the same terms, all ranks together
        -> mean difference: a line of the log; above the tolerance a warning; above `GROSS` the end of the run

Small models are compared with transformers at start; here it is this model, engine and mesh, beyond the windows of its
attention, which the prompts of the first steps may not fill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Policy, Reference
from cosmos_rl_core.parallel.dtensor import local_part
from cosmos_rl_core.parallel.lora import reference_of
from cosmos_rl_core.parallel.metrics import sum_metrics
from cosmos_rl_core.types import RolloutGroup, TrainBatch
from cosmos_rl_core.weight_sync import SyncSection

if TYPE_CHECKING:
    from cosmos_rl_core.parallel.mesh import ReplicaMesh

GROSS = 1.0
"""Mean difference in nats above which a run ends: probabilities differ by a factor of e, term after term."""
COMPARED_GROUPS = 16
"""Maximum number of groups of a step that show whether adapters are in effect."""
SIGMAS = 6
"""Of rounding, within which nothing is concluded from them."""
METRIC = "start_mismatch"


def trained_parts(policy: Policy) -> list[Tensor]:
    """Return this rank's parts of the parameters that are trained."""
    return [local_part(parameter) for parameter in policy.module.parameters() if parameter.requires_grad]


@contextmanager
def with_values(parts: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Let tensors have other values inside, and their own again afterwards, bit by bit."""
    own = [part.clone() for part in parts]
    try:
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)
        yield
    finally:
        for part, value in zip(parts, own):
            part.copy_(value)


class EngineComparison:
    """Compares an engine's log-probabilities with the policy's.

    metrics = comparison([group], step=0)      # {"start_mismatch": 2e-7}; empty without rollouts to compare
    """

    def __init__(
        self,
        policy: Policy,
        *,
        collate: Callable[[Sequence[RolloutGroup]], TrainBatch],
        mesh: ReplicaMesh | None,
        tolerance: float,
        sync: SyncSection,
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """collate: of this rank's share among those of its replica. tolerance: mean difference in nats without a
        warning. sync: the versions that engines get, and for how long they sample with them. log, warn: receive one
        line."""
        self._policy = policy
        self._collate = collate
        self._mesh = mesh
        self._tolerance, self._sync = tolerance, sync
        self._log, self._warn = log, warn
        self._adapters = reference_of(policy)
        """The model without its adapters, until they are known to be in effect."""
        self._copy: tuple[int, list[Tensor]] = (0, [])
        """A version whose rollouts may come, and its trained parameters in host memory, which adapters make small."""

    def __call__(self, groups: Iterable[RolloutGroup | None], *, step: int) -> dict[str, float]:
        """Compare by the first of `groups` whose rollouts are of the weights of `step`.

        All ranks of the replica call it with the same groups. Raises UserError for a gross difference.
        """
        present = (group for group in groups if group is not None)
        sampled = next((one for one in present if one.min_policy_version == one.max_policy_version == step), None)
        if sampled is None:
            return {}
        difference = self._measure(sampled)
        text = (
            f"engine and policy differ by {difference:.2g} nats a term, over {sampled.num_terms} terms after "
            f"{sampled.prompt.origin}"
        )
        self._log(text)
        if not difference <= GROSS:
            raise UserError(
                f"{text}: what the engine samples is not what the policy trains; choose another [rollout] engine, or "
                "another model (docs/families.md)"
            )
        if difference > self._tolerance:
            self._warn(
                f"{text}, and rounding explains {self._tolerance:.2g}: sequences as long as these are trained off the "
                'policy; choose another [rollout] engine, or set algorithm.old_logprobs = "policy" with a correction'
            )
        return {METRIC: difference}

    def check_adapters(self, groups: Sequence[RolloutGroup], *, step: int) -> None:
        """Check once that the engine applies the adapters, as soon as rounding cannot hide it.

        All ranks of the replica call it with the same groups, before `step` changes the policy. Rollouts come some
        steps after their version: one version of the trained parameters is kept until rollouts of it alone can come no
        longer, then the next. With d, e = rollouts - base, policy - base over the terms, |d - e| < |d| unless rounding
        along e exceeds |e| / 2. Raises UserError otherwise.
        """
        if self._adapters is None:
            return
        version, values = self._copy
        parts = trained_parts(self._policy)
        if step % self._sync.interval == 0 and not max(1, step - self._sync.max_staleness) <= version <= step:
            version, values = self._copy = step, [part.to("cpu", copy=True) for part in parts]
        sampled = [group for group in groups if version == group.min_policy_version == group.max_policy_version]
        if version == 0 or not sampled:  # version 0 is the base itself
            return
        with torch.no_grad(), with_values(parts, values):
            off, base, effect = map(math.sqrt, self._squares(sampled[:COMPARED_GROUPS], self._adapters))
        if effect <= 2 * SIGMAS * self._tolerance:
            return
        if off >= base:
            raise UserError(
                f"step {step}: the adapters are not in effect in the engine: its log-probabilities of version "
                f"{version} differ by {base:.2g} nats from those of the model without them, which differ by "
                f"{effect:.2g} from the policy's (root of summed squares); set [model.lora] serve = "
                '"merged", or choose another [rollout] engine'
            )
        self._log(f"step {step}: the adapters are in effect in the engine")
        self._adapters, self._copy = None, (0, [])

    @torch.no_grad()
    def _squares(self, groups: Sequence[RolloutGroup], without: Reference) -> tuple[float, float, float]:
        """Return the sums of |rollouts - policy|^2, |rollouts - base|^2, |policy - base|^2 over all ranks."""
        names = ("off", "base", "effect")
        totals = {name: torch.zeros((), dtype=torch.float64) for name in names}
        for microbatch in self._collate(groups).microbatches:
            terms = microbatch.terms
            ours, base = (model.forward(microbatch).logprobs.cpu().double() for model in (self._policy, without))
            engine, mask = terms.rollout_logprobs.cpu(), terms.loss_mask.cpu() != 0
            for name, difference in zip(names, (engine - ours, engine - base, ours - base), strict=True):
                totals[name] += difference[mask].square().sum()
        if self._mesh is not None:
            summed = sum_metrics(totals, self._mesh)
            return summed["off"], summed["base"], summed["effect"]
        return float(totals["off"]), float(totals["base"]), float(totals["effect"])

    @torch.no_grad()
    def _measure(self, group: RolloutGroup) -> float:
        """Return the mean absolute difference of a term's log-probability; infinite if one is not finite."""
        batch = self._collate([group])
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in batch.microbatches:
            terms, logprobs = microbatch.terms, self._policy.forward(microbatch).logprobs.cpu()
            off = (terms.rollout_logprobs.cpu() - logprobs).abs().masked_fill(terms.loss_mask.cpu() == 0, 0.0)
            total += off.sum(dtype=torch.float64)
        summed = float(total) if self._mesh is None else sum_metrics({METRIC: total}, self._mesh)[METRIC]
        difference = summed / batch.num_terms
        return difference if math.isfinite(difference) else math.inf
