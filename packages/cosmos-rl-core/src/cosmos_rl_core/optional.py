"""What a domain may be able to do beyond `interfaces.Domain`; who asks for it looks with isinstance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from cosmos_rl_core.parallel.estimate import MemoryEstimate
    from cosmos_rl_core.parallel.held import Held
    from cosmos_rl_core.recipe.run import RunConfig


@runtime_checkable
class ReadsPrompts(Protocol):
    """A domain that takes prompts as people write them, for `cosmos-rl generate`; others take rows as they are."""

    def prompt_row(self, data: Any, given: str | Mapping[str, Any], *, where: str, folder: Path) -> Mapping[str, Any]:
        """Return the row of a text, or of an object with columns, as `Domain.load_rows` would.

        data: the [data] section. where: its place, for messages. folder: what paths in it are relative to.

        Raises UserError for one that lacks what a prompt must have.
        """
        ...


@runtime_checkable
class TakesRows(Protocol):
    """A domain whose [data] may name a .jsonl file of rows, so that programs can give rows: `run(rows=[...])`."""

    row_keys: Sequence[str]
    """Keys of [data] that say where the rows are; the first of them takes a file's path."""


@runtime_checkable
class Warns(Protocol):
    """A domain that knows of recipes which are in order, and yet will not do all that one expects."""

    def warnings(self, config: RunConfig) -> Sequence[str]:
        """Return what to know before the run, a sentence each; told by `cosmos-rl check` and at the run's start."""
        ...


@runtime_checkable
class ChecksModels(Protocol):
    """A domain that can find out, without a model's weights, whether it is of a kind that can be trained."""

    def check_model(self, model: Any) -> None:
        """Raise UserError for a model that would fail, or learn nothing; called by `cosmos-rl check`.

        model: the [model] section. What needs a download is left to the run.
        """
        ...


@runtime_checkable
class CountsMemory(Protocol):
    """A domain whose processes hold more than the network, such as encoders and averages of the weights."""

    def is_own_reference(self, config: RunConfig) -> bool:
        """Whether a KL term pulls towards something that the policy has already, so that no second model is loaded."""
        ...

    def held_by_policy(self, config: RunConfig, rank: MemoryEstimate) -> Sequence[Held]:
        """Return what a policy rank holds beside what `rank` counts; `held.STEP` is when it computes a step."""
        ...

    def held_by_rollout(self, config: RunConfig) -> Sequence[Held]:
        """Return what a rollout replica holds beside the network's weights, live and staged."""
        ...


@runtime_checkable
class SpreadsEngines(Protocol):
    """A domain with engines that can be spread over several GPUs."""

    def spread_engine(self, name: str, options: Mapping[str, Any], *, tp_size: int) -> Mapping[str, Any]:
        """Return [rollout.options] for an engine over `tp_size` GPUs. Raises UserError for one that cannot be."""
        ...


@runtime_checkable
class ShowsRows(Protocol):
    """A domain whose rows hold what rewards look at, so that real data can be scored as rollouts are."""

    def row_media(self, data: Any, row: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        """Return a row's `Rollout.media`, as `data` (the [data] section it came by) cuts it. Called by threads.

        Raises SampleError for a row that gives none.
        """
        ...


@runtime_checkable
class HasCapacity(Protocol):
    """An engine that knows how many rows keep it busy, such as one with a fixed number of simulators."""

    @property
    def rows_at_once(self) -> int:
        """Rows in work, of one rollout each, that leave nothing of it idle."""
        ...


@runtime_checkable
class CompletesExports(Protocol):
    """A domain whose models have parts beside the one that is trained, which no checkpoint holds."""

    def complete_export(self, model: Any, directory: Path) -> None:
        """Write into `directory`, where a checkpoint's configurations lie, the parts that are not trained.

        model: the [model] section. Raises UserError where they are no longer to be found.
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

        tensors: what `Domain.export_weights` gave. model, data: those sections of the recipe.

        Raises UserError for a model that the format cannot express.
        """
        ...
