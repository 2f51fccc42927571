"""A trainable action model: log-probabilities of the terms of episodes.

    decisions      inputs, replay -- evaluate --> log-probs [B, H, D] -- summed --> terms [T], and values of their steps
    demonstrations inputs, actions -- supervised --> minus the loss [B]: one term per sample

The latter is the negative flow-matching loss or the mean log-likelihood of action tokens: maximising the likelihood of
these "terms" is imitation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_core.train.policy_base import PolicyBase
from cosmos_rl_core.types import Microbatch, PolicyOutputs
from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.terms import terms_of
from cosmos_rl_vla.trajectory import REPLAY

if TYPE_CHECKING:
    from cosmos_rl_vla.config import VLADataConfig, VLASampling
    from cosmos_rl_vla.data.demos import Demonstrations
    from cosmos_rl_vla.models.loaded import LoadedPolicy


class VLAPolicy(PolicyBase[nn.Module]):
    """`interfaces.Policy` over an action model.

    `Microbatch.inputs`: those of `collate`, or of demonstrations those of `supervised`.
    """

    def __init__(
        self,
        loaded: LoadedPolicy,
        *,
        sampling: VLASampling | None,
        opened: Demonstrations | None = None,
        aux_coef: float = 1.0,
        seed: int = 0,
        reduce_once: bool = False,
    ) -> None:
        """Wrap a model that is already sharded over its ranks.

        Args:
            sampling: the units of terms and steps; None in supervised training.
            opened: the demonstrations that the model's statistics were measured on.
            aux_coef: coefficient of the auxiliary loss in supervised training.
            seed: of the noise and flow times of supervised training.
        """
        super().__init__(loaded.model, reduce_once=reduce_once)
        self.loaded = loaded
        self._model = loaded.model
        self._sampling = sampling
        self._aux_coef = aux_coef
        self._opened = [] if opened is None else [opened]
        self.seed = seed

    def demonstrations(self, data: VLADataConfig) -> Demonstrations:
        """Return the demonstrations of a [data] section, opened at its first use. Raises UserError for damage."""
        from cosmos_rl_vla.data.demos import Demonstrations

        known = next((demonstrations for demonstrations in self._opened if demonstrations.data == data), None)
        if known is None:
            known = Demonstrations.open(data)
            self._opened.append(known)
        return known

    def _outputs(self, microbatch: Microbatch, *, with_entropy: bool) -> PolicyOutputs:
        """Return log-probabilities of terms, values of a critic, and entropy if the weights determine it."""
        device = next(self.module.parameters()).device
        inputs = to_device(microbatch.inputs, device)
        observed = Inputs(**{name: inputs[name] for name in ("images", "state", "tokens", "token_mask")})
        if "actions" in inputs:
            seeds = microbatch.inputs["seeds"].tolist()  # of the host's copy
            return self._of_demonstrations(observed, inputs, seeds=seeds)
        return self._of_decisions(observed, inputs, with_entropy=with_entropy)

    def weights(self) -> dict[str, Tensor]:
        """Return live tensors by the names of the public checkpoints."""
        return self.loaded.weights()

    def rollout_weights(self) -> Mapping[str, Tensor]:
        """Return the trained tensors: engines load the others themselves."""
        return self.loaded.trained_weights()

    def save_config(self, directory: Path) -> None:
        self.loaded.save_config(directory)

    def _of_decisions(self, observed: Inputs, inputs: Mapping[str, Tensor], *, with_entropy: bool) -> PolicyOutputs:
        assert self._sampling is not None, "episodes have a sampling"
        replay = {name.removeprefix(REPLAY): tensor for name, tensor in inputs.items() if name.startswith(REPLAY)}
        evaluated = self._model.evaluate(observed, replay, with_entropy=with_entropy)
        valid, terms = inputs["valid"], self._sampling.terms
        entropy = evaluated.entropy
        tensors = {}
        if evaluated.whitened is not None and terms == "token":
            tensors["whitened"] = evaluated.whitened.reshape(-1, 1)
        return PolicyOutputs(
            logprobs=terms_of(evaluated.logprobs, valid, terms=terms),
            entropy=None if entropy is None else terms_of(entropy, valid, terms=terms),
            values=self._values(evaluated.values, valid, action_dim=evaluated.logprobs.shape[-1]),
            tensors=tensors,
        )

    def _values(self, values: Tensor, valid: Tensor, *, action_dim: int) -> Tensor | None:
        """[B, V] -> [T], the value of each term's step; None without a critic."""
        assert self._sampling is not None
        if values.shape[1] == 0:
            return None
        if self._sampling.terms == "chunk":
            return values[:, 0]
        first = values[:, :1] if self._sampling.steps == "chunk" else values
        of_actions = first.expand(valid.shape).reshape(-1)
        return of_actions if self._sampling.terms == "action" else of_actions.repeat_interleave(action_dim)

    def _of_demonstrations(
        self, observed: Inputs, inputs: Mapping[str, Tensor], *, seeds: Sequence[int]
    ) -> PolicyOutputs:
        losses = self._model.supervised(
            observed,
            inputs["actions"],
            inputs["action_mask"],
            randomness=Randomness(seeds=seeds, places=[0] * len(seeds)),
            aux=inputs.get("aux"),
        )
        if losses.aux is None:
            return PolicyOutputs(logprobs=-losses.loss)
        return PolicyOutputs(
            logprobs=-(losses.loss + self._aux_coef * losses.aux),
            metrics={"loss_actions": losses.loss, "loss_aux": losses.aux},
        )
