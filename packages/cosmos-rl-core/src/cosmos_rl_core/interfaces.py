"""The seams. A module imports these and `types`, never a sibling stage; each docstring shows who calls it and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from cosmos_rl_core.types import (
    Aggregates,
    LossTerm,
    Microbatch,
    PolicyOutputs,
    Prompt,
    Rollout,
    RolloutGroup,
    Share,
    TermBatch,
    TrainBatch,
    WeightSpec,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from pydantic import BaseModel
    from torch import Tensor, nn

    from cosmos_rl_core.parallel.setup import ModelSetup
    from cosmos_rl_core.parallel.shape import ModelShape


class RolloutEngine(Protocol):
    """Generates with the newest weights it was given. One asyncio loop calls it; the work runs elsewhere.

    rollouts = await engine.generate(prompt, num_samples=8, sampling=sampling, seed=7)   # many at a time
    await engine.switch(version, apply)     # `apply` writes into `engine.weights()` between two terms
    """

    @property
    def version(self) -> int:
        """Policy version the next term will be drawn with."""
        ...

    @property
    def progress(self) -> int:
        """Counts steps of work since the start, for heartbeats: it stands still when the engine hangs."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The live tensors by checkpoint name. Written only by an `apply` given to `switch`."""
        ...

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Any, seed: int
    ) -> tuple[str, list[Rollout]]:
        """Return the prompt as the model saw it and `num_samples` rollouts without rewards.

        sampling: what the domain's [rollout.sampling] builds; `types.Sampling` for terms drawn from a vocabulary.

        Raises `PromptError` for a prompt this engine can never answer (too long, missing column).
        Cancelling the awaiting task frees the running sequences.
        """
        ...

    async def switch(self, version: int, apply: Callable[[], None]) -> None:
        """Run `apply` between two terms; running sequences go on with the new weights. Returns when done."""
        ...

    async def close(self) -> None: ...


class PromptStream(Protocol):
    """Rows in an order that a number tells: the same in every process and after every restart."""

    def __getitem__(self, sample_id: int, /) -> Prompt: ...

    def __len__(self) -> int:
        """Rows of one epoch."""
        ...


class RewardFn(Protocol):
    """Scores a whole group at once, so that relative rewards are no special case.

    May be a plain function or `async def`; returns one finite float a rollout or, of rollouts that are episodes, an
    array [S] with one a step. Anything else is an error of the sample, never a number. What is given for an episode
    as a whole counts for its last step.
    """

    def __call__(self, group: RolloutGroup) -> Sequence[float] | Any: ...


class AdvantageEstimator(Protocol):
    """rewards [G] float64 -> advantages [G] float64."""

    def __call__(self, rewards: np.ndarray) -> np.ndarray: ...


class Objective(Aggregates, Protocol):
    """The loss. Called by the trainer once a microbatch; the trainer aggregates and divides."""

    needs_entropy: bool
    needs_reference: bool

    def __call__(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[list[LossTerm], Mapping[str, Tensor]]:
        """Return the named losses [T] and metrics [T] (per term; the trainer reports means over masked terms)."""
        ...


class MicrobatchLoss(Protocol):
    """The trainer's: outputs of a microbatch -> the scalar to backpropagate. Counts the step's metrics on the way."""

    def __call__(self, outputs: PolicyOutputs, microbatch: Microbatch) -> Tensor: ...


class Reference(Protocol):
    """The frozen model of a KL term. Called without gradients, before the policy's pass over the same microbatch."""

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs: ...


@runtime_checkable
class Prepares(Protocol):
    """A reference that has to be set up for its forward passes, such as by putting other weights in place."""

    def prepared(self) -> AbstractContextManager[None]:
        """Inside, `forward` may be called for as many microbatches as there are; the policy may not."""
        ...


class Policy(Protocol):
    """A trainable model that assigns log-probabilities to terms. All ranks of a replica call it together."""

    @property
    def module(self) -> nn.Module:
        """Holds the parameters that are trained."""
        ...

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs:
        """One microbatch. In a pipeline the ranks before the last stage get outputs that mean nothing.

        Without gradients, nothing stays gathered: the parameters of `module` are this rank's parts afterwards.
        """
        ...

    def forward_backward(self, microbatches: Sequence[Microbatch], *, loss: MicrobatchLoss, with_entropy: bool) -> None:
        """Add the gradients of `loss` over each microbatch; in a pipeline only the last stage calls it.

        `parallel.gradients.accumulate` is this for a policy without a pipeline.
        """
        ...

    def stepped(self, version: int) -> None:
        """Follow the weights after an optimizer step that made `version`: averages of them are updated here."""
        ...

    def second_copies(self) -> Sequence[nn.Parameter]:
        """Parameters of `module` whose gradient another rank counts: a tied matrix on the last stage of a pipeline."""
        ...

    def reference(self) -> Reference | None:
        """What a KL term pulls towards, where this policy can be that: adapters off, its average; None: a new model."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Metrics since the last call beside those of the loss, such as experts' load; the same on every rank."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Live tensors by checkpoint name, tied ones once: what a checkpoint holds, other sets (`contents.SET`) too."""
        ...

    def rollout_weights(self) -> Mapping[str, Tensor]:
        """Those that engines draw with, by the names of their own: `weights`, unless others draw than are trained."""
        ...

    def save_config(self, directory: Path) -> None:
        """Write what loads the model beside its weights: configuration, tokenizer. Called in one rank alone."""
        ...


class Recorder(Protocol):
    """Keeps samples for people to see. Called in a rollout replica with groups that were scored, one at a time."""

    def save(self, step: int, group: RolloutGroup, /) -> object:
        """Write a group drawn with version `step`, unless that has enough of them."""
        ...

    def write(self, stem: Path, group: RolloutGroup, place: int, /) -> Path:
        """Write rollout `place` of a group whole, to `stem` with the suffix of its kind, and return the file."""
        ...

    def close(self) -> None: ...


class SamplingConfig(Protocol):
    """What core asks of a domain's [rollout.sampling]. `build` gives what engine and policy are handed."""

    unit: ClassVar[str]
    """The noun for what `max_terms` counts, in messages."""
    length_key: ClassVar[str]
    """The key that limits the length of a rollout, in messages: "max_tokens"."""

    @property
    def max_terms(self) -> int:
        """Most terms of one rollout, or another measure of its length."""
        ...

    @property
    def least_microbatch_terms(self) -> int:
        """What a microbatch has to hold at least: a whole rollout, where its terms cannot be taken apart."""
        ...

    def build(self) -> Any: ...

    def evaluation(self, *, temperature: float, max_terms: int | None) -> Any:
        """As `build`, for an evaluation, with the keys of [eval]; raises UserError for one it has no use for."""
        ...


@runtime_checkable
class Domain(Protocol):
    """What a domain package hands over. `assemble` asks it for parts and nothing else ever branches on the domain.

    Importing the module that defines it must not import torch: the controller loads it for the configs and the rows.
    """

    name: str
    Model: type[BaseModel]
    """Strict model of the [model] section."""
    Data: type[BaseModel]
    """Strict model of the [data] section; also used for [eval.data] and [data_regularization.data]."""
    Sampling: type[BaseModel]
    """Strict model of [rollout.sampling], a `SamplingConfig`."""

    rewards: Sequence[str]
    """Names `reward` knows, for messages."""
    engines: Sequence[str]
    """Names `build_engine` knows."""

    def load_rows(self, data: Any) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Read the dataset. Returns rows and their origin for messages ("train.jsonl"). Raises UserError."""
        ...

    def build_policy(self, model: Any, *, data: Any, sampling: Any, seed: int, setup: ModelSetup) -> Policy:
        """The model to train. `sampling` says how its terms are drawn, such as at which temperature (None: SFT).

        `setup` says over which ranks it is spread and what it trades for memory; all ranks call this together.
        """
        ...

    def build_engine(self, model: Any, *, data: Any, name: str, options: Mapping[str, Any]) -> RolloutEngine:
        """A rollout engine by the name in [rollout] engine, with the keys of [rollout.options]."""
        ...

    def weight_specs(self, model: Any) -> Sequence[WeightSpec] | None:
        """The weights by name, read without loading them; None where only the built model knows. Raises UserError."""
        ...

    def model_shape(self, model: Any, *, data: Any, sampling: Any) -> ModelShape | None:
        """The sizes that decide how the model can be spread and what it will hold, read without loading it.

        None where only the built model knows. `sampling` says what a term is (None: SFT). Raises as `weight_specs`.
        """
        ...

    def recorder(self, directory: Path, *, name: str, groups: int, every: int) -> Recorder | None:
        """What keeps `groups` groups of each `every`-th version, of replica `name`; None where they are but text."""
        ...

    def reward(self, name: str) -> Callable[..., RewardFn] | None:
        """What makes a reward this domain ships, or None if it has none of that name.

        Called with the reward's options by keyword; raises ValueError (pydantic's included) or TypeError for options
        it does not have: `domain.reward("numeric")(tolerance=0.01)`.
        """
        ...

    def collate(self, groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
        """Groups -> microbatches of at most `microbatch_terms` terms (prompt included); one rollout is never cut.

        The groups' rows are empty: they stay in the controller. What training needs of a row, the engine puts into
        `Rollout.arrays`.

        Returns the microbatches of `share` alone, with the counts of the whole batch; every share has as many.
        """
        ...

    def collate_sft(
        self, prompts: Sequence[Prompt], *, data: Any, policy: Any, microbatch_terms: int, share: Share
    ) -> TrainBatch:
        """Rows of the section `data` -> microbatches with a loss_mask over the wanted answers, as `collate`; what is
        drawn at random for a row follows from its `sample_id`, so that a run that is resumed draws the same.
        """
        ...

    def export_weights(
        self, model: Any, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
    ) -> Iterable[tuple[str, Tensor]]:
        """Turn the weights of a checkpoint, by `Policy.weights` name, into those other programs load, one by one.

        `merge_adapters` asks for whole weights where adapters were trained; false for the adapters as they are.
        """
        ...
