"""Reports of policy replicas: one per step, although every replica of the mesh sends one.

    reports = OncePerStep()
    reports.add("policy-1", 7, message, mesh=("policy-0", "policy-1"))     # []: policy-0 reports step 7
    reports.add("policy-0", 7, message, mesh=("policy-0", "policy-1"))     # [message]
    reports.remesh(("policy-1",))                                          # the steps that policy-0 never reported
    reports.flush()                                                        # all: no other reports will come

The first member of the mesh reports. Reports of the others are kept until it has sent its own, in case it is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger.state import FILTERED
from cosmos_rl_core.control.peers import Peers
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_core.wire.listening import SeldomLog

M = TypeVar("M")


class ProgressObserver(Protocol):
    """Receiver of a run's progress and metrics. Called from the controller's event loop: it must return quickly."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluated(self, version: int, metrics: Mapping[str, float], groups: list[RolloutGroup]) -> None: ...

    def rolled_back(self, version: int) -> None:
        """Drop the metrics of the steps from `version` on and of later versions: training continues from it."""
        ...


@dataclass(slots=True)
class OncePerStep(Generic[M]):
    """Reports of the mesh's first member, in the order of steps, each step once."""

    _last: int = -1
    """Newest step whose report was returned."""
    _kept: dict[int, dict[str, M]] = field(default_factory=dict)
    """Step -> replica -> report, of later steps."""

    def add(self, replica: str, step: int, report: M, *, mesh: tuple[str, ...]) -> list[M]:
        """Return the reports to record now. A report of a step that has one is ignored."""
        if step > self._last:
            self._kept.setdefault(step, {})[replica] = report
        return self.remesh(mesh)

    def remesh(self, mesh: tuple[str, ...]) -> list[M]:
        """Return the reports to record with these members; a lost member's steps are reported by another one."""
        newest = max((step for step, reports in self._kept.items() if mesh and mesh[0] in reports), default=self._last)
        return self._take(newest, mesh)

    def flush(self) -> list[M]:
        """Return all kept reports: the first member died before it sent its own, and the others have left."""
        return self._take(max(self._kept, default=self._last), ())

    def _take(self, newest: int, mesh: tuple[str, ...]) -> list[M]:
        """Return the report of each step up to `newest`: that of the oldest member which has sent one."""
        self._last = newest
        taken = []
        for step in sorted(step for step in self._kept if step <= newest):
            reports = self._kept.pop(step)
            taken.append(reports[next((name for name in mesh if name in reports), min(reports))])
        return taken

    def resume(self, last: int) -> None:
        """Continue after the report of this step."""
        self._last = last

    def roll_back(self, step: int) -> None:
        """Forget this step and the later ones, which are done again."""
        self._last = min(self._last, step - 1)
        self._kept = {kept: reports for kept, reports in self._kept.items() if kept < step}


@dataclass(slots=True, kw_only=True)
class PolicyReports:
    """Passes the metrics of steps, those of evaluations by supervised replicas, and complaints to an observer."""

    observer: ProgressObserver
    peers: Peers
    _steps: OncePerStep[p.StepDone] = field(default_factory=OncePerStep[p.StepDone])
    _versions: OncePerStep[p.Validated] = field(default_factory=OncePerStep[p.Validated])
    _complain: SeldomLog = field(init=False)

    def __post_init__(self) -> None:
        self._complain = SeldomLog(self.observer.note)

    def add(self, replica: str, message: p.StepDone | p.Validated | p.Alarm, *, mesh: tuple[str, ...]) -> None:
        """Receive a replica's report."""
        match message:
            case p.StepDone():
                self._record(self._steps.add(replica, message.step, message, mesh=mesh))
            case p.Validated():
                self._record(self._versions.add(replica, message.version, message, mesh=mesh))
            case p.Alarm() if replica in mesh or self._complain.due(message.message) is not None:
                self.observer.note(f"{replica}: {message.message}")

    def note_failure(self, replica: str, result: p.Deliver | p.Failed) -> None:
        """Note the first group that fails, and then one a minute, but none that was left out on purpose."""
        if isinstance(result, p.Failed) and not result.reason.startswith(FILTERED):
            self._complain("a group failed", f" ({replica}): {result.reason}")

    def resume(self, *, step: int, version: int) -> None:
        """Continue another controller's reports, after those of this step and of the evaluation of this version."""
        self._steps.resume(step)
        self._versions.resume(version)

    def remesh(self, mesh: tuple[str, ...]) -> None:
        """Record the reports of a lost first member that another one has sent."""
        self._record(self._steps.remesh(mesh))
        self._record(self._versions.remesh(mesh))

    def flush(self) -> None:
        """Record all reports that are kept for a first member: no policy is left."""
        self._record(self._steps.flush())
        self._record(self._versions.flush())

    def roll_back(self, version: int) -> None:
        """Expect the reports of the steps from `version` on, and of later versions, once more."""
        self._steps.roll_back(version)
        self._versions.roll_back(version + 1)

    def _record(self, messages: list[p.StepDone] | list[p.Validated]) -> None:
        for message in messages:
            if isinstance(message, p.StepDone):
                self.observer.step(message.step, {**message.metrics, **self.peers.metrics()})
            else:
                self.observer.evaluated(message.version, message.metrics, [])
