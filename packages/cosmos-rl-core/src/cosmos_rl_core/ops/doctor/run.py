"""The diagnosis of a run from its files, and from the processes of this machine.

it has ended      outcome.json, known causes of its error
it is alive       the chain of waits, with a verdict about its last process and, on demand, that one's stacks
both              sentences about its metrics, and symptoms
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from cosmos_rl_core.control.status import lost_host
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.interfaces import Check, Level
from cosmos_rl_core.observe.console import duration
from cosmos_rl_core.observe.record import EVENTS
from cosmos_rl_core.ops.dashboard.health import HealthFinding
from cosmos_rl_core.ops.dashboard.lines import FileRows
from cosmos_rl_core.ops.dashboard.run import RecordedRun
from cosmos_rl_core.ops.doctor.activity import Activity, Spans
from cosmos_rl_core.ops.doctor.network import weight_ports
from cosmos_rl_core.ops.doctor.report import render
from cosmos_rl_core.ops.doctor.stacks import InspectedProcess, stacks_of, worker_processes
from cosmos_rl_core.ops.doctor.symptoms import Facts, symptoms
from cosmos_rl_core.ops.doctor.verdict import Situation, fix_of, verdict
from cosmos_rl_core.ops.doctor.waits import ROLES, WEIGHTS, Wait, chain, waits_of
from cosmos_rl_core.workers.directory import lock_holder

LEVELS: Mapping[str, Level] = {"bad": "bad", "warn": "note", "good": "ok"}
"""Levels of the sentences about metrics."""
ORDER = ("bad", "note", "ok")
LIVE = ("live", "silent")
GONE = ("dead", "elsewhere")


class Diagnosis(NamedTuple):
    """The diagnosis of a run."""

    title: str
    waits: tuple[str, ...]
    """Lines of the status from the one that waits to the one that is waited for; empty without a wait."""
    when: str
    """"waits" of a live run; of one that is gone the moment of its last status."""
    checks: tuple[Check, ...]
    """The worst first."""
    stacks: str
    """Stacks of the last process's threads; empty if they were not asked for."""

    def __str__(self) -> str:
        chain = "\n".join(f"{'  ' * depth}{text}" for depth, text in enumerate(self.waits))
        parts = [self.title, chain and f"{self.when}:\n{indent(chain, '  ')}", render(self.checks), self.stacks]
        return "\n\n".join(part for part in parts if part)

    def as_json(self) -> dict[str, Any]:
        checks = [check._asdict() for check in self.checks]
        return {
            "title": self.title,
            "when": self.when,
            "waits": list(self.waits),
            "checks": checks,
            "stacks": self.stacks,
        }


def examine_run(run_dir: Path, *, stacks: bool = False, now: float | None = None) -> Diagnosis:
    """Examine a run. stacks: also those of the process that others wait for, on this machine.

    now: in Unix seconds; default: the present of a live run, and the last moment of another one. Raises UserError for a
    directory without a run.
    """
    run = RecordedRun(run_dir, run_dir.name)
    overview = run.overview()
    status, outcome, start = overview["status"], overview["outcome"], overview["start"]
    if "time" not in status and not outcome:
        raise UserError(_not_started(run_dir))
    now = now if now is not None else time.time() if status["life"] in LIVE else float(status.get("time", time.time()))
    spans, recipe = Spans(run_dir), run.recipe()
    facts = Facts(
        status=status,
        outcome=outcome,
        start=start,
        recipe=recipe,
        curves=run.curves,
        rollouts=run.rollouts,
        spans=spans,
        events=FileRows(run_dir / EVENTS, most_bytes=2**20).read(),
        machines=run.machines.read(),
    )
    checks = [Check(LEVELS[each["level"]], "run", *_sentence(each)) for each in overview["health"]]
    checks += symptoms(facts)
    waits: list[Wait] = []
    text = ""
    if status["life"] in LIVE:
        processes = worker_processes(run_dir)
        at = Situation(
            status,
            activities=spans.open(now=now),
            recipe=recipe,
            started_s=max(0.0, now - float(start.get("started", now))),
            troubles=_troubles(processes),
            silent_s=spans.silent_s(now=now),
        )
        waits = chain(waits_of(status), status.get("members", ()), stopped=at.troubles)
        checks = [verdict(waits, at), *_stalls(at, waits), *_clocks(spans), *checks]
        awaited = any(wait.awaited == WEIGHTS for wait in waits)
        checks += weight_ports(status.get("members", ()), awaited=awaited)
        if status["life"] == "silent":
            checks.insert(0, _silent(status, host=lost_host(run_dir)))
        text = _stacks(waits, at, processes, run_dir) if stacks else ""
    elif status["life"] in GONE:
        waits = chain(waits_of(status), status.get("members", ()))
        checks = [*checks, *_was_in(spans.open(now=now))]
    if stacks and status["life"] not in LIVE:
        text = "stacks: the run is not live on this machine"
    checks = sorted(dict.fromkeys(checks), key=lambda check: ORDER.index(check.level))
    when = "waits" if status["life"] in LIVE else "when it was last seen"
    lines = tuple(dict.fromkeys(wait.text for wait in waits))
    return Diagnosis(_title(run_dir, status), lines, when, tuple(checks), text)


def _was_in(activities: Iterable[Activity]) -> list[Check]:
    """Return what each process of a run that is gone was doing at the time of its last status."""
    checks = []
    for activity in activities:
        usual = "" if activity.usual_s is None else f"; usual: {activity.usual_s:.2g} s"
        text = f"{activity.process} was in {activity.span!r}, for {duration(activity.seconds)}{usual}"
        checks.append(Check("note", "last seen", text))
    return checks


def _silent(status: Mapping[str, Any], *, host: str) -> Check:
    """Return the line of a controller that writes no status. host: of another machine, where it is not looked for."""
    life = f"on {host}" if host else "is alive and"
    text = f"its process {status.get('pid', '?')} {life} has written no status for {duration(status['age_s'])}"
    fix = "it is stopped (kill -CONT), its disk hangs, or py-spy dump --pid shows its code; a second one can take over"
    return Check("bad", "controller", text, fix)


def _not_started(run_dir: Path) -> str:
    if lock_holder(run_dir) is not None or (run_dir / "launch").is_dir():
        return f"{run_dir}: its controller has written no status yet; cosmos-rl status {run_dir} shows its jobs"
    if not run_dir.exists():
        return f"{run_dir}: no such directory"
    return f"{run_dir}: no run has started here (it has no status.json)"


def _title(run_dir: Path, status: Mapping[str, Any]) -> str:
    life = status["life"]
    if life == "silent":
        life = f"live, but its controller has written nothing for {duration(status['age_s'])}"
    elif life == "elsewhere":
        life = f"unknown, last seen {duration(status['age_s'])} ago on another machine"
    elif life == "dead":
        life = f"its controller is gone, last seen {duration(status['age_s'])} ago"
    return f"{run_dir}: {life}; {status.get('phase', '?')}, step {status.get('step', '?')}"


def _sentence(entry: Mapping[str, Any]) -> tuple[str, str]:
    finding = HealthFinding(**entry)
    return finding.text, finding.key


def _troubles(processes: Iterable[InspectedProcess]) -> dict[str, tuple[str, str]]:
    """Return a sentence and a remedy about processes that do not run, by worker."""
    troubles: dict[str, tuple[str, str]] = {}
    for process in processes:
        if process.trouble:
            rank = f"rank {process.rank}, " if process.rank else ""
            fix = f"kill -CONT {process.pid} lets it go on" if process.state == "T" else ""
            troubles.setdefault(process.worker, (f"{rank}{process.trouble}", fix))
    return troubles


def _stalls(at: Situation, waits: Sequence[Wait]) -> list[Check]:
    """Return the stalled spans of other processes than the last of the chain, one for each process."""
    leaf = waits[-1].awaited if waits else ""
    by_process = {a.process: a for a in reversed(at.activities) if a.is_stalled and a.worker != leaf}
    checks = []
    for activity in by_process.values():
        usual = "it is the first" if activity.usual_s is None else f"usual: {activity.usual_s:.2g} s"
        text = f"{activity.process} is in {activity.span!r} since {duration(activity.seconds)}; {usual}"
        checks.append(Check("bad", "stalled", text, fix_of(activity.span, activity.worker, at)))
    return checks


def _clocks(spans: Spans) -> list[Check]:
    return [
        Check(
            "note",
            "clock",
            f"the clock of {name} is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} that of the files",
            "ntpd or chronyd on its machine: the timeline and certificates need equal clocks",
        )
        for name, seconds in spans.skews().items()
    ]


def _stacks(waits: Sequence[Wait], at: Situation, processes: Sequence[InspectedProcess], run_dir: Path) -> str:
    """Return the stacks of the process that others wait for; without one, of all workers on this machine."""
    leaf = waits[-1].awaited if waits else ""
    if leaf == WEIGHTS:
        leaf = waits[-1].waiter
    if not leaf:
        stalled = (each.worker for each in at.activities if each.is_stalled)
        leaf = next(iter((*at.troubles, *stalled)), "")
    chosen = [process for process in processes if process.worker == leaf]
    if not chosen and leaf and leaf not in ROLES:
        return f"stacks: {leaf} has no process on this machine; run the doctor on its machine"
    text = stacks_of(chosen or processes, run_dir)
    return text or f"stacks: none could be read: {pip_install('cosmos-rl-core[doctor]')} (py-spy)"
