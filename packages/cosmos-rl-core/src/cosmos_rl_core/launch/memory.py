"""What to change in a recipe whose policy does not fit into a given memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cosmos_rl_core.config.policy import PolicySection
from cosmos_rl_core.config.problems import as_toml
from cosmos_rl_core.config.run import RunConfig
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.estimate import MemoryEstimate, estimate
from cosmos_rl_core.parallel.shape import ModelShape

Change = Mapping[str, Any]
"""Dotted keys of the recipe and their new values."""

MOST_CHANGES = 3
SMALLEST_MICROBATCH = 512
"""Tokens; smaller ones keep no device busy."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str) -> int:
    """Return "80GiB" as a number. Raises UserError for anything that is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|)", text.strip())
    if found is None:
        raise UserError(f"--memory {text}: write a size such as 80GiB, 24GB or 512MiB")
    return int(float(found[1]) * UNITS[found[2]])


def estimate_of(shape: ModelShape, policy: PolicySection) -> MemoryEstimate:
    """Return what the fullest rank of a policy replica holds with microbatches as full as the recipe allows."""
    dims = ParallelDims.of(policy.parallel, world_size=policy.world_size)
    return estimate(shape, dims=dims, policy=policy, tokens=policy.microbatch_terms * shape.tokens_per_term)


def changes_that_fit(shape: ModelShape, config: RunConfig, *, memory: int) -> list[Change]:
    """Return the first few changes, cheapest first, after which a rank needs at most `memory` bytes of its device."""
    found: list[Change] = []
    for change in _candidates(config, tokens_per_term=shape.tokens_per_term):
        policy = _changed(config.policy, change)
        if estimate_of(shape, policy).device <= memory and not any(_contains(change, other) for other in found):
            found.append(change)
        if len(found) == MOST_CHANGES:
            break
    return found


def written(change: Change) -> str:
    """Return a change as it stands on the command line: `policy.microbatch_terms=2048 ...`."""
    return " ".join(f"{key}={as_toml(value)}" for key, value in change.items())


def _candidates(config: RunConfig, *, tokens_per_term: int) -> Iterator[Change]:
    """Alone what costs least time first; then all of it together with more ranks."""
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
    if current == "none" and not policy.memory.compile:
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
    """Whether a change does all of another, and more, or goes further along the same keys."""
    return set(other) <= set(change)
