"""The sections of [policy]: optimizer, schedule, parallelism, memory, precision; and [model.lora]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from cosmos_rl_core.settings.base import Strict


class MuonSection(Strict):
    """[policy.optimizer.muon]: the update of hidden matrices, if the optimizer is muon."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the momentum that is made orthogonal."""
    nesterov: bool = True
    """Add the gradient to its momentum once more."""
    ns_steps: int = Field(default=5, ge=1, lt=100)
    """Iterations of Newton-Schulz."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of the learning rate of a matrix [A, B]: 0.2 sqrt(max(A, B)), with which rates of adamw can be used, or
    sqrt(max(1, A / B)) with "original"."""
    adamw: tuple[str, ...] = ("*embed*", "*wte*", "*head*", "*score*")
    """Patterns of names of matrices that adamw updates beside vectors, embeddings and stacked experts."""


class OptimizerSection(Strict):
    """[policy.optimizer]: how gradients become updates."""

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """adam adds the weight decay to the gradient, adamw subtracts it from the weights. muon updates hidden matrices by
    their orthogonal momentum, and the other parameters as adamw."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate, after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment; sgd takes the first as its momentum."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment; sgd has none."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to matrices, never to vectors such as norms and biases."""
    rates: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Peak learning rates by a pattern of parameter names ("value_head.*"); the first that matches applies."""
    muon: MuonSection = MuonSection()

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError("each must be at least 0 and below 1")
        return betas


class ScheduleSection(Strict):
    """[policy.schedule]: the learning rate over the steps."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine end at [run] max_steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up; the first has 1 / warmup_steps of the learning rate."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end as a fraction of the peak, for linear and cosine."""


class ParallelSection(Strict):
    """[policy.parallel]: how one replica is spread over its ranks. The sizes multiply to the number of ranks."""

    pp: int = Field(default=1, ge=1)
    """Pipeline stages the layers are cut into."""
    dp_replicate: int = Field(default=1, ge=1)
    """Whole copies of the model, whose gradients are summed."""
    dp_shard: int = Field(default=-1, ge=-1)
    """Ranks that parameters, gradients and optimizer state are cut over (FSDP); -1: those the other axes leave."""
    cp: int = Field(default=1, ge=1)
    """Ranks that sequences are cut over; attention exchanges heads (Ulysses)."""
    tp: int = Field(default=1, ge=1)
    """Ranks that matrices are cut over."""
    sequence_parallel: bool = False
    """With tp: cut the activations between the matrices along the sequence too."""
    ep: int = Field(default=1, ge=1)
    """Ranks that the experts are spread over; divides dp_shard x cp."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """Order of forward and backward passes over the stages."""
    stages_per_rank: int = Field(default=1, ge=1)
    """Pipeline stages that one rank holds; above 1 for interleaved_1f1b."""
    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward; false keeps them: less traffic, more memory."""
    reduce_once: bool = False
    """Sum gradients over ranks once a step, not once a microbatch: less traffic, whole gradients in memory."""

    @field_validator("dp_shard")
    @classmethod
    def _not_zero(cls, dp_shard: int) -> int:
        if dp_shard == 0:
            raise ValueError("must be at least 1, or -1 for the ranks that the other axes leave")
        return dp_shard


class MemorySection(Strict):
    """[policy.memory]: trading time for memory."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute in the backward pass: every layer ("full"), or all but the matrix products ("selective")."""
    activation_offload: bool = False
    """Keep the tensors saved for the backward pass in the host's memory."""
    parameter_offload: bool = False
    """Keep sharded parameters and optimizer state in the host's memory (FSDP's CPU offload); needs several ranks."""
    compile: bool | Literal["auto"] = "auto"
    """Run torch.compile over each layer; "auto": on a GPU, where nothing else in the recipe is in its way."""


class PrecisionSection(Strict):
    """[policy.precision]: types of the trained weights, of the sums over ranks and of matrix products."""

    parameters: Literal["float32", "bfloat16"] = "float32"
    """Type of trained weights and optimizer state; float32 are master weights where [model] dtype is bfloat16. adam and
    adamw round bfloat16 weights stochastically, so that small updates survive on average."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks."""
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Matrix products of linear layers in float8 by torchao, with one scale a tensor or one a row."""


class PolicySection(Strict):
    """[policy]: training."""

    replicas: int = Field(default=1, ge=1)
    """Copies of the policy that train together, each on its part of every batch. More may join a run, and one that is
    lost does not end it."""
    num_nodes: int = Field(default=1, ge=1)
    """Machines of one replica."""
    ranks_per_node: int | None = Field(default=None, ge=1)
    """Processes of one replica on each machine; without it the product of [policy.parallel] over num_nodes."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts in one optimizer step, each with its whole group of rollouts; rows in one step of SFT."""
    minibatches: int = Field(default=1, ge=1)
    """Parts the rollouts of a step are dealt into, each an update of its own: PPO's minibatches."""
    epochs: int = Field(default=1, ge=1)
    """Times those updates are made; engines get the weights after the last one."""
    microbatch_terms: int = Field(default=8192, ge=1)
    """Most terms (prompts included) in one forward and backward pass: bounds the memory of training."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of a replica; without it the replicas of all roles share the machine's cores."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Longest that the ranks of a replica wait for one another in training before the run is ended."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Largest joint 2-norm of the gradients, to which they are scaled down; 0 does not clip."""
    max_skipped_steps: int = Field(default=3, ge=0)
    """Steps in a row that may be skipped for a gradient that is not finite before the run stops."""
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    parallel: ParallelSection = ParallelSection()
    memory: MemorySection = MemorySection()
    precision: PrecisionSection = PrecisionSection()

    @model_validator(mode="after")
    def _muon_fits(self) -> PolicySection:
        if self.optimizer.name == "muon" and self.precision.parameters == "bfloat16":
            raise ValueError(
                'optimizer.name = "muon" needs precision.parameters = "float32": it does not round at random'
            )
        if self.optimizer.name == "muon" and self.memory.parameter_offload:
            raise ValueError(
                'optimizer.name = "muon" takes no memory.parameter_offload: matrices are multiplied on the GPU'
            )
        return self

    @property
    def world_size(self) -> int | None:
        """Ranks of a replica, None where the axes decide."""
        return None if self.ranks_per_node is None else self.num_nodes * self.ranks_per_node


class LoraSection(Strict):
    """[model.lora]: train low-rank adapters on linear layers and leave the model itself as it is."""

    rank: int = Field(default=32, ge=1)
    """Rank of the update of a layer's weight."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an adapter, by the end of their names, such as ["q_proj", "mlp.up_proj"]."""

    def unmatched(self, layers: Iterable[str]) -> list[str]:
        """Return the `target_modules` in which no name of `layers` ends."""
        return unmatched(layers, () if isinstance(self.target_modules, str) else self.target_modules)

    def rank_of(self, layer: str) -> int:
        """Return the rank of the adapter of the layer with this full name."""
        return self.rank

    def alpha_of(self, layer: str) -> float:
        """Return alpha of the adapter of the layer with this full name."""
        return self.alpha

    def scaling(self, layer: str) -> float:
        """Return alpha / rank of a layer: of the product B A."""
        return self.alpha_of(layer) / self.rank_of(layer)


def unmatched(layers: Iterable[str], ends: Sequence[str]) -> list[str]:
    """Return the `ends` that no name of `layers` has."""
    names = list(layers)
    return [end for end in ends if not any(ends_in(name, [end]) for name in names)]


def ends_in(layer: str, ends: Sequence[str]) -> bool:
    """Whether the dotted name of a layer ends in whole parts with one of `ends`."""
    return any(f".{layer}".endswith(f".{end}") for end in ends)
