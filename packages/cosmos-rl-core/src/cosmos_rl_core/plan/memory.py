"""Memory of the processes of a run, by part: what a policy rank and a rollout replica of its recipe need."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cosmos_rl_core.algorithms.table import find_algorithm
from cosmos_rl_core.assemble import engine_options
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.estimate import MemoryEstimate, estimate
from cosmos_rl_core.plan.layer_bytes import BYTES
from cosmos_rl_core.plan.needs import REDUCED, STEP, UPDATE, MemoryPart, Needs
from cosmos_rl_core.plan.shape import ModelShape
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.weight_sync import BETWEEN_GPUS, BUCKET_BYTES, GPU_BUCKET_BYTES

CONTEXT_BYTES = 600 * 2**20
"""A process's CUDA context with the kernels of torch, cuBLAS and NCCL; an assumption, not measured."""
COMMUNICATOR_BYTES = 200 * 2**20
"""Buffers of one NCCL communicator within a node and between nodes; an assumption, not measured."""
SUM_BYTES = 256 * 2**20
"""Buckets of gradients that policy replicas sum at a time (train/replicas.py, which imports torch)."""
CONTEXT, COMMUNICATORS = "CUDA context", "NCCL communicators"
_ROUNDING = 33
"""Bytes an element while StochasticAdam updates a parameter in bfloat16: five float32 tensors, then their noise."""
_ORTHOGONAL = 12
"""Bytes an element of a matrix while Muon makes it orthogonal: it in float32, then at most four in bfloat16."""
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
        window = max(SUM_BYTES, 2 * rank.largest * BYTES[policy.precision.parameters])  # each half: one tensor at least
        size = min(rank.gradients, window)
        yield MemoryPart(name="gradients of all replicas, in buckets", bytes=size, at=(UPDATE,))
        if policy.minibatches * policy.epochs > 1:
            size = rank.gradients + rank.optimizer
            yield MemoryPart(
                name="trained weights and moments, to undo a step", bytes=size, at=(STEP, UPDATE), host=offloaded
            )
    if policy.precision.parameters == "bfloat16" and policy.optimizer.name in ("adam", "adamw"):
        size = _ROUNDING * rank.largest
        yield MemoryPart(name="a parameter in float32, while it is rounded", bytes=size, at=(UPDATE,), host=offloaded)
    if policy.optimizer.name == "muon":
        size = _ORTHOGONAL * rank.largest_matrix
        yield MemoryPart(name="a whole matrix, while it is made orthogonal", bytes=size, at=(UPDATE,))


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
    merged = shape.adapter_parameters > 0 and domain.sent_adapters(config) == "merged"
    sent = rank.gradients if shape.adapter_parameters and not merged else rank.parameters
    size = sent * ITEM_BYTES[dtype] // BYTES[config.policy.precision.parameters]
    if merged:
        yield MemoryPart(name="weights with their adapters merged", bytes=rank.parameters, host=True)
    if sync.delta:
        yield MemoryPart(name="last version, of which changes are sent", bytes=size, host=True)
    elif gpu and not merged:  # a slow engine still reads the version before
        yield MemoryPart(name="two versions in pinned memory", bytes=2 * size, host=True)
    else:
        yield MemoryPart(name="version that an engine still reads", bytes=size, host=True)
    bucket_bytes = sync.bucket_bytes or (GPU_BUCKET_BYTES if gpu else BUCKET_BYTES)
    yield MemoryPart(name="buckets being sent", bytes=2 * bucket_bytes, host=sync.transport not in BETWEEN_GPUS)
    if gpu and sync.transport == "auto" and not sync.delta:  # once an engine tests a path to its GPU
        yield MemoryPart(name="buckets being sent from GPU to GPU", bytes=2 * bucket_bytes)


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
    numbers = sum(math.prod(spec.shape) for spec in shape.weights)
    sent = numbers
    if domain.sent_adapters(config) != "merged":
        numbers += shape.adapter_parameters
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
    """Whether the objective needs a second model. The reference of a policy that trains adapters alone is its base."""
    needs = config.algorithm.kl_coef or find_algorithm(config.algorithm.name).reference
    if not needs or (shape.adapter_parameters and not shape.whole):
        return False
    return not domain.is_own_reference(config)
