"""A trainable velocity network that gives denoising steps a log-probability.

    coupled     states, times   -- velocity --> Gaussian of the next state   -- logprob of the rollout's next state
    decoupled   clean, noise, t -- noised, velocity --> error                -- minus the flow-matching loss

The second is a bound on the log-likelihood of the clean sample up to a constant, so maximum likelihood of these terms
is flow matching: supervised training, and DDRL's data term.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cosmos_rl_core.checkpoint.contents import AVERAGE
from cosmos_rl_core.interfaces import MicrobatchLoss, Reference
from cosmos_rl_core.parallel.device import to_device, to_host
from cosmos_rl_core.train.policy_base import PolicyBase
from cosmos_rl_core.types import Microbatch, PolicyOutputs
from cosmos_rl_wfm.ema import Follower, FollowerReference
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.models.weights import named_weights
from cosmos_rl_wfm.objectives.formulas import flow_matching_loss, noisy
from cosmos_rl_wfm.samplers.sampler import replay
from cosmos_rl_wfm.sampling import FlowSampling

if TYPE_CHECKING:
    from cosmos_rl_wfm.models.model import DiffusersModel
    from cosmos_rl_wfm.supervised import ClipSources

OLD = "old:"
"""Prefix of the names of old weights in a checkpoint."""


class FlowPolicy(PolicyBase[nn.Module]):
    """`interfaces.Policy` over a model of diffusers.

    `Microbatch.inputs`, all [T, ...]: `times` float32 [T], the fields of `Condition` as there, and

    - `states`, `next_states` [T, C, f, h, w] and `next_times` [T] of steps of rollouts, or
    - `clean`, `noise` [T, C, f, h, w], and for real data the loss's `weights` [T].

    `PolicyOutputs.tensors`: for the first kind `whitened` [T, D] and `dt` [T]; for the second `times` [T] and `clean`,
    `states`, `velocity` and, with old weights, `old_velocity`, all [T, C, f, h, w]; without gradients `velocity` alone.
    """

    def __init__(
        self,
        model: DiffusersModel,
        *,
        sampling: FlowSampling | None,
        unconditional: Condition | None = None,
        clips: ClipSources | None = None,
        old: Follower | None = None,
        average: Follower | None = None,
        average_is_reference: bool = False,
        reduce_once: bool = False,
    ) -> None:
        """Wrap a model that is already sharded over its ranks.

        Args:
            sampling: the sampling settings of the rollouts; None in supervised training.
            unconditional: the condition of guidance's unconditional pass.
            clips: the real clips of data sections.
            old: the weights that sample the rollouts, where those are not the trained ones.
            average: the average of the trained weights; with `average_is_reference` the reference of a KL term.
        """
        super().__init__(model.network, reduce_once=reduce_once)
        self._model = model
        self._sampling = sampling
        self._unconditional = unconditional
        self._old, self._average = old, average
        self._average_is_reference = average_is_reference
        self._rollout_follower = old
        if average_is_reference and old is None:  # engines may read the trained weights while the average is loaded
            self._rollout_follower = Follower(model.network, decay=lambda version: 0.0)
        self._followers = [follower for follower in (self._rollout_follower, average) if follower is not None]
        self._t_first = 1.0 if sampling is None else sampling.plan(shift=model.traits.shift).t_first
        self.clips = clips

    def _outputs(self, microbatch: Microbatch, *, with_entropy: bool) -> PolicyOutputs:
        """Log-probabilities [T]. No entropy: the noise of steps is fixed."""
        device = next(self.module.parameters()).device
        inputs = to_device(microbatch.inputs, device)
        condition = Condition(**{field.name: inputs[field.name] for field in fields(Condition) if field.name in inputs})
        return self._of_steps(inputs, condition) if "states" in inputs else self._of_clean(inputs, condition)

    def forward_backward(self, microbatches: Sequence[Microbatch], *, loss: MicrobatchLoss, with_entropy: bool) -> None:
        for follower in self._followers:
            follower.weights()  # makes its copies before the first step
        super().forward_backward(self._with_old(microbatches), loss=loss, with_entropy=with_entropy)

    def stepped(self, version: int) -> None:
        """Update the old weights and the average after an optimizer step."""
        for follower in self._followers:
            follower.follow(version)

    def reference(self) -> Reference | None:
        """The average with `average_is_reference`; else the base model, where adapters are trained."""
        if self._average_is_reference and self._average is not None:
            return FollowerReference(self, self._average)
        return super().reference()

    def tensors(self) -> Iterator[Tensor]:
        """Those of the model with its codec and encoders, the averages, and the unconditional caption."""
        yield from self._model.tensors()
        for follower in self._followers:
            yield from follower.tensors()
        if self._unconditional is not None:
            yield from self._unconditional.tensors().values()

    def weights(self) -> dict[str, Tensor]:
        """Live tensors by checkpoint name, with old weights as `old:<name>` and averages as `average:<name>`."""
        weights = named_weights(self.module)
        for kind, follower in ((OLD, self._old), (AVERAGE, self._average)):
            if follower is not None:
                weights |= {kind + name: tensor for name, tensor in follower.weights().items()}
        return weights

    def rollout_weights(self) -> Mapping[str, Tensor]:
        """The trained weights, or those of the follower that samples rollouts; no forward pass changes its memory."""
        return named_weights(self.module) if self._rollout_follower is None else self._rollout_follower.weights()

    def save_config(self, directory: Path) -> None:
        self._model.save(directory)

    def _of_steps(self, inputs: Mapping[str, Tensor], condition: Condition) -> PolicyOutputs:
        assert self._sampling is not None, "steps of rollouts have a sampling"
        reached = replay(
            GuidedVelocity.of(self._model, condition, self._unconditional, guidance=self._sampling.guidance),
            inputs["states"],
            times=inputs["times"],
            next_times=inputs["next_times"],
            rule=self._sampling.rule,
            noise_level=self._sampling.noise_level,
            t_first=self._t_first,
        )
        return PolicyOutputs(
            logprobs=reached.logprob(inputs["next_states"]),
            tensors={"whitened": reached.whitened(), "dt": inputs["times"] - inputs["next_times"]},
        )

    def _of_clean(self, inputs: Mapping[str, Tensor], condition: Condition) -> PolicyOutputs:
        clean, noise, times = inputs["clean"], inputs["noise"], inputs["times"]
        states = noisy(clean, noise, t=times)
        velocity = self._model.velocity(states, times, condition)
        loss = flow_matching_loss(velocity, clean=clean, noise=noise)
        if "weights" in inputs:
            return PolicyOutputs(logprobs=-inputs["weights"] * loss)
        if not torch.is_grad_enabled():  # of a reference or the old weights: the others are the policy's own
            return PolicyOutputs(logprobs=-loss, tensors={"velocity": velocity})
        tensors = {"clean": clean, "states": states, "times": times, "velocity": velocity}
        if "old_velocity" in inputs:
            tensors["old_velocity"] = inputs["old_velocity"]
        return PolicyOutputs(logprobs=-loss, tensors=tensors)

    @torch.no_grad()
    def _with_old(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Add the old weights' velocity at rollouts' clean samples, all in one swap of weights: a swap is costly."""
        if self._old is None:
            return microbatches
        with self._old.counting():
            return [
                microbatch
                if "weights" in microbatch.inputs or "clean" not in microbatch.inputs
                else replace(
                    microbatch,
                    inputs={**microbatch.inputs, "old_velocity": self._velocity_in_host_memory(microbatch)},
                )
                for microbatch in microbatches
            ]

    def _velocity_in_host_memory(self, microbatch: Microbatch) -> Tensor:
        """The velocity [T, C, f, h, w] of a pass; on a GPU those of a whole step would take too much of its memory."""
        return to_host({"velocity": self.forward(microbatch).tensors["velocity"]})["velocity"]


@dataclass(frozen=True, slots=True)
class GuidedVelocity:
    """A model with its condition bound, and the unconditional one where guidance is on.

    v + scale (v - v_unconditional): classifier-free guidance (arXiv 2207.12598). Training must use the guidance of the
    rollout: the ratio of a guided policy to an unguided one is meaningless.
    """

    model: DiffusersModel
    condition: Condition
    unconditional: Condition | None = None
    """None: no guidance, and no second pass."""
    scale: float = 0.0

    @classmethod
    def of(
        cls, model: DiffusersModel, condition: Condition, unconditional: Condition | None, *, guidance: float | None
    ) -> GuidedVelocity:
        """`guidance` is in the model's convention; `unconditional` [1] is needed where it is on."""
        scale = 0.0 if guidance is None else guidance - model.unguided
        if not scale:
            return cls(model, condition)
        assert unconditional is not None, "guidance has an unconditional caption"
        return cls(model, condition, condition.with_text(unconditional), scale)

    def __call__(self, x: Tensor, times: Tensor) -> Tensor:
        """Return v [B, C, f, h, w] at states of that shape and times [B]."""
        v = self.model.velocity(x, times, self.condition)
        if self.unconditional is None:
            return v
        return v + self.scale * (v - self.model.velocity(x, times, self.unconditional))
