"""A platform whose jobs are lines of a file. Its name for `find_launcher` is "fake_platform:FakePlatform"."""

from __future__ import annotations

import json

from cosmos_rl_core.clusters.launcher import FOLDER, rollouts_of
from cosmos_rl_core.errors import UserError

QUOTA = 4
"""Maximum number of jobs."""


class FakePlatform:
    """Implements `Launcher`: each replica is a job, and so is the controller."""

    def plan(self, run):
        return "".join(f"job {name}\n" for name in self._names(run, run.rollouts()))

    def start(self, run):
        return [self._submit(run, name) for name in self._names(run, run.rollouts())]

    def alive(self, run):
        path = run.directory / FOLDER / "fake.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def scale(self, run, wanted):
        count, jobs = rollouts_of(wanted, platform="fake"), self.alive(run)
        there = [name for name in jobs if name.startswith("rollout-")]
        more = [replica.name for replica in run.rollouts(count) if replica.name not in there]
        return [*(self._submit(run, name) for name in more), *(self._end(run, name) for name in there[count:])]

    def stop(self, run, *, now):
        return [self._end(run, name) for name in self.alive(run)]

    def _names(self, run, rollouts):
        return ["run", *(replica.name for replica in (*run.policies(), *rollouts))]

    def _submit(self, run, name):
        jobs = self.alive(run)
        if len(jobs) > QUOTA:
            raise UserError(f"{name}: quota of {QUOTA} jobs exceeded")
        self._write(run, {**jobs, name: "RUNNING"})
        return f"{name}: submitted"

    def _end(self, run, name):
        self._write(run, {other: state for other, state in self.alive(run).items() if other != name})
        return f"{name}: ended"

    def _write(self, run, jobs):
        (run.directory / FOLDER / "fake.json").write_text(json.dumps(jobs))
