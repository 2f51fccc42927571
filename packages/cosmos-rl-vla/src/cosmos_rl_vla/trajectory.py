"""An episode in progress: the record of each decision, and the rollout they become.

Rollout.arrays      K decisions of an episode
  images            uint8 [K, cameras, height, width, 3]   as the simulator rendered them
  state             float32 [K, n]                         normalised
  tokens            int32 [K, L]                           the prompt, which includes the state for some models
  token_mask        bool [K, L]
  valid             bool [K, H]                            actions that were executed
  replay/<name>     [K, ...]                               the model's sampled values, for recomputing log-probs
Rollout.media       for rewards and videos
  video             uint8 [K + 1, height, width, 3]        the first camera, with the last observation
  sim_rewards       float32 [S]                            rewards of the simulator
  success           bool [1]
  actions           float32 [T, D]                         executed actions, in the simulator's units
  step_rewards      float32 [T]                            their rewards
  decided_at        int32 [K]                              simulator steps before each decision
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cosmos_rl_core.observe.gallery import Gallery
from cosmos_rl_core.types import Episode, Rollout, RolloutGroup
from cosmos_rl_vla.config import VLASampling
from cosmos_rl_vla.sims.pool.messages import ChunkResult
from cosmos_rl_vla.terms import rewards_of, term_mask, term_steps, terms_of, values_of

if TYPE_CHECKING:
    from cosmos_rl_vla.models.base import Acted, Inputs

REPLAY = "replay/"
"""Prefix of the arrays of `Acted.replay`."""


NUMBERS = ("decided_at", "actions", "step_rewards", "success")
"""Arrays of `Rollout.media` that are stored of an episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One forward pass of the policy, as stored in the rollout."""

    images: np.ndarray
    """uint8 [cameras, height, width, 3]."""
    state: np.ndarray
    """[n] float32, normalised."""
    tokens: np.ndarray
    """[L] int32: the prompt."""
    logprobs: np.ndarray
    """[H, D] float32."""
    values: np.ndarray
    """[V] float32."""
    replay: dict[str, np.ndarray]
    version: int
    actions: np.ndarray
    """[h, D] float32, in the simulator's units: those that are submitted, at most H."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Outputs of one forward pass of the policy for n slots, as numpy arrays."""

    inputs: Inputs
    """On the host."""
    actions: np.ndarray
    """[n, H, D] float32, normalised."""
    logprobs: np.ndarray
    values: np.ndarray
    replay: Mapping[str, np.ndarray]
    version: int

    @classmethod
    def of(cls, acted: Acted, inputs: Inputs, *, version: int) -> Decided:
        return cls(
            inputs=inputs,
            actions=acted.actions.float().cpu().numpy(),
            logprobs=acted.logprobs.float().cpu().numpy(),
            values=acted.values.float().cpu().numpy(),
            replay={name: tensor.cpu().numpy() for name, tensor in acted.replay.items()},
            version=version,
        )

    def decision(self, row: int, *, actions: np.ndarray) -> Decision:
        """Return one slot's decision, with the actions that are submitted."""
        inputs = self.inputs
        return Decision(
            images=inputs.images[row].numpy(),
            state=inputs.state[row].numpy(),
            tokens=inputs.tokens[row][inputs.token_mask[row]].numpy(),
            logprobs=self.logprobs[row],
            values=self.values[row],
            replay={name: array[row] for name, array in self.replay.items()},
            version=self.version,
            actions=actions,
        )


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """Grows by a decision and then by its result."""

    decisions: list[Decision] = field(default_factory=list)
    results: list[ChunkResult] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of simulator steps so far."""
        return sum(result.steps for result in self.results)

    @property
    def success(self) -> bool:
        return any(result.success for result in self.results)

    def rollout(
        self, sampling: VLASampling, *, last_image: np.ndarray | None, last_values: np.ndarray | None
    ) -> Rollout:
        """Return the whole episode.

        Args:
            last_image: uint8 [height, width, 3] of the first camera after the last step; None without cameras.
            last_values: [V] the critic's values there; None if the episode terminated.
        """
        decisions, results = self.decisions, self.results
        valid = np.stack([result.valid for result in results])
        logprobs = np.stack([decision.logprobs for decision in decisions])
        action_dim = logprobs.shape[-1]
        rewards = rewards_of(np.array([r.rewards for r in results], np.float32), valid, steps=sampling.steps)
        values = values_of(np.stack([decision.values for decision in decisions]), valid, steps=sampling.steps)
        following = 0.0 if last_values is None or not len(last_values) else float(last_values[0])
        of_decisions = np.array([decision.version for decision in decisions], np.int32)
        terms = terms_of(logprobs, valid, terms=sampling.terms).astype(np.float32)
        tokens, token_mask = padded([decision.tokens for decision in decisions])
        mask = term_mask(valid, action_dim, terms=sampling.terms)
        video = {}
        if last_image is not None:
            video["video"] = np.stack([*(decision.images[0] for decision in decisions), last_image])
        return Rollout(
            arrays={
                "images": np.stack([decision.images for decision in decisions]),
                "state": np.stack([decision.state for decision in decisions]),
                "tokens": tokens,
                "token_mask": token_mask,
                "valid": valid,
                **{
                    REPLAY + name: np.stack([decision.replay[name] for decision in decisions])
                    for name in decisions[0].replay
                },
            },
            rollout_logprobs=terms,
            versions=np.repeat(of_decisions, len(terms) // len(decisions)),
            loss_mask=mask,
            text=f"{'success' if self.success else 'no success'} in {self.steps} steps",
            finish_reason="stop" if results[-1].terminated else "length",
            media={
                **video,
                "sim_rewards": rewards.astype(np.float32),
                "success": np.array([self.success]),
                **_executed(decisions, results),
            },
            episode=Episode(
                term_steps=term_steps(valid, action_dim, terms=sampling.terms, steps=sampling.steps),
                values=np.append(values, following).astype(np.float32),
                rewards=np.zeros(len(rewards), np.float32),
            ),
        )


def _executed(decisions: Sequence[Decision], results: Sequence[ChunkResult]) -> dict[str, np.ndarray]:
    """Return `actions`, `step_rewards` and `decided_at` of an episode."""
    steps = [result.steps for result in results]
    return {
        "actions": np.concatenate([one.actions[:n] for one, n in zip(decisions, steps)]).astype(np.float32),
        "step_rewards": np.concatenate([result.rewards[: result.steps] for result in results]).astype(np.float32),
        "decided_at": np.cumsum([0, *steps[:-1]], dtype=np.int32),
    }


def padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Pad prompts to one length. Returns tokens [B, L] int32 and their mask [B, L] bool."""
    longest = max(map(len, rows))
    tokens, mask = np.zeros((len(rows), longest), np.int32), np.zeros((len(rows), longest), bool)
    for place, row in enumerate(rows):
        tokens[place, : len(row)], mask[place, : len(row)] = row, True
    return tokens, mask


def padded_result(result: ChunkResult, horizon: int) -> ChunkResult:
    """Pad a chunk that was truncated at the step limit to `horizon`; the padding is not valid."""
    return msgspec.structs.replace(result, rewards=result.rewards + [0.0] * (horizon - len(result.rewards)))


class EpisodeGallery(Gallery):
    """A gallery whose `write` also writes the numbers and every camera of an episode, for `cosmos-rl export-episodes`.

    000003_0.mp4             first camera: a frame for each decision, and the last observation
    000003_0_camera1.mp4     a further camera: a frame for each decision
    000003_0.npz             state [K, n], and of `Rollout.media` the arrays NUMBERS; alone without a camera
    """

    def wants(self, step: int, group: RolloutGroup) -> bool:
        """Not episodes of a simulator without a camera."""
        return super().wants(step, group) and all("video" in rollout.media for rollout in group.rollouts)

    def write(self, stem: Path, group: RolloutGroup, place: int) -> Path:
        """Write an episode to files that begin with `stem`, and return the video of its first camera."""
        rollout = group.rollouts[place]
        images = rollout.arrays["images"]
        for camera in range(1, images.shape[1]):
            seen = replace(rollout, media={"video": images[:, camera]})
            super().write(stem.with_name(f"{stem.name}_camera{camera}"), replace(group, rollouts=(seen,)), 0)
        numbers: dict[str, Any] = {name: rollout.media[name] for name in NUMBERS}
        arrays = stem.with_suffix(".npz")
        np.savez_compressed(arrays, state=rollout.arrays["state"], **numbers)
        if "video" not in rollout.media:
            return arrays
        return super().write(stem, group, place)
