"""Evaluations: every held-out row gets one rollout, from weights of one version.

    version committed -> evaluation due? -> rows leased to replicas with that version -> metrics -> training resumes

During an evaluation no prompt is leased and no batch is assigned.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.peers import Peers, WorkerPeer
from cosmos_rl_core.control.settings import ControllerSettings
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.wire.payload import decode_group


class Evaluation:
    """Leases rows and collects the scored groups.

    ids = evaluation.lease("rollout-0", capacity=16)
    evaluation.deliver(3, group)
    evaluation.done -> evaluation.metrics()
    """

    def __init__(self, *, version: int, rows: int, by: Sequence[str] = (), lineage: int = 0) -> None:
        """by: columns of the rows; each of their values gets its own mean reward."""
        self.version = version
        self.lineage = lineage
        self.groups: dict[int, RolloutGroup] = {}
        self.failures: dict[int, str] = {}
        """Rows that failed, with the reason; they are left out of the mean reward."""
        self._rows = rows
        self._by = by
        self._waiting = deque(range(rows))
        self._leased: dict[int, str] = {}

    @property
    def done(self) -> bool:
        return len(self.groups) + len(self.failures) == self._rows

    @property
    def progress(self) -> str:
        return f"evaluating version {self.version}: {len(self.groups)} of {self._rows} rows"

    def lease(self, replica: str, *, capacity: int) -> list[int]:
        ids = [self._waiting.popleft() for _ in range(min(capacity, len(self._waiting)))]
        self._leased |= dict.fromkeys(ids, replica)
        return ids

    def deliver(self, row: int, group: RolloutGroup) -> None:
        if row in self._leased and row not in self.failures:
            self.groups[row] = group

    def fail(self, row: int, reason: str) -> None:
        if row in self._leased and row not in self.groups:
            self.failures[row] = reason

    def release(self, replica: str, *, but: Collection[int] = ()) -> None:
        """Requeue the undelivered rows of a lost replica, at the front, or those that it does not hold any more."""
        lost = [row for row, holder in self._leased.items() if holder == replica and not self._answered(row)]
        for row in reversed([row for row in lost if row not in but]):
            del self._leased[row]
            self._waiting.appendleft(row)

    def first_reasons(self) -> list[str]:
        """Return up to three of the reasons for which rows failed."""
        return sorted(set(self.failures.values()))[:3]

    def metrics(self) -> Mapping[str, float]:
        rollouts = [rollout for row in sorted(self.groups) for rollout in self.groups[row].rollouts]
        if not rollouts:
            return {"eval/rows": 0.0, "eval/failed": float(len(self.failures))}
        names = rollouts[0].reward_breakdown
        return {
            "eval/reward_mean": float(np.mean([r.reward for r in rollouts])),
            **{f"eval/reward/{name}": float(np.mean([r.reward_breakdown[name] for r in rollouts])) for name in names},
            **self._by_label(),
            "eval/terms_mean": float(np.mean([r.num_terms for r in rollouts])),
            "eval/rows": float(len(rollouts)),
            "eval/failed": float(len(self.failures)),
        }

    def _by_label(self) -> dict[str, float]:
        """The mean reward for each value of the columns `by`."""
        values: dict[str, list[float]] = {}
        for row in sorted(self.groups):
            group = self.groups[row]
            for label in row_labels(group.prompt.row, self._by):
                values.setdefault(label, []).extend(rollout.reward for rollout in group.rollouts)
        return {f"eval/reward_mean {label}": float(np.mean(values[label])) for label in sorted(values)}

    def _answered(self, row: int) -> bool:
        return row in self.groups or row in self.failures


def row_labels(row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Return the labels of a row: "task=faucet-open" for each column."""
    return [f"{column}={row.get(column, '')}" for column in columns]


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """The evaluations of a run."""

    source: PromptSource | None
    """The held-out rows; None: no evaluation."""
    job: ControllerSettings
    current: Evaluation | None = None
    _done: set[int] = field(default_factory=set)

    def resume(self, version: int) -> None:
        """Do not repeat the evaluation of this version, which another controller finished."""
        self._done.add(version)

    def begin_if_due(self, version: int, *, lineage: int = 0, last: bool = False) -> bool:
        """Start the evaluation of `version` if it is due and was not done."""
        last = last or version == self.job.max_steps
        every_steps = self.job.eval_every_steps
        due = version == 0 or last or (every_steps > 0 and version % every_steps == 0)
        if self.source is None or not due or version in self._done:
            return False
        self._begin(version, lineage)
        return True

    def _begin(self, version: int, lineage: int) -> None:
        assert self.source is not None
        self.current = Evaluation(version=version, rows=len(self.source), by=self.job.eval_by, lineage=lineage)
        self._done.add(version)

    def roll_back(self, version: int, *, lineage: int) -> None:
        """Evaluate later versions again. The current evaluation ends, or starts again with the new lineage."""
        self._done = {done for done in self._done if done <= version}
        evaluated, self.current = self.current, None
        if evaluated is not None and evaluated.version <= version:
            self._begin(evaluated.version, lineage)

    def request(self, peer: WorkerPeer, message: p.RequestLeases) -> None:
        """Grant rows to a replica that has the version; defer every other request to the end of the evaluation."""
        assert self.current is not None and self.source is not None
        peer.deferred = message
        if message.version < self.current.version or message.lineage != self.current.lineage:
            return
        # A row needs one sequence, a training group as many as it has rollouts.
        ids = self.current.lease(peer.name, capacity=message.capacity * self.job.group_size)
        if ids:
            peer.deferred = None
            leased = (p.LeasedPrompt(sample=row, attempt=self.current.version, evaluation=True) for row in ids)
            peer.post(p.Grant(tuple(with_row(prompt, self.source) for prompt in leased)))

    def finish(self, message: p.Deliver | p.Failed) -> Evaluation | None:
        """Record a row's result. Return the evaluation if it was the last one.

        A result is of the current evaluation if the attempt of its lease is the evaluation's version.
        """
        current = self.current
        if current is None or self.source is None:
            return None
        if (message.lineage, message.attempt) != (current.lineage, current.version):
            return None
        if isinstance(message, p.Failed):
            current.fail(message.sample, message.reason)
        else:
            assert isinstance(message.payload, bytes), "an evaluation's groups are never spooled"
            group = decode_group(message.payload)
            current.deliver(message.sample, replace(group, prompt=self.source[message.sample]))
        if not current.done:
            return None
        self.current = None
        return current

    def lose(self, replica: str, peers: Peers, *, but: Collection[int] = ()) -> None:
        """Lease the rows of a lost replica to others; of one that is on a new connection, all `but` those it holds."""
        if self.current is None:
            return
        self.current.release(replica, but=but)
        for other in peers.of_role("rollout"):
            if other.deferred is not None:
                self.request(other, other.deferred)

    def waits(self) -> list[str]:
        """Progress of the current evaluation as text; empty without one."""
        return [self.current.progress] if self.current is not None else []


def with_row(leased: p.LeasedPrompt, source: PromptSource) -> p.LeasedPrompt:
    """Return the lease with its row of the source, as it is sent to a replica."""
    prompt = source[leased.sample]
    return msgspec.structs.replace(leased, row=json.dumps(dict(prompt.row)).encode(), origin=prompt.origin)
