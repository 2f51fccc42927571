"""A platform whose jobs are lines of a file. Its name for `find_launcher` is "fake_platform:FakePlatform"."""

from __future__ import annotations

import json

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.clusters.launcher import FOLDER, rollouts_of

QUOTA = 6
"""Maximum number of jobs."""
LEAVING = ("LEAVING", "LEAVING SOON")
"""States of a rollout that `scale` has ended: as many calls of `alive` show it."""


class FakePlatform:
    """Implements `Launcher`: each replica is a job, and so is the controller."""

    def plan(self, run):
        return "".join(f"job {name}\n" for name in self._names(run, run.rollouts()))

    def start(self, run):
        return [self._submit(run, name) for name in self._names(run, run.rollouts())]

    def alive(self, run):
        jobs, later = self._jobs(run), {}
        for name, state in jobs.items():
            if state not in LEAVING:
                later[name] = state
            elif state != LEAVING[-1]:
                later[name] = LEAVING[LEAVING.index(state) + 1]
        if later != jobs:
            self._write(run, later)
        return jobs

    def scale(self, run, wanted):
        count, jobs = rollouts_of(wanted, platform="fake"), self._jobs(run)
        rollouts = [name for name in jobs if name.startswith("rollout-")]
        there = [name for name in rollouts if jobs[name] not in LEAVING]
        free = [replica.name for replica in run.rollouts(count + len(rollouts)) if replica.name not in rollouts]
        self._write(run, {**jobs, **dict.fromkeys(there[count:], LEAVING[0])})
        ended = [f"{name}: ended" for name in there[count:]]
        return [*ended, *(self._submit(run, name) for name in free[: max(0, count - len(there))])]

    def stop(self, run, *, now):
        return [self._end(run, name) for name in self.alive(run)]

    def _names(self, run, rollouts):
        return ["run", *(replica.name for replica in (*run.policies(), *rollouts))]

    def _submit(self, run, name):
        jobs = self._jobs(run)
        if len(jobs) > QUOTA:
            raise UserError(f"{name}: quota of {QUOTA} jobs exceeded")
        self._write(run, {**jobs, name: "RUNNING"})
        return f"{name}: submitted"

    def _end(self, run, name):
        self._write(run, {other: state for other, state in self._jobs(run).items() if other != name})
        return f"{name}: ended"

    def _jobs(self, run):
        path = run.directory / FOLDER / "fake.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _write(self, run, jobs):
        (run.directory / FOLDER / "fake.json").write_text(json.dumps(jobs))
