"""The network, policy and collation behind `testing.tiny`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import MicrobatchLoss
from cosmos_rl_core.parallel.axes.fsdp import reshard, shard_fully
from cosmos_rl_core.parallel.device import lent_random_state
from cosmos_rl_core.parallel.gradients import accumulate
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.testing.tiny_task import TinyModel, wanted
from cosmos_rl_core.train.balance import deal
from cosmos_rl_core.types import (
    Microbatch,
    PolicyOutputs,
    Prompt,
    Rollout,
    RolloutGroup,
    Share,
    TermBatch,
    TrainBatch,
)

PLACES = 16
"""Longest rollout the network tells places apart in."""


class TinyNetwork(nn.Module):
    """(context, place) -> logits over actions."""

    def __init__(self, *, contexts: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.actions = actions
        self.context = nn.Embedding(contexts, hidden)
        self.place = nn.Embedding(PLACES, hidden)
        self.out = nn.Linear(hidden, actions)

    def forward(self, contexts: Tensor, places: Tensor) -> Tensor:
        return self.out(torch.tanh(self.context(contexts) * self.place(places)))


def build_network(model: TinyModel) -> TinyNetwork:
    with lent_random_state(seed=model.seed):
        return TinyNetwork(contexts=model.contexts, actions=model.actions, hidden=model.hidden)


class TinyPolicy:
    """Implements `interfaces.Policy`. inputs: `contexts`, `places`, `actions`, each [T] int64."""

    def __init__(self, model: TinyModel, *, temperature: float, setup: ModelSetup) -> None:
        """Raises UserError for axes of `setup.mesh` other than dp_replicate and dp_shard."""
        self.module = build_network(model)
        self.actions = model.actions
        self._temperature = temperature
        if setup.mesh is not None:
            _shard(self.module, setup.mesh, setup)

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs:
        inputs = microbatch.inputs
        logits = self.module(inputs["contexts"], inputs["places"]) / self._temperature
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None
        if not torch.is_grad_enabled():
            reshard(self.module)  # no backward pass follows that would
        return PolicyOutputs(logprobs=logprobs.gather(-1, inputs["actions"][:, None])[:, 0], entropy=entropy)

    def forward_backward(self, microbatches: Sequence[Microbatch], *, loss: MicrobatchLoss, with_entropy: bool) -> None:
        accumulate(self, microbatches, loss=loss, with_entropy=with_entropy)

    def stepped(self, version: int) -> None:
        pass

    def second_copies(self) -> Sequence[nn.Parameter]:
        return ()

    def reference(self) -> None:
        return None

    def figures(self) -> Mapping[str, float]:
        return {}

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self.module.named_parameters())

    def rollout_weights(self) -> Mapping[str, Tensor]:
        """The trained ones."""
        return self.weights()

    def save_config(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"actions": self.actions}) + "\n")


def _shard(network: TinyNetwork, mesh: ReplicaMesh, setup: ModelSetup) -> None:
    if mesh.dims.num_shares != mesh.dims.world_size:
        raise UserError(
            f"[policy.parallel] {mesh.dims.describe()}: the tiny domain is spread over dp_replicate and dp_shard alone"
        )
    shard_fully(network, blocks=(), mesh=mesh, parallel=setup.parallel, memory=setup.memory, precision=setup.precision)


@torch.no_grad()
def draw_place(
    network: TinyNetwork,
    context: int,
    place: int,
    rng: np.random.Generator,
    *,
    num_samples: int,
    temperature: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one action for each sample. Returns actions [G] and their log-probabilities [G]."""
    logits = network(torch.tensor([context]), torch.tensor([place]))[0]
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1).numpy()
    if temperature == 0.0:
        actions = np.full(num_samples, logprobs.argmax())
    else:
        cumulative = np.exp(logprobs.astype(np.float64)).cumsum()
        actions = np.minimum(np.searchsorted(cumulative, rng.random(num_samples)), len(logprobs) - 1)
    return actions.astype(np.int32), logprobs[actions].astype(np.float32)


def rollouts_of(
    actions: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    versions: Sequence[int],
    *,
    context: int,
    num_actions: int,
) -> list[Rollout]:
    """Turn what was drawn place by place, each [G], into G rollouts."""
    return [
        Rollout(
            arrays={
                "actions": np.array([a[g] for a in actions]),
                "context": np.array(context, np.int32),
                "num_actions": np.array(num_actions, np.int32),
            },
            rollout_logprobs=np.array([lp[g] for lp in logprobs], np.float32),
            versions=np.array(versions, np.int32),
            loss_mask=np.ones(len(actions), np.bool_),
            text=" ".join(str(a[g]) for a in actions),
        )
        for g in range(len(actions[0]))
    ]


EMPTY = Rollout(
    arrays={"actions": np.zeros(1, np.int32), "context": np.array(0, np.int32)},
    rollout_logprobs=np.zeros(1, np.float32),
    versions=np.zeros(1, np.int32),
    loss_mask=np.zeros(1, np.bool_),
)
"""Trains nothing: for a rank that has no more rollouts while others do."""


def collate(groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    dealt = deal([r.num_terms for r in rollouts], capacity=microbatch_terms, share=share)
    return TrainBatch(
        microbatches=tuple(_microbatch([rollouts[index] for index in members] or [EMPTY]) for members in dealt),
        num_terms=sum(int(r.loss_mask.sum()) for r in rollouts),
        num_rollouts=sum(bool(r.loss_mask.any()) for r in rollouts),
    )


def _microbatch(rollouts: Sequence[Rollout]) -> Microbatch:
    lengths = torch.tensor([r.num_terms for r in rollouts])
    terms = TermBatch(
        rollout_logprobs=torch.from_numpy(np.concatenate([r.rollout_logprobs for r in rollouts])),
        advantages=torch.tensor([r.advantage for r in rollouts], dtype=torch.float32).repeat_interleave(lengths),
        loss_mask=torch.from_numpy(np.concatenate([r.loss_mask for r in rollouts]).astype(np.float32)),
        rollout_index=torch.arange(len(rollouts)).repeat_interleave(lengths),
        num_rollouts=len(rollouts),
    )
    inputs = {
        "contexts": torch.tensor([int(r.arrays["context"]) for r in rollouts]).repeat_interleave(lengths),
        "places": torch.cat([torch.arange(int(n)) for n in lengths]),
        "actions": torch.from_numpy(np.concatenate([r.arrays["actions"] for r in rollouts]).astype(np.int64)),
    }
    return Microbatch(inputs=inputs, terms=terms)


def collate_answers(
    rows: Sequence[Mapping[str, Any]], *, actions: int, length: int, microbatch_terms: int, share: Share
) -> TrainBatch:
    """Rows -> the wanted actions as targets."""
    groups = []
    for row in rows:
        answer = np.array([wanted(row["context"], place, actions=actions) for place in range(length)], np.int32)
        zeros = np.zeros(length, np.float32)
        rollout = Rollout(
            arrays={"actions": answer, "context": np.array(row["context"], np.int32)},
            rollout_logprobs=zeros,
            versions=np.zeros(length, np.int32),
            loss_mask=np.ones(length, np.bool_),
        )
        groups.append(_group(row, rollout))
    return collate(groups, microbatch_terms=microbatch_terms, share=share)


def _group(row: Mapping[str, Any], rollout: Rollout) -> RolloutGroup:
    return RolloutGroup(prompt=Prompt(sample_id=0, row=row), rollouts=(rollout,))
