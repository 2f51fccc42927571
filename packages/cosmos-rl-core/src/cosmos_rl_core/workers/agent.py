"""Runs the ranks of a policy replica on this machine with torch's elastic agent, as torchrun does.

    agent (this process)
      rank 0, rank 1, ...      python -m cosmos_rl_core.workers.rank_main; output is forwarded with the rank as prefix

Ranks of one machine rendezvous in a file; ranks of several machines at a store on the first machine, which the other
agents join (torchrun's static rendezvous; rank 0 is on the controller's machine). When a rank raises an error, the
agent ends all ranks and reports the rank and the cause to the controller. When a rank dies, the agent ends the others
and itself: the launcher may start the replica again. On a further machine of a run that a launcher on the first one
keeps, the agent starts itself again (`Node.restarts`) as soon as the first one has. SIGTERM and SIGUSR1 are passed to
the ranks, which leave or save together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError, HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from cosmos_rl_core.control.address_file import NAME as CONTROLLER_FILE
from cosmos_rl_core.imports import WORKER
from cosmos_rl_core.processes import is_alive
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_core.workers.failure import Failure, cause, report_to_controller
from cosmos_rl_core.workers.node import AGENT_PID, LEFT_FILE, Node, WorkerAddress, to_arguments, use_interface

WATCH_S = 0.1
"""Seconds between checks of the ranks."""
SHUTDOWN_S = 5
"""Maximum seconds for a rank to exit after another one failed."""
JOIN_S = 24 * 3600
"""Maximum wait for the other machines, in seconds."""
START_S = 120.0
"""Maximum seconds for the first machine's agent to start again, after it has noticed that a rank is gone."""
ORPHANED_S = 20.0
"""Maximum seconds for the ranks to end after the launcher."""
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals with handlers of the agent, torch's and ours."""
PASSED_ON = {signal.SIGTERM: signal.SIGUSR2, signal.SIGUSR1: signal.SIGUSR1}
"""Signals to the agent -> to a rank. The agent itself ends ranks by SIGTERM."""
OTHERS_FIRST_S = 2.0
"""Delay of a report if local ranks only lost peers: the cause may be on another machine, whose agent reports first."""


class OneMachine(RendezvousHandler):
    """Rendezvous of a replica on one machine: no other agents, no server."""

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return "one machine"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class MachineRendezvous(StaticTCPRendezvous):
    """Rendezvous of a replica over several machines, at a store of the first one."""

    def again(self, run_dir: Path | None, *, timeout_s: float) -> bool:
        """Wait until the first machine's agent, which has lost this one, has ended and started again.

        Returns False once the run is over, and after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and (run_dir is None or (run_dir / CONTROLLER_FILE).exists()):
            if self._has_ended() and self._has_started():
                return True
            time.sleep(WATCH_S)
        return False

    def _has_ended(self) -> bool:
        if self._store is not None:
            try:
                self._store.check(["any"])
            except DistError:
                self._store = None
        return self._store is None

    def _has_started(self) -> bool:
        try:
            socket.create_connection((self.master_addr, self.master_port), timeout=1.0).close()
        except OSError:
            return False
        return True


class RankAgent(LocalElasticAgent):
    """torch's agent, which passes SIGTERM and SIGUSR1 on. A second SIGTERM, or SIGHUP, ends the ranks at once; so does
    the end of the launcher, after ORPHANED_S in which the ranks can end by themselves."""

    launcher = 0
    """Process without which no controller comes back; 0: there is none."""
    is_leaving = False
    """Whether it got SIGTERM."""
    _orphaned_at = math.inf

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for passed in PASSED_ON.values():
            signal.signal(passed, signal.SIG_IGN)  # inherited: a rank that is starting ignores them
        started = super()._start_workers(worker_group)  # type: ignore[call-arg]  # torch's decorator hides the type
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the controller decides
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGUSR1, lambda *_: self._pass_on(signal.SIGUSR1))
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.is_leaving:  # again and again: the rank may have been starting
            self._pass_on(signal.SIGTERM)
        if self.launcher and not is_alive(self.launcher):
            self._orphaned_at = min(self._orphaned_at, time.monotonic())
        if time.monotonic() - self._orphaned_at > ORPHANED_S:  # a rank hangs
            raise SignalException("the run was killed", sigval=signal.SIGTERM)
        return super()._monitor_workers(worker_group)  # type: ignore[call-arg]

    def _leave(self, *_: object) -> None:
        if self.is_leaving:
            raise SignalException("a second SIGTERM", sigval=signal.SIGTERM)
        self.is_leaving = True

    def _pass_on(self, received: signal.Signals) -> None:
        """Pass a signal to this machine's first rank."""
        assert self._pcontext is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pcontext.pids()[0], PASSED_ON[received])


def run_node(worker: WorkerAddress, node: Node) -> int:
    """Run this machine's ranks to their end and return the exit code. Reports a failure to the controller."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # failures are reported below
    token, tls = worker.token(), worker.tls()  # the files may be gone when a rank fails
    use_interface(node, os.environ, controller=worker.controller, wait_s=worker.wait_s, join_s=JOIN_S)
    meeting = _rendezvous(worker, node)
    with tempfile.TemporaryDirectory(prefix="cosmos-rl-") as folder:
        left = Path(folder, "left")
        os.environ |= {LEFT_FILE: str(left), AGENT_PID: str(os.getpid())}
        agent = _agent(worker, node, meeting, Path(folder))
        try:
            result: RunResult = agent.run()  # type: ignore[assignment]  # torch's decorator hides the type
        except SignalException as error:
            return 128 + error.sigval.value
        if not result.failures:
            return worker.left_code if left.exists() else 0
    rank, failure = cause((rank, _failure(process_failure)) for rank, process_failure in result.failures.items())
    failure = replace(failure, message=f"{worker.name}, rank {rank}: {failure.message}")
    print(failure.message, file=sys.stderr, flush=True)  # noqa: T201  the end of the replica's log
    if failure.refused or (failure.lost and (node.num_nodes == 1 or worker.launcher)):
        return failure.exit_code
    delay_s = OTHERS_FIRST_S if failure.consequence and node.num_nodes > 1 else 0.0
    asyncio.run(_report(worker, failure, token=token, tls=tls, delay_s=delay_s))
    if failure.lost and node.restarts and isinstance(meeting, MachineRendezvous) and not agent.is_leaving:
        _start_again(worker, node, meeting)
    return failure.exit_code


def _start_again(worker: WorkerAddress, node: Node, meeting: MachineRendezvous) -> None:
    """Become the next process of this machine's part when the first machine has started again, else return."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    # A rank of the first machine may notice at the end of a collective only.
    if meeting.again(worker.run, timeout_s=node.collective_timeout_s + START_S):
        arguments = to_arguments(worker, replace(node, restarts=node.restarts - 1))
        os.execv(sys.executable, [*WORKER, *arguments])


def _agent(worker: WorkerAddress, node: Node, meeting: RendezvousHandler, folder: Path) -> RankAgent:
    part = node if node.num_nodes > 1 else replace(node, store=folder / "store")
    spec = WorkerSpec(
        role="rank",
        local_world_size=node.ranks_per_node,
        entrypoint=sys.executable,
        args=("-P", "-u", "-m", "cosmos_rl_core.workers.rank_main", *to_arguments(worker, part)),
        rdzv_handler=meeting,
        max_restarts=0,
        monitor_interval=WATCH_S,
        local_addr="127.0.0.1" if node.is_local else None,
    )
    agent = RankAgent(
        spec,
        DefaultLogsSpecs(log_dir=str(folder), tee=Std.ALL),
        log_line_prefix_template="[rank ${rank}] ",
        shutdown_timeout=SHUTDOWN_S,
    )
    agent.launcher = worker.launcher
    return agent


def _rendezvous(worker: WorkerAddress, node: Node) -> RendezvousHandler:
    if node.num_nodes == 1:
        return OneMachine()
    host, port = parse_rendezvous_endpoint(node.rendezvous, -1)
    return MachineRendezvous(host, port, node.index, node.num_nodes, worker.name, JOIN_S)


def _failure(process_failure: ProcessFailure) -> Failure:
    """The failure that a rank wrote, or one made from its exit code."""
    data = process_failure.error_file_data
    if isinstance(data, dict) and (written := Failure.read(data)) is not None:
        return written
    if process_failure.exitcode < 0:
        name = signal.Signals(-process_failure.exitcode).name
        return Failure(
            message=f"died (signal {name})", consequence=name == "SIGTERM", died=True, at=process_failure.timestamp
        )
    text = f"ended (exit code {process_failure.exitcode}) without an error message"
    return Failure(message=text, died=True, at=process_failure.timestamp)


async def _report(worker: WorkerAddress, failure: Failure, *, token: bytes, tls: Tls | None, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    await report_to_controller(worker.present_controller(), token=token, tls=tls, replica=worker.name, failure=failure)
