"""`cosmos-rl plan`: processes and memory of a run, computed from its recipe alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cosmos_rl_core.assemble import build_sync
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import machine_gpus
from cosmos_rl_core.launch.gpus import assignment_text, gpus_per_rollout
from cosmos_rl_core.launch.placement import threads
from cosmos_rl_core.launch.preflight.checks import look_up_parts
from cosmos_rl_core.observe.console import table
from cosmos_rl_core.parallel.dims import AXES, ParallelDims
from cosmos_rl_core.plan.changes import Change, changes_that_fit, written
from cosmos_rl_core.plan.estimate import MemoryEstimate, num_moments
from cosmos_rl_core.plan.layer_bytes import BYTES
from cosmos_rl_core.plan.memory import ITEM_BYTES, estimate_of, policy_needs, rollout_needs, sent_dtype, staying
from cosmos_rl_core.plan.needs import NOT_COUNTED, STEP, MemoryPart, Needs
from cosmos_rl_core.plan.traffic import CollectiveCalls, traffic
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.weight_sync import SyncCost

MOST_RANKS_SHOWN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """The replicas of one role."""

    role: str
    replicas: int
    processes: int
    """Processes of all replicas; 0 if they run in the controller's process."""
    threads: int | None
    """CPU threads of one replica; None if all roles run in one process."""
    gpus: int | None
    """GPUs of one replica, on machines that have any; None if all roles run in one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlan:
    """Size of the model's weights in bytes, over all ranks of a replica."""

    parameters: int
    policy_bytes: int
    """Trained weights."""
    gradient_bytes: int
    optimizer_bytes: int
    engine_bytes: int
    """Live weights and, with `staging = "shadow"`, the next version; 0 for supervised fine-tuning."""
    sync: SyncCost | None
    """Transfer of each version to all rollout replicas; None for supervised fine-tuning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRanks:
    """Parallelism of one policy replica."""

    axes: Mapping[str, int]
    """Sizes, outermost first."""
    description: str
    places: tuple[Mapping[str, int], ...]
    """Coordinates of each rank, by axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of the processes, and changes of the recipe if it is too much."""

    rank: MemoryEstimate
    """Memory for training only, of the fullest policy rank."""
    policy: Needs
    """Total memory of this rank."""
    rollout: Needs | None
    """A rollout replica; None in supervised fine-tuning."""
    shared: bool
    """Whether policy and rollout share one process and device."""
    in_turns: bool = False
    """Whether they use the same GPUs in turns ([run] colocate)."""
    traffic: tuple[CollectiveCalls, ...] = ()
    """Collectives of the policy rank with the most bytes, with microbatches of maximum size."""
    given: int | None = None
    """Memory of each device in bytes."""
    changes: tuple[Change, ...] = ()
    """Changes of the recipe that make a too large policy fit."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Maximum bytes on each kind of device, as far as known."""
        sizes = [needs.device for needs in self.processes]
        if self.in_turns:
            stays = [staying(needs) for needs in self.processes]
            return (max(size + sum(stays) - own for size, own in zip(sizes, stays, strict=True)),)
        return (sum(sizes),) if self.shared else tuple(sizes)

    @property
    def beside_policy(self) -> int:
        """Bytes of the rollout replica on the policy's device while a step is computed."""
        if self.rollout is None:
            return 0
        if self.in_turns:
            return staying(self.rollout)
        return self.rollout.device if self.shared else 0

    @property
    def processes(self) -> tuple[Needs, ...]:
        return (self.policy,) if self.rollout is None else (self.policy, self.rollout)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Parts of unknown size, which are not counted."""
        return tuple(f"{needs.process}: {name}" for needs in self.processes for name in needs.unknown)

    @property
    def fits(self) -> bool | None:
        """False if the known parts already exceed the memory; None without a given memory, or with unknown parts."""
        if self.given is None:
            return None
        if max(self.devices) > self.given:
            return False
        return None if self.unknown else True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan of a run."""

    name: str
    placement: str
    cores: int
    roles: tuple[RolePlan, ...]
    gpus: str
    """GPUs of each worker of this machine, or the reason why they do not suffice; empty without GPUs."""
    engine: str
    """The engine that "auto" has chosen, and why; empty where the recipe names one."""
    ranks: PolicyRanks
    prompts_per_step: int
    rollouts_per_step: int
    """0 for supervised fine-tuning."""
    groups_in_flight: int
    """Maximum number of groups leased, ready or in training: (max_staleness + 1) * prompts_per_step."""
    unit: str
    """Unit of a rollout's length."""
    generated_terms_per_step: int
    """Upper bound: every rollout has the maximum length of [rollout.sampling]."""
    microbatch_terms: int
    weights: WeightsPlan | None
    """None if the model is not on this machine."""
    memory: MemoryPlan | None
    """None if the model's sizes are unknown as well."""

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON-like values."""
        values = asdict(self)
        if self.memory is not None:
            memory = self.memory
            rollout = 0 if memory.rollout is None else memory.rollout.device
            values["memory"] |= {
                "device": memory.policy.device,
                "rollout_device": rollout,
                "fits": memory.fits,
                "unknown": memory.unknown,
                "not_counted": NOT_COUNTED,
            }
        return values

    def __str__(self) -> str:
        """Tables of the roles, the amounts of one step, and the weights if known."""
        roles = [
            (r.role, r.replicas, r.processes, r.threads or "shared", "shared" if r.gpus is None else r.gpus)
            for r in self.roles
        ]
        amounts = [
            ("prompts a step", self.prompts_per_step),
            ("rollouts a step", self.rollouts_per_step),
            ("groups in flight", f"at most {self.groups_in_flight}"),
            (f"generated {self.unit} a step", f"at most {self.generated_terms_per_step}"),
            ("terms a forward pass", f"at most {self.microbatch_terms}"),
        ]
        head = f"{self.name}: {self.placement}, {self.cores} cores"
        header = ("role", "replicas", "processes", "threads", "GPUs")
        parts = [head, table(roles, header=header), *([f"GPUs: {self.gpus}"] if self.gpus else [])]
        parts += filter(None, [self.engine])
        parts += [*_rank_tables(self.ranks), table(amounts)]
        if self.weights is None:
            parts.append("weights: known once the model is on this machine")
        else:
            parts.append(table(_weight_rows(self.weights)))
        if self.memory is None:
            parts.append("memory: known once the model is on this machine, if it is of a family whose sizes are known")
        else:
            parts += _memory_texts(self.memory)
        return "\n\n".join(parts)


def plan(config: RunConfig, *, memory: int | None = None, gpu: bool | None = None, engine: str = "") -> RunPlan:
    """Return roles, processes and amounts of a run.

    Args:
        engine: as `RunPlan.engine`.
        memory: bytes of each device.
        gpu: whether devices are GPUs, where CUDA takes memory too; None: as on this machine.

    Raises UserError for a model that cannot be parallelised according to [policy.parallel].
    """
    look_up_parts(config, load_domain(config.run.domain))
    prompts = config.policy.prompts_per_step
    rollouts = 0 if config.is_sft else prompts * config.rollout.group_size
    return RunPlan(
        name=config.run.name,
        placement=config.run.placement,
        cores=len(os.sched_getaffinity(0)),
        roles=tuple(_roles(config)),
        gpus=_gpu_text(config),
        engine=engine,
        ranks=_ranks(config),
        prompts_per_step=prompts,
        rollouts_per_step=rollouts,
        groups_in_flight=0 if config.is_sft else (config.sync.max_staleness + 1) * prompts,
        unit=config.rollout.sampling.unit,
        generated_terms_per_step=rollouts * config.rollout.sampling.max_terms,
        microbatch_terms=config.policy.microbatch_terms,
        weights=_weights(config),
        memory=_memory(config, memory, gpu=bool(machine_gpus(os.environ, config.run.device)) if gpu is None else gpu),
    )


def _gpu_text(config: RunConfig) -> str:
    try:
        return assignment_text(config)
    except UserError as error:  # the recipe may be for another machine
        return str(error)


def _ranks(config: RunConfig) -> PolicyRanks:
    dims = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size)
    return PolicyRanks(
        axes={**dict(dims), "ep": dims.ep},
        description=dims.describe(),
        places=tuple(dims.coordinates(rank) for rank in range(dims.world_size)),
    )


def _memory(config: RunConfig, device_bytes: int | None, *, gpu: bool) -> MemoryPlan | None:
    domain = load_domain(config.run.domain)
    shape = domain.model_shape(config.model, data=config.data, sampling=config.policy_sampling)
    if shape is None:
        return None
    dims = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size)
    in_turns = config.run.colocate and gpu  # on a CPU nothing is freed
    memory_plan = MemoryPlan(
        rank=estimate_of(shape, config.policy, device_bytes=device_bytes, with_entropy=not config.is_sft),
        policy=policy_needs(shape, config, domain, device_bytes=device_bytes, gpu=gpu),
        rollout=rollout_needs(shape, config, domain, device_bytes=device_bytes, gpu=gpu),
        shared=config.run.placement == "inline" and not in_turns,
        in_turns=in_turns,
        traffic=traffic(
            shape,
            dims=dims,
            policy=config.policy,
            tokens=config.policy.microbatch_terms * shape.tokens_per_term,
            with_entropy=not config.is_sft,
            device_bytes=device_bytes,
        ),
        given=device_bytes,
    )
    room = None if device_bytes is None else device_bytes - memory_plan.beside_policy
    if room is None or memory_plan.policy.device <= room:
        return memory_plan
    fitting = changes_that_fit(shape, config, domain, memory=room, device_bytes=device_bytes, gpu=gpu)
    return replace(memory_plan, changes=tuple(fitting))


def _weights(config: RunConfig) -> WeightsPlan | None:
    domain = load_domain(config.run.domain)
    specs = domain.weight_specs(config.model)
    if not specs:
        return None
    parameters = sum(math.prod(spec.shape) for spec in specs)
    moments = sum(num_moments(config.policy.optimizer, spec) * math.prod(spec.shape) for spec in specs)
    size = BYTES[config.policy.precision.parameters]
    sync, engine_bytes = None, 0
    if not config.is_sft:
        shape = domain.model_shape(config.model, data=config.data, sampling=config.policy_sampling)
        computed = config.policy.precision.parameters if shape is None else shape.compute_dtype
        live, sent = domain.engine_dtype(config, computed=computed), sent_dtype(config, domain, computed=computed)
        frozen = frozenset() if shape is None else shape.frozen
        specs = [spec for spec in specs if spec.name not in frozen]
        specs = [replace(spec, dtype=sent) if "float" in spec.dtype else spec for spec in specs]
        axes = _ranks(config).axes
        sync = build_sync(config).plan(specs, settings=config.sync, policy=axes, replicas=config.rollout.replicas)
        staged = 0 if config.sync.staging == "in_place" else ITEM_BYTES[sent]
        engine_bytes = (ITEM_BYTES[live] + staged) * parameters
    return WeightsPlan(
        parameters=parameters,
        policy_bytes=size * parameters,
        gradient_bytes=size * parameters,
        optimizer_bytes=size * moments,
        engine_bytes=engine_bytes,
        sync=sync,
    )


def _weight_rows(weights: WeightsPlan) -> list[tuple[str, str]]:
    rows = [
        ("parameters", f"{weights.parameters:,}"),
        (
            "policy: weights, gradients, optimizer",
            _mebibytes(weights.policy_bytes, weights.gradient_bytes, weights.optimizer_bytes),
        ),
    ]
    if weights.sync is not None:
        rows += [("rollout: weights, live and staged", _mebibytes(weights.engine_bytes)), *_sync_rows(weights.sync)]
    return rows


def _sync_rows(sync: SyncCost) -> list[tuple[str, str]]:
    rows = [
        ("weight sync, each version", _beside_bound(sync.received_bytes, sync.lower_bound_bytes)),
        ("  the busiest policy rank sends", _beside_bound(sync.busiest_bytes, sync.busiest_bound_bytes)),
        ("  in flight at a rank, at most", _mebibytes(sync.extra_bytes)),
    ]
    return [*rows, ("  engines feed each other", sync.relay)] if sync.relay else rows


def _beside_bound(size: int, bound: int) -> str:
    return f"{_mebibytes(size)}, {size / bound if bound else 1:.2f} x the lower bound"


def _rank_tables(ranks: PolicyRanks) -> list[str]:
    """Coordinates of each rank, if there are several and not too many."""
    number = len(ranks.places)
    texts = [f"a policy replica: {number} ranks, {ranks.description}"] if number > 1 else []
    if 1 < number <= MOST_RANKS_SHOWN:
        used = [axis for axis in AXES if ranks.axes[axis] > 1]
        rows = [(rank, *(place[axis] for axis in used)) for rank, place in enumerate(ranks.places)]
        texts.append(table(rows, header=("rank", *used)))
    return texts


def _memory_texts(memory: MemoryPlan) -> list[str]:
    texts = [_needs_table(needs) for needs in memory.processes]
    if memory.traffic:
        texts.append(_traffic_table(memory.traffic))
    if memory.unknown:
        texts.append("not counted, for it is not known before the run:\n  " + "\n  ".join(memory.unknown))
    texts.append(f"not counted either: {NOT_COUNTED}")
    return texts if memory.given is None else [*texts, _verdict(memory, memory.given)]


def _traffic_table(calls: Sequence[CollectiveCalls]) -> str:
    rows = [(f"{one.kind} over {one.axis}: {one.content}", one.each, one.calls, _mebibytes(one.bytes)) for one in calls]
    return table(rows, header=("collectives of a policy rank, at most", "each", "calls", "bytes"))


def _needs_table(needs: Needs) -> str:
    rows = [(_row_name(part), _mebibytes(part.bytes)) for part in needs.parts if part.bytes]
    fullest = f", while {needs.fullest}" if needs.fullest else ""
    rows.append((f"on its device{fullest}", _mebibytes(needs.device)))
    if needs.host:
        rows.append(("in the host's memory", _mebibytes(needs.host)))
    return table(rows, header=(f"{needs.process}, at most", "bytes"))


def _row_name(part: MemoryPart) -> str:
    when = f" (while {' or '.join(part.at)})" if part.at and part.at != (STEP,) else ""
    return f"{part.name}{when}{' (host)' if part.host else ''}"


def _verdict(memory: MemoryPlan, device_bytes: int) -> str:
    size, needed = _mebibytes(device_bytes), max(memory.devices)
    if needed <= device_bytes:
        left = f"{_mebibytes(device_bytes - needed)} left for what is not"
        return f"what is counted fits into {size}, with {left}"
    if memory.changes:
        fitting = "\n".join(f"  {written(change)}" for change in memory.changes)
        return f"does not fit into {size}; a policy rank would with one of\n{fitting}"
    if memory.policy.device + memory.beside_policy <= device_bytes and not memory.shared:
        return f"a rollout replica does not fit into {size}"
    return f"does not fit into {size}, nor after any change that was tried"


def _mebibytes(*sizes: int) -> str:
    """Format sizes, small ones with one decimal."""
    numbers = [size / 2**20 for size in sizes]
    return " + ".join(f"{number:,.1f}" if number < 10 else f"{number:,.0f}" for number in numbers) + " MiB"


def _roles(config: RunConfig) -> list[RolePlan]:
    policy_threads, rollout_threads = threads(config)
    ranks = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size).world_size
    workers = [("policy", config.policy.replicas, ranks, policy_threads, ranks)]
    if not config.is_sft:
        workers.append(("rollout", config.rollout.replicas, 1, rollout_threads, gpus_per_rollout(config)))
    apart = config.run.placement == "local"
    controller = RolePlan(
        role="controller", replicas=1, processes=1, threads=1 if apart else None, gpus=0 if apart else None
    )
    return [
        controller,
        *(
            RolePlan(
                role=role,
                replicas=replicas,
                processes=replicas * ranks if apart else 0,
                threads=count if apart else None,
                gpus=gpus if apart else None,
            )
            for role, replicas, ranks, count, gpus in workers
        ),
    ]
