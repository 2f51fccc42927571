"""`cosmos-rl plan`: what a run will start and hold, computed from its recipe alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cosmos_rl_core.assemble import build_sync
from cosmos_rl_core.config.load import load_domain
from cosmos_rl_core.config.run import RunConfig
from cosmos_rl_core.launch.run import threads
from cosmos_rl_core.launch.terminal import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The replicas that do one job."""

    role: str
    replicas: int
    processes: int
    """Of all replicas; 0 where they live in the controller's."""
    threads: int | None
    """CPU threads of one replica; None where all roles live in one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the model's weights take, in bytes, per replica; activations and caches come on top."""

    parameters: int
    policy_bytes: int
    """Weights in float32."""
    gradient_bytes: int
    optimizer_bytes: int
    engine_bytes: int
    """Live weights and the staged next version; 0 for supervised fine-tuning."""
    sync_bytes: int
    """On the wire for each version, to all rollout replicas."""
    sync_lower_bound_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run before it starts."""

    name: str
    placement: str
    cores: int
    roles: tuple[Role, ...]
    prompts_per_step: int
    rollouts_per_step: int
    """0 for supervised fine-tuning."""
    groups_in_flight: int
    """Most groups leased, ready or in training at once: (max_staleness + 1) * prompts_per_step."""
    generated_terms_per_step: int
    """Upper bound: every rollout as long as [rollout.sampling] max_terms."""
    microbatch_terms: int
    weights: Weights | None
    """None where the model is not on this machine."""

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON-like values."""
        return asdict(self)

    def __str__(self) -> str:
        """Tables: the roles, the amounts of one step, and the weights where they are known."""
        roles = [(r.role, r.replicas, r.processes, r.threads or "shared") for r in self.roles]
        amounts = [
            ("prompts a step", self.prompts_per_step),
            ("rollouts a step", self.rollouts_per_step),
            ("groups in flight", f"at most {self.groups_in_flight}"),
            ("generated terms a step", f"at most {self.generated_terms_per_step}"),
            ("terms a forward pass", f"at most {self.microbatch_terms}"),
        ]
        head = f"{self.name}: {self.placement}, {self.cores} cores"
        header = ("role", "replicas", "processes", "threads")
        parts = [head, table(roles, header=header), table(amounts)]
        if self.weights is None:
            parts.append("weights: known once the model is on this machine")
        else:
            parts.append(table(_weight_rows(self.weights)))
        return "\n\n".join(parts)


def plan(config: RunConfig) -> Plan:
    """Return roles, processes and amounts of a run."""
    prompts = config.policy.prompts_per_step
    rollouts = 0 if config.is_sft else prompts * config.rollout.group_size
    return Plan(
        name=config.run.name,
        placement=config.run.placement,
        cores=len(os.sched_getaffinity(0)),
        roles=tuple(_roles(config)),
        prompts_per_step=prompts,
        rollouts_per_step=rollouts,
        groups_in_flight=0 if config.is_sft else (config.sync.max_staleness + 1) * prompts,
        generated_terms_per_step=rollouts * config.rollout.sampling.max_terms,
        microbatch_terms=config.policy.microbatch_terms,
        weights=_weights(config),
    )


def _weights(config: RunConfig) -> Weights | None:
    specs = load_domain(config.run.domain).weight_specs(config.model)
    if not specs:
        return None
    parameters = sum(math.prod(spec.shape) for spec in specs)
    moments = {"sgd": 1, "adam": 2, "adamw": 2}[config.policy.optimizer.name]
    sync: Mapping[str, int] = {"bytes": 0, "lower_bound_bytes": 0}
    if not config.is_sft:
        section = config.sync
        sync = build_sync(config).plan(
            specs, dtype=section.dtype, bucket_bytes=section.bucket_bytes, replicas=config.rollout.replicas
        )
    return Weights(
        parameters=parameters,
        policy_bytes=4 * parameters,
        gradient_bytes=4 * parameters,
        optimizer_bytes=4 * moments * parameters,
        engine_bytes=0 if config.is_sft else 8 * parameters,
        sync_bytes=sync["bytes"],
        sync_lower_bound_bytes=sync["lower_bound_bytes"],
    )


def _weight_rows(weights: Weights) -> list[tuple[str, str]]:
    rows = [
        ("parameters", f"{weights.parameters:,}"),
        (
            "policy: weights, gradients, optimizer",
            _mebibytes(weights.policy_bytes, weights.gradient_bytes, weights.optimizer_bytes),
        ),
    ]
    if weights.sync_bytes:
        ratio = weights.sync_bytes / weights.sync_lower_bound_bytes
        rows += [
            ("rollout: weights, live and staged", _mebibytes(weights.engine_bytes)),
            ("weight sync, each version", f"{_mebibytes(weights.sync_bytes)}, {ratio:.2f} x the lower bound"),
        ]
    return rows


def _mebibytes(*sizes: int) -> str:
    return " + ".join(f"{size / 2**20:,.0f}" for size in sizes) + " MiB"


def _roles(config: RunConfig) -> list[Role]:
    policy_threads, rollout_threads = threads(config)
    workers = [("policy", config.policy.replicas, policy_threads)]
    if not config.is_sft:
        workers.append(("rollout", config.rollout.replicas, rollout_threads))
    apart = config.run.placement == "local"
    controller = Role(role="controller", replicas=1, processes=1, threads=1 if apart else None)
    return [
        controller,
        *(
            Role(
                role=role,
                replicas=replicas,
                processes=replicas if apart else 0,
                threads=count if apart else None,
            )
            for role, replicas, count in workers
        ),
    ]
