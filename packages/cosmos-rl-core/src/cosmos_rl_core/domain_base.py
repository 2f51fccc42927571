"""DomainBase: the base class of a domain, with defaults for all that only some domains do. Imports no torch.

    class MyDomain(DomainBase):
        name = "mine"
        Model, Data, Sampling = MyModel, MyData, SamplingSection

        def load_rows(self, data): ...
        def build_policy(self, model, *, data, sampling, seed, setup): ...    # a `train.policy_base.PolicyBase`
        def build_engine(self, model, *, data, name, options): ...            # a `rollout.engine_thread.ThreadedEngine`
        def collate(self, groups, *, microbatch_terms, share): ...
        def collate_sft(self, prompts, *, data, policy, microbatch_terms, share): ...

`testing.tiny` is a complete example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Domain

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from cosmos_rl_core.algorithms.config import TeacherSection
    from cosmos_rl_core.episodes.agents import AgentGenerator
    from cosmos_rl_core.episodes.interfaces import Continuation
    from cosmos_rl_core.interfaces import Recorder, RewardFn, RolloutEngine, Teacher
    from cosmos_rl_core.parallel.setup import ModelSetup, SentAdapters
    from cosmos_rl_core.plan.estimate import MemoryEstimate
    from cosmos_rl_core.plan.needs import MemoryPart
    from cosmos_rl_core.plan.shape import ModelShape
    from cosmos_rl_core.recipe.run import RunConfig
    from cosmos_rl_core.settings.base import Problem
    from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, WeightSpec


class DomainBase(Domain):
    """Defaults beyond the abstract methods of `Domain`; override those that do not fit."""

    engines: Sequence[str] = ("torch",)
    row_keys: Sequence[str] = ()
    """Keys of [data] that name the source of the rows, the first of them a .jsonl file, for `run(rows=[...])`; empty:
    the domain makes its own rows."""
    has_tokens: bool = False
    """Whether terms are tokens, so that rollouts of a prompt can begin with the same terms."""
    trains_on: Sequence[str] = ("responses",)
    """Kinds of rows that `collate_sft` takes, as in `Algorithm.rows`."""
    has_media: bool = False
    """Whether rollouts hold images or videos, which [logging] media_every keeps in the run's gallery."""
    export_formats: Sequence[str] = ()
    """Formats of other programs for `cosmos-rl export --format NAME`. Each keeps the weights in one file."""

    # -- rows and prompts

    def prompt_row(self, data: Any, given: str | Mapping[str, Any], *, where: str, folder: Path) -> Mapping[str, Any]:
        """Return the row of a text, or of an object with columns, as `load_rows` would, for `cosmos-rl generate`.

        where: its location, for messages. folder: the base of relative paths in it. Raises UserError for one that lacks
        a part every prompt must have.
        """
        if isinstance(given, str):
            raise UserError(f"{where}: the {self.name} domain takes objects with the columns of its rows, not text")
        return given

    def attach_files(
        self, data: Any, row: Mapping[str, Any], *, images: Sequence[Path], videos: Sequence[Path]
    ) -> Mapping[str, Any]:
        """Put these files before the text of a row from `prompt_row`, and return it. Raises UserError."""
        raise UserError(f"--image and --video: prompts of the {self.name} domain have no pictures or videos")

    def prompt_media(self, data: Any, row: Mapping[str, Any]) -> tuple[Mapping[str, str], Mapping[str, np.ndarray]]:
        """Return `RolloutGroup.media` and `Rollout.media` of a row's prompt, which rewards see and files name.

        Arrays are decoded when they are read, which may raise SampleError. Empty for a prompt of text.
        """
        return {}, {}

    def row_media(self, data: Any, row: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        """Return a row's `Rollout.media`, cut as `data` defines, so that rewards can score real data as rollouts.

        Called in several threads. Raises SampleError for a row without media.
        """
        wrong = f"rows of the {self.name} domain contain nothing that rewards can score"
        raise UserError(f"[monitor] data_rows: {wrong}; set best_of_data")

    def reads_slowly(self, row: Mapping[str, Any]) -> bool:
        """Return whether a supervised row takes long to read, such as a video. Called by the controller."""
        return False

    def read_ahead(self, prompts: Sequence[Prompt], *, policy: Any) -> None:
        """Begin to read the rows that the next batch is expected to have, and return at once.

        Every rank calls it with the same prompts; `collate_sft` gets any others too.
        """

    # -- checks before a run

    def warnings(self, config: RunConfig) -> Sequence[str]:
        """Return warnings about a valid recipe, a sentence each; printed by `cosmos-rl check` and at a run's start."""
        return ()

    def check_model(self, model: Any) -> None:
        """Raise UserError for a model that would fail, or learn nothing. Needs no weights and no download."""

    def problems(
        self, config: RunConfig, rows: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]
    ) -> Iterable[Problem]:
        """Yield what the first minute of a run would reveal, within a few seconds and without loading the model.

        rows: of [data]. held_out: those of [eval.data]. Called by `check --deep`, `run` and `launch`.
        """
        return ()

    # -- rewards and rollouts

    def reward_table(self) -> Mapping[str, Callable[..., RewardFn]]:
        """Return the factories of this domain's rewards by name, each called with the reward's options by keyword.

        A factory raises ValueError (pydantic's included) or TypeError for options it does not have.
        """
        return {}

    @property
    def rewards(self) -> Sequence[str]:
        return tuple(self.reward_table())

    def reward(self, name: str) -> Callable[..., RewardFn] | None:
        """Return a reward of the table; None for any other name."""
        return self.reward_table().get(name)

    def specimen(self, config: RunConfig, row: Mapping[str, Any], *, origin: str) -> RolloutGroup | None:
        """Return a sample group for a row, [rollout] group_size rollouts, on which checks call the rewards.

        origin: location of the row, for messages. None: rewards are not called before the start.
        """
        return None

    def term_texts(self, model: Any, rollout: Rollout) -> Sequence[str]:
        """Return the text of each term, for the files of rollouts; empty for a rollout without its arrays."""
        return ()

    def term_tokens(self, rollout: Rollout) -> np.ndarray:
        """Return [T] int, the token of each term. Called where `has_tokens`."""
        raise NotImplementedError(f"{type(self).__name__}.term_tokens, with has_tokens")

    def long_prompt(self, config: RunConfig) -> tuple[Prompt, Any] | None:
        """Return a prompt longer than usual ones, and its sampling, on which engine and policy are compared at start.

        Its `origin` describes it, for messages. None: they are not compared. Raises SampleError if the model has none.
        """
        return None

    def engine_tolerance(self, config: RunConfig) -> float | None:
        """Return the mean difference in nats a term that rounding explains; None: they are not compared."""
        return None

    def recorder(self, directory: Path, *, name: str, groups: int, every: int) -> Recorder | None:
        """A recorder of `groups` groups of each `every`-th version, of replica `name`; None where rollouts are text."""
        if not self.has_media:
            return None
        from cosmos_rl_core.observe.gallery import Gallery

        return Gallery(directory, groups_per_step=groups, every_steps=every, name=name)

    def build_continuation(self, model: Any, *, data: Any) -> Continuation:
        """Return what turns the messages of [environment] into terms, in a rollout replica and in checks.

        Raises UserError for a domain without episodes of turns, and for a model that cannot continue a history.
        """
        raise UserError(f"[environment]: the {self.name} domain has no episodes of turns; remove the section")

    def build_endpoint(
        self, model: Any, agents: AgentGenerator, *, token: str, log: Callable[[str], None]
    ) -> Callable[..., Any]:
        """Return the ASGI app by which agents ask the model. token: of requests for rows. Raises UserError."""
        raise UserError(f"[agent]: the {self.name} domain has no endpoint; remove the section")

    def build_server(self, config: RunConfig, engine: RolloutEngine, *, name: str, token: str) -> Callable[..., Any]:
        """Return the ASGI app of `cosmos-rl serve` for a model `name`; an empty token is none. Raises UserError."""
        raise UserError(f"serve: the {self.name} domain has no endpoint; use cosmos-rl generate or eval")

    # -- engines, whose `options` are [rollout.options]

    def choose_engine(self, config: RunConfig, *, gpu: bool, packages_known: bool = True) -> tuple[str, str]:
        """Return the engine for [rollout] engine = "auto", one of `engines`, and why; empty without a choice.

        gpu: whether the machines of the run have GPUs. packages_known: whether they have the packages of this one.
        """
        return "torch" if "torch" in self.engines else self.engines[0], ""

    def spread_engine(
        self, name: str, options: Mapping[str, Any], *, tp: int | None, pp: int | None
    ) -> Mapping[str, Any]:
        """Return the options of an engine of `pp` stages of `tp` GPUs each; None: as in the options.

        Raises UserError if the engine cannot be spread, or if the options contain other sizes.
        """
        if (tp or 1) * (pp or 1) > 1:
            raise UserError(f"the engine {name!r} of the {self.name} domain runs on one GPU; leave the size out")
        return options

    def gpus_per_engine(self, name: str, options: Mapping[str, Any]) -> int:
        """Return the number of GPUs of one engine. Raises ConfigError for wrong options."""
        return 1

    def share_gpu(self, name: str, options: Mapping[str, Any], *, processes: int) -> Mapping[str, Any]:
        """Return the options of an engine whose GPUs are shared by `processes` processes, itself included."""
        return options

    def sleeping_engine(self, name: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the options of an engine that sleeps between its turns (`interfaces.Sleeps`); None if it cannot."""
        return None

    def sent_adapters(self, config: RunConfig) -> SentAdapters:
        """Return the form in which the recipe's engine takes trained adapters."""
        return "live"

    def engine_dtype(self, config: RunConfig, *, computed: str) -> str:
        """Return the dtype of the engine's weights: "float32", "bfloat16" or "float16". computed: that of products."""
        return computed

    # -- the model: its sizes, its memory, a frozen second one

    def weight_specs(self, model: Any) -> Sequence[WeightSpec] | None:
        """The weights, read without loading them; None where only a built model has them. Raises UserError."""
        return None

    def model_shape(self, model: Any, *, data: Any, sampling: Any) -> ModelShape | None:
        """The sizes that decide how the model can be sharded and how much memory it needs, read without loading it.

        None where only a built model has them. `sampling` defines a term (None: SFT). Raises as `weight_specs`.
        """
        return None

    def is_own_reference(self, config: RunConfig) -> bool:
        """Whether the policy provides the reference of a KL term, so that no second model is loaded."""
        return False

    def held_by_policy(self, config: RunConfig, rank: MemoryEstimate) -> Sequence[MemoryPart]:
        """Return the memory of a policy rank beyond `rank`; `STEP` marks memory needed only during a step."""
        return ()

    def held_by_rollout(self, config: RunConfig) -> Sequence[MemoryPart]:
        """Return the memory of a rollout replica beside the network's weights, live and staged."""
        from cosmos_rl_core.plan.needs import MemoryPart

        return (MemoryPart(name="the engine's caches and activations", bytes=None),)

    def check_teacher(self, config: RunConfig) -> None:
        """Raise UserError for a [teacher] that cannot be loaded, or that has another vocabulary than the model."""
        raise UserError(f"[teacher]: the {self.name} domain has no teachers; remove the section")

    def build_teacher(self, teacher: TeacherSection, *, config: RunConfig, policy: Any, setup: ModelSetup) -> Teacher:
        """Load the teacher, shard it as `policy` is, and have the policy compute its loss.

        setup: as given to `build_policy`, with `frozen`. All ranks call this together.
        """
        raise NotImplementedError(f"{type(self).__name__}.build_teacher, with check_teacher")

    # -- exports

    def export_weights(
        self, model: Any, tensors: Iterable[tuple[str, Tensor]], *, merge_adapters: bool
    ) -> Iterable[tuple[str, Tensor]]:
        """Convert the weights of a checkpoint, by `Policy.weights` name, to those other programs load, one by one.

        merge_adapters: merge trained adapters into the base weights; false: yield the adapters themselves.
        """
        return tensors

    def complete_export(self, model: Any, directory: Path, *, merged: bool) -> None:
        """Write the files of an export that no checkpoint holds, such as parts that are not trained.

        directory: holds the weights and their files. merged: the weights are whole, not those of adapters alone. Raises
        UserError if a part cannot be found.
        """

    def export_as(
        self, format: str, directory: Path, tensors: Iterable[tuple[str, Tensor]], *, model: Any, data: Any
    ) -> Iterable[tuple[str, Tensor]]:
        """Rewrite the configurations of an export in `directory`, and return its weights by the format's names.

        tensors: the result of `export_weights`. Raises UserError for a model that the format cannot express.
        """
        raise NotImplementedError(f"{type(self).__name__}.export_as, with export_formats")
