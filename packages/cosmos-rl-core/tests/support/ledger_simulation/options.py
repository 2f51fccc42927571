"""Sizes and faults of a simulated run, and the report of what happened in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes and faults of a simulated run. Durations are in simulated seconds."""

    rollouts: int = 6
    policies: int = 2
    groups_per_step: int = 4
    max_staleness: int = 1
    interval: int = 1
    """Rollout replicas load the versions that are divisible by it, a later one if they were busy."""
    max_steps: int = 16
    capacity: int = 2
    """Groups a rollout replica works on at once."""
    checkpoint_every: int = 3
    faults_until_s: float = 25.0
    """When faults stop; after that the run must end."""
    finish_within_s: float = 120.0
    """How long after that it may take."""
    drop: float = 0.01
    """Share of messages lost, either way."""
    duplicate: float = 0.01
    """Share of messages that arrive twice."""
    long_delay: float = 0.02
    """Share of messages that take up to 3 s and are overtaken by others."""
    mean_between_faults_s: float = 1.0
    """Of kills, hangs, cut connections, deaths of all policies, and controller crashes together."""
    mean_between_losses_s: float = 1.0
    """Of payloads that are gone when the policy reads them."""
    repeats: bool = True
    """Whether replicas repeat what was not answered. False: they send it once on a connection, as real ones do, and
    the network loses nothing."""
    mean_between_pauses_s: float = math.inf
    """Of one replica that stops, the controller, or all of them, and of jumps of the controller's clock."""
    pauses_of: tuple[str, ...] = ("replica", "controller", "all", "clock")
    counts_pauses: bool = False
    """Whether the ledger's clock goes on while the controller is stopped."""
    ack_before_durable: bool = False
    """Breaks the rule that outputs wait for the journal; for checking the checker."""

    @classmethod
    def for_seed(cls, seed: int) -> Options:
        """Return a mixture of small and middling runs; every 25th has over 300 replicas."""
        random = Random(f"options {seed}")
        is_large = seed % 25 == 24
        rollouts = random.randint(300, 340) if is_large else random.choice((1, 3, 8, 16))
        groups_per_step = 64 if is_large else random.choice((1, 3, 8))
        max_steps = 8 if is_large else random.choice((10, 25, 50))
        capacity = random.choice((1, 2, 4))
        seconds_per_step = 1.0 + groups_per_step / (rollouts * capacity)  # a group takes 0.6 s on average
        return cls(
            rollouts=rollouts,
            policies=random.choice((1, 2, 3)),
            groups_per_step=groups_per_step,
            max_staleness=random.choice((0, 1, 1, 3)),
            max_steps=max_steps,
            capacity=capacity,
            faults_until_s=random.choice((10.0, 20.0, 40.0)),
            finish_within_s=60.0 + 3 * max_steps * seconds_per_step,
            drop=random.choice((0.0, 0.01, 0.05)),
            duplicate=random.choice((0.0, 0.01, 0.05)),
            long_delay=random.choice((0.0, 0.02, 0.1)),
            mean_between_faults_s=random.choice((0.3, 1.0, 3.0)),
            mean_between_losses_s=random.choice((0.3, 1.0, 3.0)),
        )


@dataclass(slots=True)
class Report:
    """What happened in a run that kept all the rules."""

    seed: int
    simulated_s: float = 0.0
    events: int = 0
    """Events the ledger took."""
    records: int = 0
    steps: int = 0
    """Commits, those undone later included."""
    rollbacks: int = 0
    crashes: int = 0
    """Of the controller."""
    kills: int = 0
    hangs: int = 0
    pauses: int = 0
    removed: int = 0
    """Members that left or were lost."""
    goodbyes: int = 0
    """Workers that left in good order."""
    accusations: int = 0
    """Policies that could not reach others of their mesh."""
    cuts: int = 0
    """Connections cut while the process lived on."""
    losses: int = 0
    """Groups whose payload was gone when the policy read it."""
    unheld: int = 0
    """Groups that were in nobody's memory after a crash of the controller."""
    reissued: int = 0
    """Leases that were not the first of their sample."""
    digest: str = ""
    """Of all records and of the final state: equal for equal seed, options and code."""
