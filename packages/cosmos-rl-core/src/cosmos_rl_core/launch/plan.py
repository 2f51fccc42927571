"""`cosmos-rl plan`: what a run will start and hold, computed from its recipe alone."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

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

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON-like values."""
        return asdict(self)

    def __str__(self) -> str:
        """Two tables: the roles, and the amounts of one step."""
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
        return "\n\n".join([head, table(roles, header=header), table(amounts)])


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
    )


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
