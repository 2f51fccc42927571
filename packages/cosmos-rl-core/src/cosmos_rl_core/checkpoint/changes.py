"""The keys in which a resumed run's recipe differs from its checkpoint's, and the effect of each: refused or reported.

changes(saved, now)         Change(key="rollout.replicas", was=1, now=2) and so on
notes_of(changes)           "changed since the checkpoint: rollout.replicas was 1 and is 2 (another layout ...)"
refused(changes)            those that the weights, the optimizer or the position in the data depend on
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.settings.problems import as_toml

REFUSED = "refused"
TRAINING = "training differs from here on"
LENGTH = "the run ends at another step, and a schedule of the learning rate is stretched to it"
LAYOUT = "another layout: sums round differently, and nothing else changes"
MEASURED = "metrics before and after may not be comparable"
BESIDE = "no effect on the training"
EFFECTS: Mapping[str, str] = {
    "agent": TRAINING,
    "agent.max_episodes": BESIDE,
    "agent.port": BESIDE,
    "agent.retries": BESIDE,
    "agent.timeout_s": BESIDE,
    "algorithm": TRAINING,
    "checkpoint": BESIDE,
    "cluster": BESIDE,
    "data": REFUSED,
    "data_regularization": TRAINING,
    "elastic": BESIDE,
    "environment": TRAINING,
    "environment.max_episodes": BESIDE,
    "environment.retries": BESIDE,
    "environment.timeout_s": BESIDE,
    "eval": MEASURED,
    "eval.held_out": REFUSED,
    "logging": BESIDE,
    "model": REFUSED,
    "model.dtype": TRAINING,
    "model.lora.serve": TRAINING,
    "monitor": MEASURED,
    "policy": TRAINING,
    "policy.collective_timeout_s": BESIDE,
    "policy.memory": LAYOUT,
    "policy.microbatch_terms": LAYOUT,
    "policy.num_nodes": LAYOUT,
    "policy.optimizer.name": REFUSED,
    "policy.parallel": LAYOUT,
    "policy.prompts_per_step": REFUSED,
    "policy.ranks_per_node": LAYOUT,
    "policy.replicas": LAYOUT,
    "policy.threads": LAYOUT,
    "prompts.curriculum": TRAINING,
    "prompts.epochs": LENGTH,
    "prompts.shuffle": REFUSED,
    "reward": TRAINING,
    "reward.timeout_s": BESIDE,
    "rollout": TRAINING,
    "rollout.group_size": REFUSED,
    "rollout.parallel": LAYOUT,
    "rollout.replicas": LAYOUT,
    "rollout.spool": BESIDE,
    "rollout.threads": LAYOUT,
    "run": BESIDE,
    "run.deterministic": TRAINING,
    "run.domain": REFUSED,
    "run.max_steps": LENGTH,
    "run.seed": REFUSED,
    "run.tf32": TRAINING,
    "sync": BESIDE,
    "sync.dtype": TRAINING,
    "sync.interval": TRAINING,
    "sync.max_staleness": TRAINING,
    "teacher": TRAINING,
    "tls": BESIDE,
}
"""Effect of a change by key or section; the longest that contains a key applies to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """A key with two values."""

    key: str
    """Dotted. A section that only one of the recipes has is one change."""
    was: Any
    """In the checkpoint's recipe; None if it was not set."""
    now: Any

    @property
    def effect(self) -> str:
        """Of `EFFECTS`. A key that is not there counts as one that changes the training."""
        key = self.key
        while key and key not in EFFECTS:
            key = key.rpartition(".")[0]
        return EFFECTS.get(key, TRAINING)

    def __str__(self) -> str:
        return f"{self.key} was {_written(self.was)} and is {_written(self.now)}"


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[KeyChange]:
    """Yield the keys that differ, in the order of `now`. Both are recipes as JSON, with the keys that are not set.

    A key that only one of them has belongs to another release, and is no change, except in tables of free keys.
    """
    free = prefix.endswith("options.") or prefix == "policy.optimizer.rates."
    for name in dict.fromkeys([*now, *saved]):
        if not free and not (name in saved and name in now):
            continue
        key, before, after = f"{prefix}{name}", saved.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changes(before, after, f"{key}.")
        elif before != after:
            yield KeyChange(key=key, was=before, now=after)


def refused(key_changes: Iterable[KeyChange]) -> list[KeyChange]:
    """Return the changes with which the checkpoint cannot be resumed."""
    return [change for change in key_changes if change.effect == REFUSED]


def notes_of(key_changes: Iterable[KeyChange]) -> Iterator[str]:
    """Yield a note for each effect of the others, with its keys."""
    changed = list(key_changes)
    for effect in dict.fromkeys((TRAINING, LENGTH, LAYOUT, MEASURED, BESIDE)):
        if keys := [str(change) for change in changed if change.effect == effect]:
            yield f"changed since the checkpoint: {', '.join(keys)} ({effect})"


def _written(value: Any) -> str:
    return "not set" if value is None else as_toml(value)
