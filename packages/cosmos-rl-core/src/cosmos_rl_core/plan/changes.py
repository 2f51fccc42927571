"""Changes of the recipe with which a policy rank needs less memory, cheapest in time first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.parallel.config import PolicySection
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.plan.memory import parse_bytes, policy_needs, rollout_needs
from cosmos_rl_core.plan.shape import ModelShape
from cosmos_rl_core.recipe.load import load_domain
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.settings.problems import as_toml

Change = Mapping[str, Any]
"""Dotted keys of the recipe and their new values."""

MOST_CHANGES = 3
WITH_ROOM = 0.8
"""Part of the plan's bytes that a policy rank may need after it ran out of memory."""
SMALLEST_MICROBATCH = 512
"""Tokens; smaller microbatches do not use a device efficiently."""


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
        if fits and not any(set(other) <= set(change) for other in fitting):
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
