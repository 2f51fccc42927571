"""Optional abilities of a domain beyond `interfaces.Domain`; callers check for them with isinstance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from cosmos_rl_core.algorithms.config import TeacherSection
    from cosmos_rl_core.interfaces import Teacher
    from cosmos_rl_core.parallel.estimate import MemoryEstimate
    from cosmos_rl_core.parallel.held import Held
    from cosmos_rl_core.parallel.setup import ModelSetup
    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_core.settings.base import Problem
    from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup


@runtime_checkable
class ReadsPrompts(Protocol):
    """A domain that accepts prompts as plain text, for `cosmos-rl generate`; others accept only rows."""

    def prompt_row(self, data: Any, given: str | Mapping[str, Any], *, where: str, folder: Path) -> Mapping[str, Any]:
        """Return the row of a text, or of an object with columns, as `Domain.load_rows` would.

        data: the [data] section. where: its location, for messages. folder: the base of relative paths in it.

        Raises UserError for one that lacks a part every prompt must have.
        """
        ...


@runtime_checkable
class AttachesFiles(Protocol):
    """A domain whose prompts may have pictures and videos, for `cosmos-rl generate --image FILE --video FILE`."""

    def attach_files(
        self, data: Any, row: Mapping[str, Any], *, images: Sequence[Path], videos: Sequence[Path]
    ) -> Mapping[str, Any]:
        """Return the row of `ReadsPrompts.prompt_row` with the content of these files before its text.

        data: the [data] section. Raises UserError for a file that cannot be read.
        """
        ...


@runtime_checkable
class ShowsTerms(Protocol):
    """A domain whose terms have texts, for the files of rollouts."""

    def term_texts(self, model: Any, rollout: Rollout) -> Sequence[str]:
        """Return the text of each term; empty for a rollout without its arrays. model: the [model] section."""
        ...


@runtime_checkable
class ComparesEngines(Protocol):
    """A domain whose engines and policies are compared at the start, on a prompt that is longer than usual ones."""

    def long_prompt(self, config: RunConfig) -> tuple[Prompt, Any]:
        """Return a prompt, and the sampling parameters of its rollouts. Its `origin` describes it, for messages.

        Raises SampleError if the model has none. Called in each rollout replica.
        """
        ...

    def engine_tolerance(self, config: RunConfig) -> float:
        """Return the mean difference of a term's log-probability that rounding explains, in nats."""
        ...


@runtime_checkable
class HasTokens(Protocol):
    """A domain whose terms are tokens, so that rollouts of a prompt can have the same first terms."""

    def term_tokens(self, rollout: Rollout) -> np.ndarray:
        """Return [T] int, the token of each term."""
        ...


@runtime_checkable
class TakesRows(Protocol):
    """A domain whose [data] may name a .jsonl file of rows, so that programs can give rows: `run(rows=[...])`."""

    row_keys: Sequence[str]
    """Keys of [data] that name the source of the rows; the first of them takes a file's path."""


@runtime_checkable
class Warns(Protocol):
    """A domain with non-fatal warnings about valid recipes."""

    def warnings(self, config: RunConfig) -> Sequence[str]:
        """Return the warnings, a sentence each; `cosmos-rl check` prints them, and a run at its start."""
        ...


@runtime_checkable
class ChecksModels(Protocol):
    """A domain that can check, without a model's weights, whether the model can be trained."""

    def check_model(self, model: Any) -> None:
        """Raise UserError for a model that would fail, or learn nothing; called by `cosmos-rl check`.

        model: the [model] section. Checks that need a download are left to the run.
        """
        ...


@runtime_checkable
class FindsProblems(Protocol):
    """A domain with checks before the start of a run: of its model, tokenizer, engine and rows."""

    def problems(
        self, config: RunConfig, rows: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]
    ) -> Iterable[Problem]:
        """Yield what the first minute of a run would reveal, without loading the model; within a few seconds.

        rows: of [data]. held_out: those of [eval.data]; empty without it. Called by `cosmos-rl check --deep`, `run` and
        `launch` with a valid recipe.
        """
        ...


@runtime_checkable
class MakesSpecimens(Protocol):
    """A domain whose rewards can be called before the start, with made-up responses."""

    def specimen(self, config: RunConfig, row: Mapping[str, Any], *, origin: str) -> RolloutGroup:
        """Return a group for a row of [data], as an engine would: [rollout] group_size rollouts.

        origin: location of the row, for messages.
        """
        ...


@runtime_checkable
class HasTeachers(Protocol):
    """A domain whose policies can learn from a frozen second model, [teacher]."""

    def check_teacher(self, config: RunConfig) -> None:
        """Raise UserError for a teacher that cannot be loaded, or that has another vocabulary than the model."""
        ...

    def build_teacher(self, teacher: TeacherSection, *, config: RunConfig, policy: Any, setup: ModelSetup) -> Teacher:
        """Load the teacher, shard it as `policy` is, and have the policy compute its loss.

        policy: the result of `Domain.build_policy`. setup: as given to it, with `frozen`. All ranks call this together.
        """
        ...


@runtime_checkable
class CountsMemory(Protocol):
    """A domain whose processes store more than the network, such as encoders and averages of the weights."""

    def is_own_reference(self, config: RunConfig) -> bool:
        """Whether the policy provides the reference of a KL term, so that no second model is loaded."""
        ...

    def held_by_policy(self, config: RunConfig, rank: MemoryEstimate) -> Sequence[Held]:
        """Return the memory of a policy rank beyond `rank`; `held.STEP` marks memory needed only during a step."""
        ...

    def held_by_rollout(self, config: RunConfig) -> Sequence[Held]:
        """Return the memory of a rollout replica beside the network's weights, live and staged."""
        ...


@runtime_checkable
class SetsEngineDtype(Protocol):
    """A domain with engines whose weights need not have the dtype in which the model computes."""

    def engine_dtype(self, config: RunConfig) -> str:
        """Return the dtype of the engine's weights: "float32", "bfloat16" or "float16"."""
        ...


@runtime_checkable
class SpreadsEngines(Protocol):
    """A domain with engines that can be spread over several GPUs."""

    def spread_engine(
        self, name: str, options: Mapping[str, Any], *, tp: int | None, pp: int | None
    ) -> Mapping[str, Any]:
        """Return [rollout.options] for an engine of `pp` stages of `tp` GPUs each; None: as in the options.

        Raises UserError if the engine cannot be spread, or if the options contain other sizes.
        """
        ...

    def gpus_per_engine(self, name: str, options: Mapping[str, Any]) -> int:
        """Return the number of GPUs of one engine with these [rollout.options]. Raises ConfigError for wrong ones."""
        ...

    def share_gpu(self, name: str, options: Mapping[str, Any], *, processes: int) -> Mapping[str, Any]:
        """Return [rollout.options] for an engine whose GPUs are shared by `processes` processes, itself included."""
        ...


@runtime_checkable
class PutsEnginesToSleep(Protocol):
    """A domain with engines that free the memory of their GPUs while the policy uses them (`interfaces.Sleeps`)."""

    def sleeping_engine(self, name: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return [rollout.options] for an engine that shall sleep between its turns; None if it cannot."""
        ...


@runtime_checkable
class NamesModules(Protocol):
    """A domain or a weight sync with modules that are imported once, in the process from which workers are forked."""

    def worker_modules(self, config: RunConfig) -> Sequence[str]:
        """Return the modules that policy and rollout workers import; none if they must not be forked.

        Their import must start no thread and use no GPU. Modules of a recipe's "module:attribute" names are left out.
        """
        ...


@runtime_checkable
class ShowsRows(Protocol):
    """A domain whose rows hold the inputs of rewards, so that real data can be scored as rollouts are."""

    def row_media(self, data: Any, row: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        """Return a row's `Rollout.media`, cut as `data` (the [data] section it was loaded by) defines.

        Called in several threads. Raises SampleError for a row without media.
        """
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A domain whose supervised rows may take long to read, such as videos: read while the step before trains."""

    def reads_slowly(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row takes long to read. Called by the controller."""
        ...

    def read_ahead(self, prompts: Sequence[Prompt], *, policy: Any) -> None:
        """Begin to read the rows that the next batch is expected to have, and return at once.

        policy: the result of `Domain.build_policy`. Every rank calls it with the same prompts; `collate_sft` gets any
        others too.
        """
        ...


@runtime_checkable
class ShowsPrompts(Protocol):
    """A domain whose prompts may have pictures and videos, which rewards see and files name."""

    def prompt_media(self, data: Any, row: Mapping[str, Any]) -> tuple[Mapping[str, str], Mapping[str, np.ndarray]]:
        """Return `RolloutGroup.media` and `Rollout.media` of a row's prompt; empty for a prompt of text.

        data: the [data] section. Arrays are decoded when they are read, which may raise SampleError.
        """
        ...


@runtime_checkable
class HasCapacity(Protocol):
    """An engine with a fixed capacity, such as a number of simulators."""

    @property
    def rows_at_once(self) -> int:
        """Number of concurrent rows, of one rollout each, at full capacity."""
        ...


@runtime_checkable
class CompletesExports(Protocol):
    """A domain whose exports have files that no checkpoint holds."""

    def complete_export(self, model: Any, directory: Path, *, merged: bool) -> None:
        """Write those files into `directory`, such as parts that are not trained. It holds the weights and their files.

        model: the [model] section. merged: the weights are whole, not those of adapters alone. Raises UserError if a
        part cannot be found.
        """
        ...


@runtime_checkable
class ExportsFormats(Protocol):
    """A domain that also writes checkpoints in formats of other programs: `cosmos-rl export --format NAME`."""

    @property
    def export_formats(self) -> Sequence[str]:
        """Names of those formats. Each keeps the weights in one file."""
        ...

    def export_as(
        self, format: str, directory: Path, tensors: Iterable[tuple[str, Tensor]], *, model: Any, data: Any
    ) -> Iterable[tuple[str, Tensor]]:
        """Rewrite the configurations of an export in `directory`, and return its weights by the format's names.

        tensors: the result of `Domain.export_weights`. model, data: those sections of the recipe.

        Raises UserError for a model that the format cannot express.
        """
        ...
