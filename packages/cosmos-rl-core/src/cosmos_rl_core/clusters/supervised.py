"""The processes of one machine, which are started again after a crash.

processes = Supervised(preamble=["module load cuda"], variables={}, restarts=3)
code = await processes.keep("rollout-0", ["cosmos-rl", "worker", ...], gpus=["0"])
processes.terminate()
await processes.end(grace_s=60.0)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence

from cosmos_rl_core.processes import ChildProcess, all_ended, environment

USER_ERROR = 2
"""Exit code after which a process is not started again, as after 0."""


class Supervised:
    """Child processes by name. Their output is this process's."""

    def __init__(self, *, preamble: Sequence[str], variables: Mapping[str, str], restarts: int) -> None:
        """preamble: lines of shell before each process. restarts: of each process, after crashes."""
        self._script = "\n".join([*preamble, 'exec "$@"'])
        self._variables = variables
        self._restarts = restarts
        self._running: dict[str, ChildProcess] = {}
        self._stops = 0
        """Number of calls that end processes: one that was started before the last call is not started again."""

    async def keep(
        self,
        name: str,
        command: Sequence[str],
        *,
        first: Sequence[str] = (),
        last: Collection[int] = (0, USER_ERROR),
        gpus: Sequence[str] = (),
    ) -> int:
        """Run a command, again after crashes, and return its exit code, as a shell would.

        first: arguments of the first start alone. last: exit codes that are no crashes. gpus: those it sees; default:
        all.
        """
        variables, stops = {**environment(gpus=gpus), **self._variables}, self._stops
        left, arguments = self._restarts, first
        while True:
            process = self._running[name] = ChildProcess(
                ["bash", "-c", self._script, "bash", *command, *arguments],
                environment=variables,
                output=sys.stdout.fileno(),
            )
            await process.ended()
            code = process.exit_code or 0
            code = 128 - code if code < 0 else code
            if code in last or self._stops != stops or not left:
                return code
            left, arguments = left - 1, ()

    def terminate(self, names: Sequence[str] | None = None) -> None:
        """Send SIGTERM to the processes of these names, by default to all, and start none of any name again."""
        self._stops += 1
        for name, process in self._running.items():
            if (names is None or name in names) and process.exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes, and start none again."""
        self._stops += 1
        for process in self._running.values():
            if process.exit_code is None:
                process.kill()

    async def end(self, *, grace_s: float) -> None:
        """Wait for all processes, and kill those that still run after `grace_s`. None is started again."""
        self._stops += 1
        running = list(self._running.values())
        if not await all_ended(running, timeout_s=grace_s):
            self.kill()
            await all_ended(running)
