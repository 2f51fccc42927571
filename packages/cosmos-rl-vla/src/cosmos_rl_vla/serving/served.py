"""A policy that acts for several robots at once.

observations -- admit --> requests -- act, of any number of robots --> chunks of actions in the robots' units
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cosmos_rl_vla.models.base import Inputs, Randomness
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.models.realtime import prefix_weights
from cosmos_rl_vla.serving.observations import BadObservation, ObservationLayout, RobotObservation


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRequest:
    """An observation that the policy can act on, with the seed of its noise."""

    observation: RobotObservation
    state: np.ndarray
    """[n] float32, normalised."""
    seed: int
    """Of the robot."""
    place: int
    """Number of the request among the robot's."""


class ServedPolicy:
    """The model, frozen and on its device, and the layout of observations."""

    def __init__(self, loaded: LoadedPolicy, layout: ObservationLayout, *, name: str) -> None:
        self.layout, self.name = layout, name
        self._loaded, self._model = loaded, loaded.model.requires_grad_(False).eval()
        self._device = next(self._model.parameters()).device

    def admit(self, observation: RobotObservation, *, seed: int, place: int) -> ActionRequest:
        """Raises BadObservation for an instruction that is longer than the model's maximum."""
        state = self._loaded.stats.normalise_state(observation.state)
        try:
            self._loaded.instructions([observation.prompt], state[None])
        except ValueError as error:
            raise BadObservation(f"prompt: {error}") from error
        return ActionRequest(observation=observation, state=state, seed=seed, place=place)

    def act(self, requests: Sequence[ActionRequest]) -> list[np.ndarray]:
        """Return a chunk [H, D] float32 for each request, in one pass; their images have equal sizes.

        Actions that are executed before the chunk arrives are those of the chunk before, unchanged.
        """
        randomness = Randomness(seeds=[one.seed for one in requests], places=[one.place for one in requests])
        inputs = self._inputs(requests)
        if all(one.observation.previous is None for one in requests):
            acted = self._model.act(inputs, randomness=randomness, greedy=True).actions
        else:
            previous, weights = self._previous(requests)
            acted = self._model.act_after(inputs, randomness=randomness, previous=previous, weights=weights)
        chunks = self._loaded.stats.unnormalise(acted.float().cpu().numpy())
        for chunk, request in zip(chunks, requests, strict=True):
            if request.observation.previous is not None:
                frozen = request.observation.delay
                chunk[:frozen] = request.observation.previous[:frozen]
        return list(chunks)

    def warm_up(self, *, most: int) -> None:
        """Act once for one robot and once for `most`: the first passes allocate, compile and choose kernels."""
        example = self.layout.example()
        for count in {1, most}:
            self.act([self.admit(example, seed=robot, place=0) for robot in range(count)])

    def _inputs(self, requests: Sequence[ActionRequest]) -> Inputs:
        state = np.stack([one.state for one in requests])
        tokens = self._loaded.instructions([one.observation.prompt for one in requests], state)
        images = np.stack([one.observation.images for one in requests])
        arrays = {"images": images, "state": state, "tokens": tokens.tokens, "token_mask": tokens.mask}
        return Inputs(**{name: torch.from_numpy(array) for name, array in arrays.items()}).to(self._device)

    def _previous(self, requests: Sequence[ActionRequest]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chunks before [B, H, D], normalised, and their weights [B, H]; 0 for robots without one."""
        horizon, dims = self.layout.horizon, self.layout.action_dim
        previous = np.zeros((len(requests), horizon, dims), np.float32)
        weights = torch.zeros(len(requests), horizon)
        for row, request in enumerate(requests):
            left = request.observation.previous
            if left is not None:
                previous[row, : len(left)] = self._loaded.stats.normalise(left)
                weights[row] = prefix_weights(horizon, left=len(left), delay=request.observation.delay)
        return torch.from_numpy(previous).to(self._device), weights.to(self._device)
