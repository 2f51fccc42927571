"""Converts rollouts and real clips to microbatches of denoising steps, one forward pass a term.

    coupled     a denoising step of a rollout   states, next_states, times, next_times
    decoupled   clean latents, noised again     clean, noise, times

A group's caption is the same for all its rollouts and is stored in the first. Terms with the same caption share one
copy of it over all microbatches of a batch; `text_rows` maps terms to captions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from cosmos_rl_core.train.balance import deal
from cosmos_rl_core.types import Microbatch, Rollout, RolloutGroup, Share, TermBatch, TrainBatch
from cosmos_rl_wfm.samplers.sampler import sample_noise

if TYPE_CHECKING:
    from torch import Tensor

CONDITION = ("text", "text_mask", "pooled", "image", "given", "given_mask")
"""Arrays of a rollout with its condition: the fields of `models.base.Condition` without the batch dimension."""

CAPTION = ("text", "text_mask")
"""Arrays of the condition that a microbatch holds once for all terms that share them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term, ready to be stacked."""

    inputs: Mapping[str, np.ndarray]
    """Inputs of the policy's forward pass, without [T]. Terms share a caption where it is the same object."""
    rollout: int
    """Index of its rollout in the batch."""
    logprob: float = 0.0
    advantage: float = 0.0
    trained: bool = True
    of_rollout: int = 1
    """Trained terms of that rollout."""


def collate(groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
    """Cut the rollouts of groups that have advantages into microbatches; return those of `share`."""
    terms: list[Term] = []
    number = 0
    for group in groups:
        condition = condition_of(group.rollouts[0])
        for rollout in group.rollouts:
            terms += _terms(rollout, condition, number)
            number += 1
    shapes = [np.shape(term.inputs["states" if "states" in term.inputs else "clean"]) for term in terms]
    places = deal_alike(shapes, microbatch_terms=microbatch_terms, share=share)
    return TrainBatch(
        microbatches=stack(dict(enumerate(terms)), places),
        num_terms=sum(term.trained for term in terms),
        num_rollouts=len({term.rollout for term in terms if term.trained}),
    )


def condition_of(first: Rollout) -> dict[str, np.ndarray]:
    """Return the arrays of a group's first rollout that all of them share."""
    return {name: first.arrays[name] for name in CONDITION if name in first.arrays}


@dataclass(frozen=True, slots=True)
class Places:
    """The terms of a batch that form one microbatch."""

    members: tuple[int, ...]
    """Their indices in the batch; empty where this rank has no terms left while others do."""
    shape_of: int
    """Index of a term of the same shape, for a pass that trains nothing."""

    @property
    def needed(self) -> tuple[int, ...]:
        """Indices of the terms whose inputs the pass takes."""
        return self.members or (self.shape_of,)


def deal_alike(shapes: Sequence[tuple[int, ...]], *, microbatch_terms: int, share: Share) -> list[Places]:
    """Deal terms with latents of these shapes over ranks and microbatches, each of one shape; return those of `share`.

    Every share has the same number, with the same shapes in the same order.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(place)
    return [
        Places(tuple(places[i] for i in members), places[0])
        for places in alike.values()
        for members in deal([1] * len(places), capacity=microbatch_terms, share=share)
    ]


def stack(terms: Mapping[int, Term], dealt: Sequence[Places]) -> tuple[Microbatch, ...]:
    """Stack the terms of a share, by their index in the batch, into its microbatches."""
    captions = _Captions()
    return tuple(
        _microbatch([terms[i] for i in places.members] or [_idle(terms[places.shape_of])], captions) for places in dealt
    )


def _terms(rollout: Rollout, condition: Mapping[str, np.ndarray], number: int) -> list[Term]:
    inputs = _steps(rollout) if "path" in rollout.arrays else _noised(rollout)
    return [
        Term(
            inputs={**each, **condition},
            rollout=number,
            logprob=float(rollout.rollout_logprobs[place]),
            advantage=rollout.advantage,
            trained=bool(rollout.loss_mask[place]),
            of_rollout=int(rollout.loss_mask.sum()),
        )
        for place, each in enumerate(inputs)
    ]


def _steps(rollout: Rollout) -> list[dict[str, np.ndarray]]:
    arrays = rollout.arrays
    path = arrays["path"]
    rows = zip(arrays["path_from"], arrays["path_to"], arrays["times"], arrays["next_times"], strict=True)
    return [
        {"states": path[before], "next_states": path[after], "times": time, "next_times": next_time}
        for before, after, time, next_time in rows
    ]


def _noised(rollout: Rollout) -> list[dict[str, np.ndarray]]:
    arrays = rollout.arrays
    clean = arrays["clean"]
    noise = sample_noise([int(seed) for seed in arrays["noise_seeds"]], clean.shape, stream="train").numpy()
    return [{"clean": clean, "noise": noise[place], "times": time} for place, time in enumerate(arrays["times"])]


def _idle(term: Term) -> Term:
    """A term that trains nothing, for a rank that has no terms left while others do."""
    return Term(inputs=term.inputs, rollout=0, trained=False)


class _Captions:
    """Converts the captions of a batch to tensors, each once."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def inputs(self, terms: Sequence[Term]) -> dict[str, Tensor]:
        """Return the captions of terms, [U, ...], and `text_rows` [T] where some share one."""
        distinct = {id(term.inputs["text"]): term.inputs for term in terms}
        inputs = {name: self._stacked([each[name] for each in distinct.values()]) for name in CAPTION}
        if len(distinct) < len(terms):
            row = {caption: row for row, caption in enumerate(distinct)}
            inputs["text_rows"] = torch.tensor([row[id(term.inputs["text"])] for term in terms])
        return inputs

    def _stacked(self, arrays: Sequence[np.ndarray]) -> Tensor:
        for array in arrays:
            if id(array) not in self._tensors:
                self._tensors[id(array)] = torch.tensor(array)
        one, *others = (self._tensors[id(array)] for array in arrays)
        return torch.stack([one, *others]) if others else one[None]


def _microbatch(terms: Sequence[Term], captions: _Captions) -> Microbatch:
    numbers = {number: place for place, number in enumerate(dict.fromkeys(term.rollout for term in terms))}
    lengths = {term.rollout: float(term.of_rollout) for term in terms}
    own = [name for name in terms[0].inputs if name not in CAPTION]
    return Microbatch(
        inputs={name: _stacked([term.inputs[name] for term in terms]) for name in own} | captions.inputs(terms),
        terms=TermBatch(
            rollout_logprobs=torch.tensor([term.logprob for term in terms]),
            advantages=torch.tensor([term.advantage for term in terms]),
            loss_mask=torch.tensor([float(term.trained) for term in terms]),
            rollout_index=torch.tensor([numbers[term.rollout] for term in terms]),
            num_rollouts=len(numbers),
            rollout_terms=torch.tensor([lengths[number] for number in numbers]),
        ),
    )


def _stacked(arrays: Sequence[np.ndarray]) -> Tensor:
    """[T, ...], a copy, since received arrays are read-only."""
    return torch.from_numpy(np.stack(arrays))
