"""The data of a run: prompts, rollouts, groups, batches, results.

Dimension letters: P prompts, G rollouts of a group, T terms, V vocabulary. A *term* is the unit a policy assigns a
log-probability to: a token (llm), an action dimension or chunk (vla), a denoising step (wfm).

Everything before the trainer is numpy, so that the controller and the wire never import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:  # the controller reads this module and must stay free of torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the prompt stream."""

    sample_id: int
    """Position in the prompt stream (epoch * rows + index in the epoch); unique within a run."""
    row: Mapping[str, Any]
    """The dataset's row, JSON-like."""
    origin: str = ""
    """Location of the row, for messages: "train.jsonl:17"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of an engine. `temperature = 0` is greedy."""

    max_terms: int
    """Maximum terms of one rollout."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    repetition_penalty: float = 1.0
    """Of tokens that the sequence has already: positive logits are divided by it, negative ones multiplied."""
    renormalise: bool = True
    """Whether log-probabilities are among the tokens that `top_p` and `top_k` keep, instead of all."""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Rewards and values of the S steps of a rollout, such as the decisions of a robot's policy."""

    term_steps: np.ndarray
    """[T] int32: the step each term belongs to, 0 .. S - 1, non-decreasing."""
    values: np.ndarray
    """[S + 1] float32: the critic's estimate before each step and after the last. The last is 0 if the episode ended,
    and the estimate of the remaining return if it was truncated. Zeros without a critic."""
    rewards: np.ndarray
    """[S] float32, weighted and summed over the reward functions."""
    advantages: np.ndarray | None = None
    """[S] float32; None until they are estimated."""
    returns: np.ndarray | None = None
    """[S] float32: the critic's target, advantage + value."""

    @property
    def num_steps(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model asks to be called."""

    name: str
    arguments: Mapping[str, Any]
    """JSON-like, by parameter."""
    id: str = ""
    """Name of the call in the messages of a client; the model need not have written one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The terms that the model sampled between two observations of an episode, and what they say."""

    terms: np.ndarray
    """[n] int32, the stop token included."""
    logprobs: np.ndarray
    """[n] float32, as `Rollout.rollout_logprobs`."""
    versions: np.ndarray
    """[n] int32, as `Rollout.versions`."""
    finish_reason: FinishReason
    """"length": cut by a limit, without a stop token."""
    text: str = ""
    """Its words, without thoughts and calls. Set by `Continuation.parse`, as all that follows."""
    reasoning: str = ""
    """Its thoughts, where the model marks them."""
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""
    """Why a part of it that looks like a call is none; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A turn of an episode and the environment's answer, for rewards, files and pages."""

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    problem: str = ""
    """As those of `Turn`."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The environment's answer: JSON-like chat messages."""
    reward: float | None = None
    """The environment's for this turn; None: it gave none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's."""
    branch: int = 0
    """Number of the history that the turn continues: 0, and one more each time that it was rewritten."""
    model_s: float = 0.0
    environment_s: float = 0.0
    """Seconds until the turn was sampled, and until the environment had answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One generated answer, episode or trajectory of T terms, with all data to train on it."""

    arrays: Mapping[str, np.ndarray]
    """The domain's own data. llm: `prompt_tokens` [prompt] int32 and `tokens` [T] int32."""
    rollout_logprobs: np.ndarray
    """[T] float32: log-probability under the distribution that the engine sampled from, at the term's version."""
    versions: np.ndarray
    """[T] int32: policy version that produced each term."""
    loss_mask: np.ndarray
    """[T] bool: terms that are trained on."""
    text: str = ""
    """Readable form for files and rewards."""
    media: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Inputs of rewards beside the text, such as `video` uint8 [frames, height, width, 3]. They stay in the process
    that made them: they are neither sent nor trained on."""
    finish_reason: FinishReason = "stop"
    reward: float = 0.0
    """Weighted sum of `reward_breakdown`, after shaping."""
    reward_breakdown: Mapping[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    """Advantage of the whole rollout; if an episode has advantages for its steps, training uses those instead."""
    episode: Episode | None = None
    """Steps with rewards of their own; None where only the whole rollout has a reward."""
    exchanges: tuple[Exchange, ...] = ()
    """The turns of an episode with an environment, one for each step; empty for an answer of one turn."""

    @property
    def num_terms(self) -> int:
        return len(self.rollout_logprobs)

    @property
    def term_advantages(self) -> np.ndarray:
        """[T] float32: the advantage each term is trained with."""
        if self.episode is None or self.episode.advantages is None:
            return np.full(self.num_terms, self.advantage, np.float32)
        return self.episode.advantages[self.episode.term_steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """The G rollouts of one prompt: the unit of leases, rewards, advantages and batches."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    prompt_text: str = ""
    """The prompt as the model saw it."""
    media: Mapping[str, str] = field(default_factory=dict)
    """Locations of the prompt's pictures and videos by their names in `Rollout.media`, for files."""

    @property
    def min_policy_version(self) -> int:
        return min(int(r.versions.min()) for r in self.rollouts if r.num_terms)

    @property
    def max_policy_version(self) -> int:
        return max(int(r.versions.max()) for r in self.rollouts if r.num_terms)

    @property
    def num_terms(self) -> int:
        return sum(r.num_terms for r in self.rollouts)

    @property
    def mean_reward(self) -> float:
        return sum(float(r.reward) for r in self.rollouts) / len(self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermBatch:
    """The inputs of every loss, over the concatenated T terms of a microbatch."""

    rollout_logprobs: Tensor
    """[T] float32."""
    advantages: Tensor
    """[T] float32: the rollout's advantage on each of its terms, or one value a term."""
    loss_mask: Tensor
    """[T] float32, 0 or 1."""
    rollout_index: Tensor
    """[T] int64: which rollout of the microbatch a term belongs to, 0 .. num_rollouts - 1, non-decreasing."""
    num_rollouts: int
    ref_logprobs: Tensor | None = None
    """[T] float32 under the frozen reference, where the objective has a KL term."""
    ref_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """`PolicyOutputs.tensors` of that reference."""
    teacher: Mapping[str, Tensor] = field(default_factory=dict)
    """[T, ...] by name: outputs of the frozen teacher, where there is one. `logprobs` and `agreement` [T] float32, with
    loss = "advantage"; else the domain's own."""
    old_logprobs: Tensor | None = None
    """[T] float32 under the policy at the start of the step, where later updates of the step need it."""
    high_entropy: Tensor | None = None
    """[T] float32, 0 or 1: terms with the highest entropies of the step, under the policy at its start; None: all are
    trained on alike."""
    values: Tensor | None = None
    """[T] float32: the critic's estimate when the rollout was made, for the step each term belongs to."""
    returns: Tensor | None = None
    """[T] float32: the critic's target for that step."""
    rollout_terms: Tensor | None = None
    """[num_rollouts] float32: trained terms of each rollout in the whole batch, where a rollout may be cut into several
    microbatches; None: every rollout is whole here."""
    preference: Tensor | None = None
    """[num_rollouts] float32, in preference training: above 0 for a chosen answer, below 0 for a rejected one, 0 for
    padding. Its size is the number of rollouts of the whole batch over that of its kind, 2 in pairs. The i-th chosen
    and the i-th rejected answer of a microbatch are a pair."""
    margins: Tensor | None = None
    """[num_rollouts] float32: how much better a pair's chosen answer is, the same for both; beside `preference`."""
    rollout_keys: Tensor | None = None
    """[num_rollouts] int64: the same for a row's answer in every epoch; beside `preference`."""
    ref_sums: Tensor | None = None
    """[num_rollouts] float32: log-probability of each answer under the frozen reference, summed over its trained terms;
    beside `preference`, where the objective needs a reference."""
    baseline: Tensor | None = None
    """[] float32: mean log-ratio of policy and reference over `TrainBatch.mismatched`, at least 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """The input of one forward and backward pass."""

    inputs: Mapping[str, Any]
    """The domain's tensors for the policy's forward pass. llm: `tokens`, `positions`, ... of packed sequences."""
    terms: TermBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The microbatches of one optimizer update, with the global counts that losses are divided by."""

    microbatches: tuple[Microbatch, ...]
    """Those of this rank's share; every share has the same number."""
    num_terms: int
    """Terms with loss_mask = 1 over the whole batch, all ranks."""
    num_rollouts: int
    """Rollouts with at least one such term over the whole batch, all ranks."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    rows_dropped: tuple[str, ...] = ()
    """Reasons why rows train nothing, a phrase each; a row that an earlier batch reported may be left out."""
    mismatched: tuple[Microbatch, ...] = ()
    """Answers after prompts of other rows, of this rank's share: not trained on, measured for `TermBatch.baseline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """One step of training: its batches, and the optimizer updates that are made with them."""

    batches: tuple[TrainBatch, ...]
    """Each once: PPO's minibatches, or the only batch of the step."""
    updates: tuple[int, ...] = (0,)
    """The batch of each update, in order; every epoch trains on all of them."""
    data_term: TrainBatch | None = None
    """Supervised data that every update trains on beside its batch, with counts of its own."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the step, beside those of its batches and updates."""

    @property
    def rows_dropped(self) -> tuple[str, ...]:
        """Those of all batches, and of the supervised data."""
        data_term = () if self.data_term is None else (self.data_term,)
        return tuple(reason for batch in (*self.batches, *data_term) for reason in batch.rows_dropped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a batch that one rank trains on. Ranks that hold parts of the same samples have the same share."""

    index: int = 0
    """0 .. count - 1."""
    count: int = 1
    """Parts the batch is cut into."""
    multiple: int = 1
    """The number of microbatches of a share is a multiple of this, as some pipeline schedules require."""

    def of_replica(self, place: int, count: int) -> Share:
        """Return the part of the batch where `count` policy replicas train on it, in the replica at `place`."""
        return replace(self, index=place * self.count + self.index, count=count * self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutputs:
    """A policy's forward pass over a microbatch."""

    logprobs: Tensor
    """[T] float32 with gradient: log-probability of each term at the sampling temperature."""
    entropy: Tensor | None = None
    """[T] float32 with gradient, where requested."""
    values: Tensor | None = None
    """[T] float32 with gradient: the critic's estimate for the step each term belongs to; None without a critic."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """[T, ...] by name: further inputs of the domain's own objectives. `whitened` [T, D], where a term is a Gaussian:
    its mean, scaled so that half the squared distance of two of them is the KL divergence; `dt` [T], where it is a
    denoising step: the step's length in time, above 0."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """[T] by name, reported as metrics: components of a loss, such as those of an auxiliary head."""


class Aggregates(ABC):
    """Reduces values of terms to one number: sum_t weight_t value_t / normalizer."""

    __slots__ = ()

    @abstractmethod
    def term_weights(self, terms: TermBatch) -> Tensor:
        """Return the weight [T] of each term in the sum, from the mask and the rollouts' lengths."""

    @abstractmethod
    def normalizer(self, batch: TrainBatch) -> float:
        """Return the global count that the weighted sum over all microbatches and ranks is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """A named part of the objective before aggregation."""

    name: str
    values: Tensor
    """[T]: loss of each term; masked terms are ignored by the aggregation."""
    coef: float = 1.0
    aggregation: Aggregates | None = None
    """Reduces `values` to one number; None: the objective's own aggregation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step."""

    policy_version: int
    """Version after the step."""
    metrics: Mapping[str, float]
    skipped: bool = False
    """True when the gradient was not finite and the weights were not changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """A tensor in checkpoint coordinates."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: "float32", "bfloat16"."""
