"""Memory of a run's processes, and changes of the recipe if a policy rank does not fit into a given memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cosmos_rl_core.assemble import engine_options
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.estimate import MemoryEstimate, estimate
from cosmos_rl_core.parallel.memory.activations import BYTES
from cosmos_rl_core.parallel.process_memory import REDUCED, STEP, UPDATE, MemoryPart, Needs
from cosmos_rl_core.parallel.shape import ModelShape
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.problems import as_toml
from cosmos_rl_core.weight_sync import BETWEEN_GPUS, BUCKET_BYTES, GPU_BUCKET_BYTES

Change = Mapping[str, Any]
"""Dotted keys of the recipe and their new values."""

MOST_CHANGES = 3
WITH_ROOM = 0.8
"""Part of the plan's bytes that a policy rank may need after it ran out of memory."""
CONTEXT_BYTES = 600 * 2**20
"""A process's CUDA context with the kernels of torch, cuBLAS and NCCL; an assumption, not measured."""
COMMUNICATOR_BYTES = 200 * 2**20
"""Buffers of one NCCL communicator within a node and between nodes; an assumption, not measured."""
CONTEXT, COMMUNICATORS = "CUDA context", "NCCL communicators"
_ROUNDING = 33
"""Bytes an element while StochasticAdam updates a parameter in bfloat16: five float32 tensors, then their noise."""
SMALLEST_MICROBATCH = 512
"""Tokens; smaller microbatches do not use a device efficiently."""
ITEM_BYTES = {**BYTES, "float16": 2}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str) -> int:
    """Return "80GiB" as a number of bytes. Raises UserError for anything else."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|)", text.strip())
    if size is None:
        raise UserError(f"--memory {text}: write a size such as 80GiB, 24GB or 512MiB")
    return int(float(size[1]) * UNITS[size[2]])


def estimate_of(
    shape: ModelShape, policy: PolicySection, *, device_bytes: int | None = None, with_entropy: bool = True
) -> MemoryEstimate:
    """Return the memory of the policy replica's fullest rank, with microbatches of maximum size."""
    dims = ParallelDims.of(policy.parallel, world_size=policy.world_size)
    tokens = policy.microbatch_terms * shape.tokens_per_term
    return estimate(
        shape, dims=dims, policy=policy, tokens=tokens, device_bytes=device_bytes, with_entropy=with_entropy
    )


def policy_needs(
    shape: ModelShape, config: RunConfig, domain: DomainBase, *, device_bytes: int | None = None, gpu: bool = False
) -> Needs:
    """Return the memory needs of the policy replica's fullest rank.

    Args:
        device_bytes: memory of each GPU, if it is known.
        gpu: count CUDA's own memory.
    """
    rank = estimate_of(shape, config.policy, device_bytes=device_bytes, with_entropy=not config.is_sft)
    dims = ParallelDims.of(config.policy.parallel, world_size=config.policy.world_size)
    memory = config.policy.memory
    offloaded = memory.parameter_offload and dims.world_size > 1
    policy_dtype = config.policy.precision.parameters
    parts = [
        MemoryPart(name="parameters", bytes=rank.parameters, host=offloaded, away=True),
        MemoryPart(name="gradients", bytes=rank.gradients, host=offloaded),
        MemoryPart(name="optimizer", bytes=rank.optimizer, host=offloaded, away=True),
        MemoryPart(name="gathered parameters", bytes=rank.gathered, at=(STEP,)),
        MemoryPart(name="gradients to be summed", bytes=rank.reduction, at=(STEP,)),
        MemoryPart(name="activations", bytes=rank.activations, at=(STEP,), host=memory.activation_offload),
        MemoryPart(name="logits", bytes=rank.logits, at=(STEP,)),
        MemoryPart(name="backward pass", bytes=rank.backward, at=(STEP,)),
        MemoryPart(name="embedding and head, gathered, with gradients", bytes=rank.root, at=(REDUCED,)),
    ]
    if _copies_reference(shape, config, domain):
        reference_dtype = policy_dtype if dims.world_size == 1 else shape.reference_dtype or policy_dtype
        rank = replace(rank, reference=rank.parameters * BYTES[reference_dtype] // BYTES[policy_dtype])
        parts.append(MemoryPart(name="reference of the KL term", bytes=rank.reference, host=offloaded, away=True))
    if gpu:
        parts += [MemoryPart(name=CONTEXT, bytes=CONTEXT_BYTES), *_communicators(dims)]
    parts += _updating(config, rank, offloaded=offloaded)
    if not config.is_sft:
        parts += _publishing(shape, config, domain, rank, gpu=gpu)
    parts += domain.held_by_policy(config, rank)
    if config.run.colocate and gpu:
        parts += _between_turns(parts, "rollouts have their turn")
    return Needs(process="a policy rank", parts=tuple(parts))


def _updating(config: RunConfig, rank: MemoryEstimate, *, offloaded: bool) -> Iterator[MemoryPart]:
    """Memory of an update: sums over replicas, copies that undo it, temporaries in float32."""
    policy = config.policy
    if policy.replicas > 1:
        yield MemoryPart(name="gradients of all replicas, in buckets", bytes=rank.gradients, at=(UPDATE,))
        if policy.minibatches * policy.epochs > 1:
            size = rank.gradients + rank.optimizer
            yield MemoryPart(
                name="trained weights and moments, to undo a step", bytes=size, at=(STEP, UPDATE), host=offloaded
            )
    if policy.precision.parameters == "bfloat16" and policy.optimizer.name in ("adam", "adamw"):
        size = _ROUNDING * rank.largest
        yield MemoryPart(name="a parameter in float32, while it is rounded", bytes=size, at=(UPDATE,), host=offloaded)


def _communicators(dims: ParallelDims) -> list[MemoryPart]:
    """Buffers of NCCL: one communicator for the replica, one for each axis that ranks are spread over."""
    if dims.world_size == 1:
        return []
    shards = dims.dp_shard * dims.cp
    axes = [shards, dims.dp_replicate, dims.cp, dims.tp, dims.pp, dims.ep, shards * dims.tp // dims.ep * (dims.ep > 1)]
    number = 1 + sum(size > 1 for size in axes)
    return [MemoryPart(name=f"{number} {COMMUNICATORS}", bytes=number * COMMUNICATOR_BYTES)]


def _publishing(
    shape: ModelShape, config: RunConfig, domain: DomainBase, rank: MemoryEstimate, *, gpu: bool
) -> Iterator[MemoryPart]:
    """Copies of a rank's part of the weights, and slots of the transfer; see cosmos_rl_transfer/publish."""
    sync = config.sync
    dtype = sent_dtype(config, domain, computed=shape.compute_dtype)
    sent = rank.gradients if shape.adapter_parameters else rank.parameters
    size = sent * ITEM_BYTES[dtype] // BYTES[config.policy.precision.parameters]
    if sync.delta:
        yield MemoryPart(name="last version, of which changes are sent", bytes=size, host=True)
    elif gpu:  # a slow engine still reads the version before
        yield MemoryPart(name="two versions in pinned memory", bytes=2 * size, host=True)
    else:
        yield MemoryPart(name="version that an engine still reads", bytes=size, host=True)
    bucket_bytes = sync.bucket_bytes or (GPU_BUCKET_BYTES if gpu else BUCKET_BYTES)
    yield MemoryPart(name="buckets being sent", bytes=2 * bucket_bytes, host=sync.transport not in BETWEEN_GPUS)


def sent_dtype(config: RunConfig, domain: DomainBase, *, computed: str) -> str:
    """Return the dtype in which weights travel: [sync] dtype or the engine's, where that is narrower."""
    parameter_dtype = config.policy.precision.parameters
    dtype = config.sync.dtype or domain.engine_dtype(config, computed=computed)
    return dtype if ITEM_BYTES[dtype] < ITEM_BYTES[parameter_dtype] else parameter_dtype


def rollout_needs(
    shape: ModelShape, config: RunConfig, domain: DomainBase, *, device_bytes: int | None = None, gpu: bool = False
) -> Needs | None:
    """Return the memory needs of a rollout replica; None in supervised fine-tuning, which has none.

    device_bytes, gpu: as in `policy_needs`.
    """
    if config.is_sft:
        return None
    numbers = sum(math.prod(spec.shape) for spec in shape.weights) + shape.adapter_parameters
    sent = shape.adapter_parameters or numbers
    gpus = domain.gpus_per_engine(config.rollout.engine, engine_options(config, domain))
    dtype = domain.engine_dtype(config, computed=shape.compute_dtype)
    parts = [MemoryPart(name="weights", bytes=ITEM_BYTES[dtype] * -(-numbers // gpus), away=True)]
    if config.sync.staging == "shadow":
        sent *= ITEM_BYTES[sent_dtype(config, domain, computed=shape.compute_dtype)]
        parts.append(MemoryPart(name="next version, staged", bytes=sent, host=True))
    bucket_bytes = config.sync.bucket_bytes or (GPU_BUCKET_BYTES if gpu else BUCKET_BYTES)
    on_host = config.sync.transport not in BETWEEN_GPUS
    parts.append(MemoryPart(name="buckets being received", bytes=2 * bucket_bytes, host=on_host))
    weights = parts[0].bytes or 0
    parts += [_resolved(part, weights, device_bytes) for part in domain.held_by_rollout(config)]
    if config.run.colocate and gpu:
        parts += _between_turns(parts, "the policy has its turn")
    if gpu:
        parts.append(MemoryPart(name=CONTEXT, bytes=CONTEXT_BYTES))
    return Needs(process="a rollout replica", parts=tuple(parts))


def _resolved(part: MemoryPart, weights: int, device_bytes: int | None) -> MemoryPart:
    """Count a part that fills a share of the device beside the weights; it does not fit where they alone are more."""
    if part.share is None or device_bytes is None:
        return part
    filled = max(part.share * device_bytes, weights / part.share)
    return replace(part, bytes=int(filled) - weights)


def _between_turns(parts: Sequence[MemoryPart], time: str) -> list[MemoryPart]:
    """Copies in the host's memory of the parts that leave the GPU between turns."""
    away = [part for part in parts if part.away and not part.host]
    return [MemoryPart(name=f"{part.name} while {time}", bytes=part.bytes, host=True) for part in away]


def staying(needs: Needs) -> int:
    """Return the bytes of a process that stay on its device while another one has its turn ([run] colocate)."""
    return sum(part.bytes or 0 for part in needs.parts if part.name == CONTEXT or part.name.endswith(COMMUNICATORS))


def _copies_reference(shape: ModelShape, config: RunConfig, domain: DomainBase) -> bool:
    """Whether a KL term loads a second model. The reference of a policy that trains adapters alone is its base."""
    if config.is_sft or not config.algorithm.kl_coef or (shape.adapter_parameters and not shape.whole):
        return False
    return not domain.is_own_reference(config)


def changes_that_fit(
    shape: ModelShape,
    config: RunConfig,
    domain: DomainBase,
    *,
    memory: int,
    device_bytes: int | None = None,
    gpu: bool = False,
) -> list[Change]:
    """Return the first few changes, cheapest first, after which a rank needs at most `memory` bytes of its device."""
    fitting: list[Change] = []
    for change in _candidates(config, tokens_per_term=shape.tokens_per_term):
        changed = config.model_copy(update={"policy": _changed(config.policy, change)})
        fits = policy_needs(shape, changed, domain, device_bytes=device_bytes, gpu=gpu).device <= memory
        if fits and not any(_contains(change, other) for other in fitting):
            fitting.append(change)
        if len(fitting) == MOST_CHANGES:
            break
    return fitting


def written(change: Change) -> str:
    """Return a change as command-line overrides: `policy.microbatch_terms=2048 ...`."""
    return " ".join(f"{key}={as_toml(value)}" for key, value in change.items())


def _candidates(config: RunConfig, *, tokens_per_term: int) -> Iterator[Change]:
    """Yield single changes, cheapest in time first; then combinations, also with more ranks."""
    recomputed = list(_recomputations(config.policy))
    smaller = list(_smaller_microbatches(config, tokens_per_term=tokens_per_term))
    more = list(_more_ranks(config.policy))
    offloaded: list[Change] = [{"policy.memory.parameter_offload": True}]
    yield from recomputed
    yield from smaller
    yield from more
    yield from offloaded
    full: Change = recomputed[-1] if recomputed else {}
    for other in (*smaller, *more, *offloaded):
        yield {**full, **other}
    least: Change = {**full, **(smaller[-1] if smaller else {})}
    for other in (*more, *offloaded):
        yield {**least, **other}
    for other in more:
        yield {**least, **other, **offloaded[0]}


def _recomputations(policy: PolicySection) -> Iterator[Change]:
    key = "policy.memory.activation_checkpointing"
    current = policy.memory.activation_checkpointing
    if current == "none" and policy.memory.compile is not True:
        yield {key: "selective"}
    if current != "full":
        yield {key: "full"}


def _smaller_microbatches(config: RunConfig, *, tokens_per_term: int) -> Iterator[Change]:
    least = -(-SMALLEST_MICROBATCH // tokens_per_term)
    if not config.is_sft:
        least = max(least, config.rollout.sampling.least_microbatch_terms)
    terms = config.policy.microbatch_terms // 2
    while terms >= least:
        yield {"policy.microbatch_terms": terms}
        terms //= 2


def _more_ranks(policy: PolicySection) -> Iterator[Change]:
    dims = ParallelDims.of(policy.parallel, world_size=policy.world_size)
    for factor in (2, 4, 8, 16, 32, 64):
        if policy.ranks_per_node is None:
            yield {"policy.parallel.dp_shard": dims.dp_shard * factor}
        elif policy.parallel.dp_shard == -1:
            yield {"policy.num_nodes": policy.num_nodes * factor}
        else:
            yield {
                "policy.num_nodes": policy.num_nodes * factor,
                "policy.parallel.dp_shard": dims.dp_shard * factor,
            }


def _changed(policy: PolicySection, change: Change) -> PolicySection:
    for key, value in change.items():
        match key.split("."):
            case [_, name]:
                policy = policy.model_copy(update={name: value})
            case [_, section, name]:
                inner = getattr(policy, section).model_copy(update={name: value})
                policy = policy.model_copy(update={section: inner})
    return policy


def _contains(change: Change, other: Change) -> bool:
    """Whether a change sets all keys of another one."""
    return set(other) <= set(change)


def memory_advice(config: RunConfig, *, role: str, reason: str = "") -> str:
    """Return the plan's bytes of a process that ran out of memory, largest part first, and the keys to change.

    reason: text of its error, with the GPU's capacity where torch raised it.
    """
    capacity = re.search(r"total capacity of (\d+(?:\.\d+)? [GM]iB)", reason)
    device_bytes = None if capacity is None else parse_bytes(capacity[1].replace(" ", ""))
    domain = load_domain(config.run.domain)
    shape = domain.model_shape(config.model, data=config.data, sampling=config.policy_sampling)
    counted = "cosmos-rl plan does not know the sizes of this model"
    if shape is not None:
        find = policy_needs if role == "policy" else rollout_needs
        needs = find(shape, config, domain, device_bytes=device_bytes, gpu=True)
        assert needs is not None, "supervised fine-tuning has no rollouts"
        parts = sorted(
            (part for part in needs.parts if part.bytes and not part.host), key=lambda part: -(part.bytes or 0)
        )
        listed = ", ".join(f"{part.name} {(part.bytes or 0) / 2**20:,.0f} MiB" for part in parts)
        counted = f"cosmos-rl plan counts {needs.device / 2**20:,.0f} MiB for {needs.process}: {listed}"
    if role == "rollout":
        return (
            f"{counted}; generate fewer rollouts at once by [rollout.options], or give the engine a GPU of its own "
            "([run] share_gpus = false)"
        )
    fitting: list[Change] = []
    if shape is not None:
        room = int(WITH_ROOM * policy_needs(shape, config, domain, device_bytes=device_bytes, gpu=True).device)
        fitting = changes_that_fit(shape, config, domain, memory=room, device_bytes=device_bytes, gpu=True)
    changes = [written(change) for change in fitting] or [
        f"policy.microbatch_terms={config.policy.microbatch_terms // 2}"
    ]
    return f"{counted}; set {', or '.join(changes)}"
