"""Files about a live run and its end: status.json, status.jsonl, outcome.json, timeline.json, and events of workers.

with ending.recorded(started):               # outcome.json, whatever happens inside
    reporter = Reporter(directory, status=..., phase=..., events=events, checks=...)
    reporting = asyncio.create_task(reporter.run())
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cosmos_rl_core.errors import TakenOver
from cosmos_rl_core.observe.record import (
    STOPPED,
    Events,
    RecordedOutcome,
    failure,
    last_checkpoint,
    read_outcome,
    read_start,
    record_outcome,
    resume_command,
)
from cosmos_rl_core.observe.slices import Slices, at_once, in_turns
from cosmos_rl_core.observe.startup import describe
from cosmos_rl_core.observe.thinned import ThinnedLog
from cosmos_rl_core.observe.trace import merge

STATUS_S = 1.0
"""Interval of status.json, unless it takes more than STATUS_SHARE of a processor: then it is longer."""
STATUS_SHARE, LONGEST_S = 0.01, 5.0
HISTORY_S = 5.0
"""First interval of status.jsonl; it doubles when the file is full."""
MOST_LINES = 2000
"""Of status.jsonl: then every second line is dropped."""
MOST_BYTES = 64 * 2**20
"""Of status.jsonl, likewise: a line of 4,096 workers takes half a MB."""


class StatusLog:
    """status.jsonl: status.json over time, every HISTORY_S and after each change of workers and phase.

    The file has at most MOST_LINES lines and about MOST_BYTES: old ones are thinned out as the run grows longer.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = ThinnedLog(path, every_s=HISTORY_S, most_lines=MOST_LINES, most_bytes=MOST_BYTES)
        self._clock = clock
        self._due = -1.0
        self._state: Any = None

    def add(self, status: Mapping[str, Any], states: Mapping[str, str]) -> None:
        """Append a status if a line is due, or if it differs in more than numbers. states: of the members by name."""
        state = (status["phase"], status["generation"], states)
        if self._clock() < self._due and state == self._state:
            return
        self._log.add(msgspec.json.encode(status))
        self._state, self._due = state, self._clock() + self._log.every_s


class Reporter:
    """Writes the state of a live run, every second, and workers that come and go into events.jsonl."""

    def __init__(
        self,
        directory: Path,
        *,
        status: Callable[[str], Slices[Mapping[str, Any]]],
        phase: Callable[[], str],
        events: Events,
        checks: Sequence[Callable[[], None]],
        is_taken_over: Callable[[], bool],
        note: Callable[[str], None],
        starting: Callable[[Sequence[tuple[str, str, float]]], None],
    ) -> None:
        """status: returns the state of the run, for its phase. checks: called every second.
        is_taken_over: whether another controller reports.

        note: shows an error of these functions to the user; each one once. starting: receives name, phase and seconds
        of each worker that starts.
        """
        self._directory = directory
        self._status = status
        self._phase = phase
        self._events = events
        self._checks = checks
        self._is_taken_over = is_taken_over
        self._note = note
        self._noted: set[str] = set()
        self._log = StatusLog(directory / "status.jsonl")
        self._starting = starting
        self._states: dict[str, str] = {}
        self._phases: dict[str, str] = {}

    async def run(self) -> None:
        """Report every second, also after an error, which does not end the run: training does not depend on reports."""
        while True:
            spent: list[float] = []
            try:
                await in_turns(self._check_and_report(), spent.append)
            except TakenOver:
                return
            await asyncio.sleep(status_interval(sum(spent)))

    def _check_and_report(self) -> Slices[None]:
        for check in self._checks:
            with self._errors_shown():
                check()
        with self._errors_shown():
            yield from self._report(self._phase())

    @contextlib.contextmanager
    def _errors_shown(self) -> Iterator[None]:
        try:
            yield
        except TakenOver:
            raise
        except Exception as error:
            if repr(error) not in self._noted:
                self._noted.add(repr(error))
                trace = "".join(traceback.format_exception(error)).rstrip()
                self._note(f"the state of the run could not be reported; the run continues:\n{trace}")

    def report(self, phase: str) -> None:
        """Write the state now. A full or removed disk must not end the run here, where nothing is lost."""
        at_once(self._report(phase))

    def _report(self, phase: str) -> Slices[None]:
        status = yield from self._status(phase)
        if self._is_taken_over():
            return
        states = {member.name: member.state for member in status["members"]}
        if states != self._states:
            self._events.add("worker", *worker_changes(self._states, states))
        self._states = states
        starting = [(member.name, member.phase, member.phase_s) for member in status["members"] if member.phase]
        phases = {name: phase for name, phase, _ in starting}
        if phases != self._phases:
            self._events.add("worker", *phase_changes(self._phases, status["members"]))
            self._phases = phases
        self._starting(starting)
        temporary = self._directory / "status.tmp"
        with contextlib.suppress(OSError):
            temporary.write_bytes(msgspec.json.encode(status))
            temporary.replace(self._directory / "status.json")
            self._log.add(status, states)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # a part of it, on a full disk


def status_interval(cpu_s: float) -> float:
    """Return the seconds to the next status after one that took `cpu_s` of a processor."""
    return min(LONGEST_S, max(STATUS_S, cpu_s / STATUS_SHARE))


def worker_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return a line for each worker whose state differs, by name -> state: "rollout-0: joining -> ready"."""
    gone = {name: "gone" for name in before if name not in after}
    return [
        f"{name}: {before.get(name, 'new')} -> {state}"
        for name, state in {**after, **gone}.items()
        if before.get(name) != state
    ]


def phase_changes(before: Mapping[str, str], members: Iterable[Any]) -> list[str]:
    """Return a line for each worker in another phase of its start: "rollout-0: reading weights, after 3.1 s".

    before: name -> phase; empty after the start, as in `members`, which are those of a status.
    """
    lines = []
    for member in members:
        earlier = before.get(member.name, "")
        if member.phase == earlier:
            continue
        spent = describe(member.started)
        if member.phase:
            lines.append(f"{member.name}: {member.phase}" + (f", after {spent}" if spent else ""))
        elif spent:  # nothing of a worker that was lost
            lines.append(f"{member.name}: started in {spent}")
    return lines


class LastState(NamedTuple):
    """The state of a run when it ends."""

    step: int = 0
    checkpoint: str = ""
    worker: str = ""
    """The worker whose error ends the run."""


@dataclass(slots=True)
class Ending:
    """Writes outcome.json."""

    directory: Path
    position: Callable[[], LastState] = LastState

    @contextlib.contextmanager
    def recorded(self, started: float) -> Iterator[None]:
        """Write outcome.json for the error that ends the body. started: in Unix seconds."""
        try:
            yield
        except TakenOver:
            raise  # the run goes on under another controller
        except BaseException as error:
            position = self.position()
            self._write(failure(error, self.directory, worker=position.worker), position, started=started)
            raise

    def finished(self, *, step: int, checkpoint: str, interrupted: bool, stopped: str = "", started: float) -> None:
        """Write outcome.json for a run that ended in good order. stopped: the monitor's reason for its end."""
        if interrupted:
            outcome = RecordedOutcome(state="interrupted", message="interrupted by the user", exit_code=130)
        elif stopped:
            outcome = RecordedOutcome(state="stopped", message=stopped, exit_code=STOPPED)
        else:
            outcome = RecordedOutcome(state="done")
        self._write(outcome, LastState(step=step, checkpoint=checkpoint), started=started)

    def killed(self, text: str) -> None:
        """Write outcome.json for a run whose last controller was killed, unless the run had ended before."""
        if read_outcome(self.directory) is not None:
            return
        checkpoint, start = last_checkpoint(self.directory), read_start(self.directory)
        step = int(checkpoint.rpartition("_")[2]) if checkpoint else 0
        outcome = RecordedOutcome(state="failed", message=text, exit_code=1)
        started = time.time() if start is None else start.started
        self._write(outcome, LastState(step=step, checkpoint=checkpoint), started=started)

    def _write(self, outcome: RecordedOutcome, position: LastState, *, started: float) -> None:
        done, ended = outcome.state == "done", time.time()
        outcome = msgspec.structs.replace(
            outcome,
            step=position.step,
            checkpoint=position.checkpoint,
            resume="" if done else resume_command(self.directory, checkpoint=position.checkpoint),
            ended=ended,
            wall_s=ended - started,
        )
        with contextlib.suppress(OSError):  # removed or full: must not hide the error that ended the run
            record_outcome(self.directory, outcome)
            events = Events(self.directory)
            events.step = outcome.step
            events.add("end", f"{outcome.state}: {outcome.message}" if outcome.message else outcome.state)


def write_timeline(directory: Path, *, note: Callable[[str], None], unless: bool) -> None:
    """Merge the spans of a run's processes into timeline.json. unless: write nothing."""
    parts = [] if unless else sorted((directory / "spans").glob("*.jsonl"))
    try:
        if parts:
            merge(parts, directory / "timeline.json")
    except OSError as error:  # must not hide the error that ended the run
        note(f"timeline.json could not be written: {error.strerror}")
