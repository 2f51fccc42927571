"""The interfaces between stages. A stage imports these and `types`, never another stage; docstrings show the calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

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
)

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel
    from torch import Tensor, nn

    from cosmos_rl_core.parallel.setup import ModelSetup


class RolloutEngine(Protocol):
    """Generates rollouts with its current weights.

        rollouts = await engine.generate(prompt, num_samples=8, sampling=sampling, seed=7)   # many at a time
        await engine.switch(version, apply)     # `apply` writes into `engine.weights()` between two terms

    One asyncio loop calls it; the work runs in a thread or process.
    """

    @property
    def version(self) -> int:
        """Policy version that the next term will be sampled with."""
        ...

    @property
    def progress(self) -> int:
        """Steps of work since the start, for heartbeats. Monotonic; it stops increasing if the engine hangs."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The live tensors by checkpoint name. Written only by an `apply` given to `switch`."""
        ...

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Any, seed: int
    ) -> tuple[str, list[Rollout]]:
        """Return the prompt as the model saw it and `num_samples` rollouts without rewards.

        sampling: built by the domain's [rollout.sampling]; `types.Sampling` for terms sampled from a vocabulary.

        Raises `PromptError` for a prompt this engine can never answer (too long, missing column).
        Cancelling the awaiting task frees the running sequences.
        """
        ...

    async def switch(self, version: int, apply: Callable[[], None]) -> None:
        """Run `apply` between two terms; running sequences continue with the new weights. Returns when done.

        A ConnectionError of `apply` is raised: the publisher was lost, and the weights may be of two versions. No term
        is sampled until the next switch.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Sleeps(RolloutEngine, Protocol):
    """An engine that frees the memory of its GPUs while the policy uses them, for [run] colocate.

    await engine.sleep()        # no rollout in work
    ...
    await engine.wake()         # with the weights from before
    """

    async def sleep(self) -> None:
        """Drop keys and values of past prompts, and move the weights to host memory."""
        ...

    async def wake(self) -> None: ...


@runtime_checkable
class HasCapacity(Protocol):
    """An engine with a fixed capacity, such as a number of simulators."""

    @property
    def rows_at_once(self) -> int:
        """Number of concurrent rows, of one rollout each, at full capacity."""
        ...


class RewardFn(Protocol):
    """Scores a whole group at once, which includes relative rewards.

    May be a plain function or `async def`; returns one finite float per rollout or, for rollouts that are episodes, an
    array [S] with one per step. Any other value is an error of the sample, never a reward. A single float for an
    episode counts for its last step. The checks before a run call it once, unless it has an attribute `loads_model`.
    One with a true attribute `own_process` is built and called in a process that is killed when it takes too long.
    """

    def __call__(self, group: RolloutGroup) -> Sequence[float] | Any: ...


class Objective(Aggregates):
    """The loss. Called by the trainer once a microbatch; the trainer aggregates and divides."""

    needs_entropy: bool = False
    needs_reference: bool = False
    top_entropy: float | None = None
    """Share of a step's terms, those of the highest entropy, that `TermBatch.high_entropy` marks; None: it is None."""
    state: tuple[float, ...] = ()
    """Numbers that steps change, such as an adapted coefficient: equal in all ranks, saved in checkpoints."""
    rollout_metrics: bool = False
    """Whether its metrics have one value a rollout, and the trainer reports their means over rollouts."""
    aggregation: Aggregates
    """Reduces the values of terms to one number, unless a loss has an aggregation of its own."""

    @abstractmethod
    def __call__(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[list[LossTerm], Mapping[str, Tensor]]:
        """Return the named losses [T] and metrics [T] (per term; the trainer reports means over masked terms)."""

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a committed step with trained terms, equal in all ranks, and change `state`."""

    def term_weights(self, terms: TermBatch) -> Tensor:
        return self.aggregation.term_weights(terms)

    def normalizer(self, batch: TrainBatch) -> float:
        return self.aggregation.normalizer(batch)


MicrobatchLoss = Callable[[PolicyOutputs, Microbatch], "Tensor"]
"""The trainer's callback: outputs of a microbatch -> the scalar to backpropagate; adds to the step's metrics."""


class Reference(Protocol):
    """The frozen model of a KL term. Called without gradients, before the policy's pass over the same microbatch.

    Derive from it for the defaults: nothing to set up, no tensors beside those of the policy.
    """

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs: ...

    def prepared(self) -> AbstractContextManager[None]:
        """Set it up, such as by swapping in other weights. Inside, `forward` may be called for any number of
        microbatches; the policy's may not."""
        return nullcontext()

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor that it keeps between steps: parameters, buffers, averages, frozen encoders; no gradients.

        With [run] colocate they leave the GPU between turns. One may appear several times. Averages that were not made
        yet are left out.
        """
        return ()


class Teacher(Protocol):
    """The frozen model of [teacher]. Called as a reference is; it reads the policy's inputs."""

    module: nn.Module

    def forward(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Return `TermBatch.teacher` of the microbatch."""
        ...

    def tensors(self) -> Iterable[Tensor]:
        """As of a `Reference`."""
        ...


class Policy(Reference, Protocol):
    """A trainable model that assigns log-probabilities to terms. All ranks of a replica call it together."""

    @property
    def module(self) -> nn.Module:
        """Holds the parameters that are trained."""
        ...

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs:
        """One microbatch. In a pipeline the outputs are valid on the last stage alone.

        Without gradients the parameters of `module` are resharded afterwards.
        """
        ...

    def forward_backward(self, microbatches: Sequence[Microbatch], *, loss: MicrobatchLoss, with_entropy: bool) -> None:
        """Add the gradients of `loss` over each microbatch; in a pipeline only the last stage calls it.

        `parallel.gradients.accumulate` implements it for a policy without a pipeline.
        """
        ...

    def stepped(self, version: int) -> None:
        """Called after the optimizer step that made `version`: updates averages of the weights."""
        ...

    def second_copies(self) -> Sequence[nn.Parameter]:
        """Parameters that another rank counts in the gradient norm: a tied matrix on the last pipeline stage."""
        ...

    def reference(self) -> Reference | None:
        """The reference of a KL term, where the policy provides it: adapters off, its average; None: a second model."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Metrics since the last call beside those of the loss, such as experts' load; the same on every rank."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Live tensors of a checkpoint by name, tied ones once, with further sets of weights (`contents.SET`)."""
        ...

    def rollout_weights(self) -> Mapping[str, Tensor]:
        """Weights that engines sample with, by the engine's names: a subset of `weights`, or an average of them."""
        ...

    def before_publish(self) -> None:
        """Called in all ranks before `rollout_weights` are published, while parameters are on their device."""
        ...

    def save_config(self, directory: Path) -> None:
        """Write the files to load the model with, beside its weights: configuration, tokenizer. Called in one rank."""
        ...


class Recorder(Protocol):
    """Saves samples for people to view. Called in a rollout replica with one scored group at a time."""

    of_rollouts: bool
    """Whether rollouts are images or videos, which `write` writes; false: they are text about those of the prompt."""

    def wants(self, step: int, group: RolloutGroup, /) -> bool:
        """Whether `save` would write this group. Called in the event loop: it must not take time."""
        ...

    def save(self, step: int, group: RolloutGroup, /) -> object:
        """Write a group, unless `wants` is false. Called in a thread. step: policy version that sampled the group."""
        ...

    def write(self, stem: Path, group: RolloutGroup, index: int, /) -> Path:
        """Write all of rollout `index` of a group to `stem` with the suffix of its kind, and return the file."""
        ...

    def close(self) -> None: ...


class SamplingConfig(Protocol):
    """The part of a domain's [rollout.sampling] that core reads. `build` makes the `sampling` of engine and policy."""

    unit: ClassVar[str]
    """Noun for the unit of `max_terms`, in messages."""
    length_key: ClassVar[str]
    """The key that limits the length of a rollout, in messages: "max_tokens"."""

    @property
    def max_terms(self) -> int:
        """Maximum terms of one rollout, or another measure of its length."""
        ...

    @property
    def least_microbatch_terms(self) -> int:
        """Minimum of `microbatch_terms`: a whole rollout, where its terms cannot be split over microbatches."""
        ...

    def build(self) -> Any: ...

    def evaluation(self, *, temperature: float, max_terms: int | None) -> Any:
        """As `build`, for an evaluation, with the keys of [eval]; raises UserError for a key that does not apply."""
        ...


Level = Literal["ok", "note", "bad"]


class Check(NamedTuple):
    """A line of a diagnosis, by `cosmos-rl doctor`: a level, a name, an observation and a remedy."""

    level: Level
    """note: works, with a limit that may matter. bad: runs fail, or are slow, because of it."""
    name: str
    text: str
    fix: str = ""
    """The remedy, for a note or a bad line."""


class Domain(ABC):
    """The interface of a domain package. `assemble` builds a run's parts with it; no other code depends on it.

    Write one as a `domain_base.DomainBase`, which has the rest. Importing the module that defines it must not import
    torch: the controller loads it for the configs and the rows.
    """

    name: str
    Model: type[BaseModel]
    """Strict model of the [model] section."""
    Data: type[BaseModel]
    """Strict model of the [data] section; also used for [eval.data] and [data_regularization.data]."""
    Sampling: type[BaseModel]
    """Strict model of [rollout.sampling], a `SamplingConfig`."""
    engines: Sequence[str]
    """Names that `build_engine` accepts."""

    @abstractmethod
    def load_rows(self, data: Any) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Read the dataset. Returns rows and their origin for messages ("train.jsonl"). Raises UserError."""

    @abstractmethod
    def build_policy(self, model: Any, *, data: Any, sampling: Any, seed: int, setup: ModelSetup) -> Policy:
        """The model to train. `sampling`: how engines sample its terms, such as the temperature (None: SFT).

        `setup`: the mesh it is sharded over, and options for memory and precision. All ranks call this together.
        """

    @abstractmethod
    def build_engine(self, model: Any, *, data: Any, name: str, options: Mapping[str, Any]) -> RolloutEngine:
        """A rollout engine by the name in [rollout] engine, with the keys of [rollout.options]."""

    @abstractmethod
    def collate(self, groups: Sequence[RolloutGroup], *, microbatch_terms: int, share: Share) -> TrainBatch:
        """Groups -> microbatches of at most `microbatch_terms` terms (prompt included); one rollout is never cut.

        The groups' rows are empty: they stay in the controller. The engine puts the columns that training needs into
        `Rollout.arrays`.

        Returns the microbatches of `share` alone, with the counts of the whole batch; every share has the same number.
        """

    @abstractmethod
    def collate_sft(
        self, prompts: Sequence[Prompt], *, data: Any, policy: Any, microbatch_terms: int, share: Share
    ) -> TrainBatch:
        """Rows of the section `data` -> microbatches with a loss_mask over the target terms, as `collate`. Random
        choices for a row are seeded by its `sample_id`, so that a resumed run makes the same ones.
        """
