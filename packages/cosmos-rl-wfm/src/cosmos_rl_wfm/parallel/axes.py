"""Checks the axes of [policy.parallel] for world foundation models. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection


def check_axes(parallel: ParallelSection, memory: MemorySection | None = None) -> None:
    """Raise one UserError with every option of [policy.parallel] that diffusers' transformers do not support."""
    if found := list(_refused(parallel, memory or MemorySection())):
        raise UserError("; ".join(found))


def check_heads(heads: int, *, cp: int) -> None:
    """Raise UserError where cp does not divide the attention heads."""
    if heads % cp:
        divisors = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise UserError(
            f"[policy.parallel] cp = {cp} does not divide the model's {heads} attention heads: each rank attends with "
            f"some of them; set cp to one of {divisors}"
        )


def _refused(parallel: ParallelSection, memory: MemorySection) -> Iterator[str]:
    others = "use dp_shard for parameters that do not fit, and cp for activations that do not"
    for axis in ("tp", "pp", "ep"):
        if (size := getattr(parallel, axis)) > 1:
            yield f"[policy.parallel] {axis} = {size}: world foundation models support only dp and cp; {others}"
    if parallel.sequence_parallel:
        yield "[policy.parallel] sequence_parallel = true goes with tp, which world foundation models do not have"
    if parallel.cp > 1 and memory.compile:
        yield (
            f"[policy.memory] compile = true does not go together with [policy.parallel] cp = {parallel.cp}, whose "
            "exchanges it would cut the compiled code at; set one of them off"
        )
