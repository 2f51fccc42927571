"""The sections of a robot recipe: [data], [model], [rollout.sampling]. Free of torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core.parallel.config import LoraSection
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_vla.sims.base import HELD_OUT

UNIT = "unit"
"""[model] stats of actions in [-1, 1]."""
Perturbation = Literal["none", "swap_instruction", "grey_images"]


class VLADataConfig(Strict):
    """[data]: either `simulator` with `tasks`, or `demos`."""

    simulator: str = ""
    """"metaworld", "gymnasium", "reach", one of an installed plug-in, or "module:attribute"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the simulator."""
    tasks: tuple[str, ...] = ()
    """Names of the simulator's tasks to train or evaluate on."""
    split: Literal["train", "held_out"] = "train"
    """Initial states: those of training, or "held_out" ones that training never uses."""
    num_inits: int = Field(default=1000, ge=1)
    """Initial states of each task."""
    first_init: int = Field(default=0, ge=0, lt=HELD_OUT)
    """Index of the first initial state."""
    instructions: dict[str, str] = Field(default_factory=dict)
    """Instruction by task, in place of the simulator's own."""
    perturb: tuple[Perturbation, ...] = ("none",)
    """Ablations of the policy's input: "swap_instruction" gives the next task's instruction, "grey_images" hides the
    images. Each (task, initial state) is one row per perturbation, with a column `perturb`."""

    demos: str = ""
    """Dataset in LeRobot's format (v2.1 or v3) for imitation learning."""
    episodes: tuple[int, ...] = ()
    """Episodes of the dataset to use; empty for all."""
    cameras: tuple[str, ...] = ()
    """Image columns, in the order of the simulator's cameras; empty for all, in the dataset's order."""
    state_column: str = "observation.state"
    """Column of proprioception."""
    action_column: str = "action"
    """Column of actions."""
    aux_columns: tuple[str, ...] = ()
    """Numeric columns that a model with `aux_dim` learns to predict from the images, such as object positions."""
    cache_bytes: int = Field(default=2_000_000_000, ge=0)
    """Size of the LRU cache of decoded images, in bytes."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.simulator) == bool(self.demos):
            raise ValueError("set either simulator (reinforcement learning) or demos (imitation)")
        if self.simulator and not self.tasks:
            raise ValueError("tasks: name at least one task of the simulator")
        if "swap_instruction" in self.perturb and len(self.tasks) < 2:
            raise ValueError('perturb with "swap_instruction" needs two tasks, to swap their instructions')
        return self


FamilyName = Literal["pi0", "pi05", "openvla", "openvla_oft", "mlp"]


class ActionNoiseSection(Strict):
    """[model.noise]: the denoising steps that sample noise and so have a likelihood; the others follow the ODE.

    The noise of a model's config.json, too.
    """

    kind: Literal["sde", "cps", "learned", "fixed"] = "fixed"
    """"sde" (flow-SDE), "cps", "learned" (flow-noise: a head gives the deviation), "fixed": around the ODE's mean."""
    level: float = Field(default=0.3, gt=0)
    """sde: a of sigma. cps: 0 .. 1. fixed: the standard deviation."""
    level_end: float | None = Field(default=None, gt=0)
    """Final level of a linear schedule over `level_steps` optimizer steps; None keeps the level constant."""
    level_steps: int = Field(default=0, ge=0)
    """Length of that schedule, in optimizer steps."""
    steps: Literal["random", "last", "all"] = "last"
    """Steps that sample noise: one at random per decision, the last, or all."""
    ignore_last: bool = False
    """The last step follows the ODE."""
    std_low: float = Field(default=0.08, gt=0)
    """learned: minimum standard deviation."""
    std_high: float = Field(default=0.16, gt=0)
    """learned: maximum standard deviation."""

    def level_at(self, version: int) -> float:
        """Return the noise level at a version of the weights."""
        if self.level_end is None:
            return self.level
        return self.level + (self.level_end - self.level) * min(max(version, 0) / self.level_steps, 1)

    def check(self, num_steps: int) -> None:
        """Raise ValueError for options that exclude one another, and if none of K denoising steps would sample."""
        if self.kind == "cps" and self.steps == "last":
            raise ValueError(
                'noise "cps" samples nothing at the last step: set steps to "random" or "all", or use another kind'
            )
        if self.ignore_last and self.steps == "last":
            raise ValueError(
                'ignore_last leaves steps = "last" without a step: set steps to "random" or "all", or remove it'
            )
        if self.kind == "cps" and num_steps == 1:
            raise ValueError('noise "cps" samples nothing in a single denoising step: use 2 or more, or another kind')
        if self.ignore_last and num_steps == 1:
            raise ValueError("ignore_last needs 2 or more denoising steps")
        if self.std_low > self.std_high:
            raise ValueError(f"std_low {self.std_low} and std_high {self.std_high}: needs std_low <= std_high")
        if self.kind == "cps" and (level := max(self.level, self.level_end or 0)) > 1:
            raise ValueError(f'level {level} of noise "cps": must be at most 1')
        if (self.level_end is None) != (self.level_steps == 0):
            raise ValueError("set level_end and level_steps together: the final level, and the steps until it")
        if self.kind == "learned" and self.level_end is not None:
            raise ValueError('level_end: noise "learned" has no level; set std_low and std_high')

    def num_stochastic(self, num_steps: int) -> int:
        """Return n: steps 0 .. n - 1 may sample."""
        return num_steps - self.ignore_last


class CriticSection(Strict):
    """[model.critic]: the value head, also of a model's config.json."""

    place: Literal["prefix", "expert", "none"] = "prefix"
    """Input of the head: the language model's outputs for the observation, or the expert's at the actions."""
    per: Literal["chunk", "action"] = "chunk"
    """One value per decision, or one per action."""
    pool: Literal["mean", "attention"] = "attention"
    """Pooling of token features into one vector."""
    hidden: tuple[int, ...] = (128,)
    """Widths of the hidden layers."""
    detach: bool = True
    """Stop the critic's gradient at its input: through a shared trunk it would change the policy."""

    def num_values(self, horizon: int) -> int:
        """Return V, the values per decision of `horizon` actions."""
        return 0 if self.place == "none" else 1 if self.per == "chunk" else horizon


class VLAModelConfig(Strict):
    """[model]: the directory of a model, or the sizes of one from scratch."""

    path: str = ""
    """Directory with config.json, weights, tokenizer and action statistics, as supervised training exports it; or a
    public checkpoint. Empty: a randomly initialised model."""
    family: FamilyName = "pi05"
    """Model family from scratch. A directory's config.json determines it, except for public OpenVLA checkpoints, which
    may be "openvla" or "openvla_oft"."""
    action_dim: int | None = Field(default=None, ge=1)
    """Dimensions of an action; required from scratch, else the checkpoint's."""
    state_dim: int | None = Field(default=None, ge=0)
    """Dimensions of proprioception; required from scratch."""
    horizon: int | None = Field(default=None, ge=1)
    """Actions executed per decision; default 5 from scratch, else the checkpoint's."""
    hidden: tuple[int, ...] = (64, 64)
    """mlp from scratch: widths of the hidden layers."""
    discrete: bool = False
    """mlp from scratch: choose one of `action_dim` actions, for a simulator that takes the highest of as many scores,
    instead of sampling each dimension from a normal distribution. Its log-probability is that of terms = "action"."""
    num_steps: int | None = Field(default=None, ge=1)
    """Denoising steps per decision."""
    aux_dim: int = Field(default=0, ge=0)
    """Dimensions of the auxiliary target that supervised training also predicts from the images; 0: none."""
    aux_coef: float = Field(default=1.0, ge=0)
    """Coefficient of the auxiliary loss."""
    noise: ActionNoiseSection | None = None
    """Default: the checkpoint's, else the defaults of the section."""
    critic: CriticSection | None = None
    """Default as for noise. A critic that the checkpoint lacks, or has in other sizes, is randomly initialised."""
    temperature: float | None = Field(default=None, gt=0)
    """openvla: temperature of the distribution over action tokens, in rollouts and in training; default 1."""
    image_crop: float | None = Field(default=None, gt=0, le=1)
    """openvla: area fraction of the centre crop; 0.9 for models fine-tuned on random crops of that size."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of matrix products and of the engine's weights; heads of log-probabilities and values stay in float32.
    [policy.precision] sets the dtype of trained weights."""
    train: Literal["all", "expert"] = "all"
    """Trained weights: all, or those outside the language and vision model."""
    lora: LoraSection | None = None
    """Train adapters on the model of `path`."""
    words: tuple[str, ...] = ()
    """From scratch: instructions whose words form the tokenizer's vocabulary; those of the demonstrations are added."""
    stats: str = ""
    """File with action statistics; by default the model's own, or those of the demonstrations. "unit", with
    `action_dim`, for actions in [-1, 1]."""
    unnorm_key: str = ""
    """openvla: dataset whose statistics are used, for a public directory with several."""
    seed: int = Field(default=0, ge=0)
    """Seed of random initial weights."""

    @model_validator(mode="after")
    def _sized(self) -> Self:
        missing = [name for name in ("action_dim", "state_dim") if getattr(self, name) is None]
        if not self.path and missing:
            raise ValueError(f"a model from scratch needs {' and '.join(missing)}; or set path")
        if not self.path and self.train != "all":
            raise ValueError('train = "expert" freezes pretrained weights; set path to a model')
        if self.lora is not None and not self.path:
            raise ValueError("lora adapts pretrained weights; set path to a model")
        if self.lora is not None and self.train != "all":
            raise ValueError('train = "expert" and lora both select the trained weights; remove one of them')
        return self


TermName = Literal["token", "action", "chunk"]
StepName = Literal["chunk", "action"]


class VLASampling(Strict):
    """[rollout.sampling]: an episode and its terms."""

    unit: ClassVar[str] = "actions"
    length_key: ClassVar[str] = "max_steps"

    terms: TermName = "token"
    """Unit of a log-probability, and so of a ratio: a dimension of an action ("token"), an action, or a whole chunk."""
    steps: StepName = "chunk"
    """Unit of a reward and a value: a chunk of actions, or an action. "action" needs [model.critic] per = "action"."""
    max_steps: int = Field(default=100, ge=1)
    """Maximum number of simulator steps of an episode."""
    bootstrap: bool = True
    """Bootstrap the return of an episode truncated at max_steps with the critic's value of its last state. Set False if
    the limit is part of the task: truncation is then a failure, with a value of 0."""
    greedy: bool = False
    """Act without noise, as evaluations do. Such episodes cannot be trained on."""

    @model_validator(mode="after")
    def _one_ratio(self) -> Self:
        if self.steps == "action" and self.terms == "chunk":
            raise ValueError(
                'steps = "action" with terms = "chunk": one ratio cannot have several advantages; set terms = "action" '
                'or "token"'
            )
        return self

    @property
    def max_terms(self) -> int:
        """Maximum number of actions in an episode."""
        return self.max_steps

    @property
    def least_microbatch_terms(self) -> int:
        """1: each decision is a forward pass of its own."""
        return 1

    def evaluation(self, *, temperature: float, max_terms: int | None) -> Self:
        """Return the sampling of evaluations: greedy at temperature 0, `max_terms` replaces max_steps."""
        limit = self.max_steps if max_terms is None else max_terms
        return self.model_copy(update={"greedy": temperature == 0, "max_steps": limit})

    def build(self) -> Self:
        return self


class SimulatorLimits(Strict):
    """The time that a process of simulators gets, and the faults after which it is given up."""

    start_timeout_s: float = Field(default=120.0, gt=0)
    """Limit for building the simulators."""
    reset_timeout_s: float = Field(default=60.0, gt=0)
    """Limit for beginning an episode."""
    step_timeout_s: float = Field(default=15.0, gt=0)
    """Limit for one step of a process's slots, or one observation; then the process is replaced."""
    max_faults: int = Field(default=3, ge=0)
    """Failures in a row after which a process, and its replica with it, fails."""


class VLATorchOptions(SimulatorLimits):
    """[rollout.options] of engine = "torch"."""

    processes: int = Field(default=2, ge=1)
    """Number of simulator processes; with two or more, simulation and inference overlap."""
    slots: int = Field(default=8, ge=1)
    """Concurrent episodes per process."""
    steady: bool = False
    """Make an episode bitwise independent of the other episodes in its batch: a run without staleness is then
    reproducible. Costs full-size forward passes even for few episodes."""
    python: str | None = None
    """Python interpreter of those processes, for simulators that need other package versions; default: this one."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts per episode whose simulator was lost, before its prompt is returned as failed."""
