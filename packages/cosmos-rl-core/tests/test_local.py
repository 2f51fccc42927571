"""Worker processes on this machine."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.gpus import AssignedGpus
from cosmos_rl_core.launch.local import LocalWorkers, WorkerSpec
from cosmos_rl_core.launch.placement import Launch, share_threads
from cosmos_rl_core.launch.supervised.link import ControllerTask, LauncherLink
from cosmos_rl_core.processes import LAST_LINES, last_lines
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.supervisor import ProcessEnd, ProcessSpec
from cosmos_rl_core.wire.handshake import make_token, read_token
from cosmos_rl_core.workers.node import Node, WorkerAddress


def test_the_end_of_a_log_is_shown(tmp_path):
    path = tmp_path / "rollout-0.log"
    path.write_text("".join(f"line {i}\n" for i in range(50)))
    assert last_lines(path, count=3) == "line 47\nline 48\nline 49"
    assert last_lines(path).count("\n") == LAST_LINES - 1


def test_a_short_log_is_shown_whole_and_an_empty_one_is_said_to_be(tmp_path):
    path = tmp_path / "rollout-0.log"
    path.write_text("one\ntwo")
    assert last_lines(path) == "one\ntwo"
    path.write_text("")
    assert last_lines(path) == "(its log is empty)"


def test_of_a_huge_log_only_the_end_is_read_and_odd_bytes_are_shown_as_such(tmp_path):
    path = tmp_path / "rollout-0.log"
    path.write_bytes(b"x" * 100_000 + b"\nlast \xff word\n")
    first, last = last_lines(path).splitlines()
    assert last == "last \N{REPLACEMENT CHARACTER} word"
    assert len(first) < 20_000


@pytest.mark.parametrize(
    ("cores", "replicas", "expected"),
    [(8, 1, (4, 4)), (8, 2, (4, 2)), (7, 2, (3, 2)), (2, 4, (1, 1)), (1, 1, (1, 1))],
)
def test_roles_that_work_side_by_side_share_the_cores(cores, replicas, expected):
    keys = {"policy": None, "rollout": None, "rollout_replicas": replicas}
    assert share_threads(cores=cores, overlap=True, **keys) == expected


@pytest.mark.parametrize(("cores", "replicas", "expected"), [(8, 1, (8, 8)), (8, 3, (8, 2)), (1, 2, (1, 1))])
def test_roles_that_take_turns_each_get_them_all(cores, replicas, expected):
    keys = {"policy": None, "rollout": None, "rollout_replicas": replicas}
    assert share_threads(cores=cores, overlap=False, **keys) == expected


@pytest.mark.parametrize("overlap", [True, False])
def test_what_the_recipe_says_is_taken(overlap):
    assert share_threads(cores=8, policy=3, rollout=5, rollout_replicas=2, overlap=overlap) == (3, 5)


def unused_port():
    """A port nobody listens on: it was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Run:
    """A run whose controller answers nobody, and what is reported to it."""

    def __init__(self, directory, *, address="tcp://127.0.0.1:1", restart_workers=1, link=None):
        (directory / "logs").mkdir(exist_ok=True)
        tables = {
            "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1, "output_dir": str(directory)},
            "model": {},
            "data": {},
            "elastic": {"restart_workers": restart_workers},
            "reward": {"functions": [{"name": "hits"}]},
        }
        self.notes, self.ended, self.error = [], [], None
        self.peers = SimpleNamespace(of_role=lambda role: [], by_name={})
        self.scheduler = SimpleNamespace(is_over=False)
        self.ledger = SimpleNamespace(members=SimpleNamespace(by_name={}))
        self.outcome, self.lifecycle = self, SimpleNamespace(ended=self.ended.append)
        controller: Any = self
        observer: Any = SimpleNamespace(note=self.notes.append)
        self.launch = Launch(
            config=load_config(tables),
            directory=directory,
            controller=controller,
            address=address,
            token=make_token(directory / "token"),
            tls=None,
            policy_node=Node(),
            gpus=AssignedGpus(policies=(), rollouts=()),
            python_path=(),
            rewards={},
            observer=observer,
            lock=0,
            supervised=link,
        )
        self.workers = LocalWorkers(self.launch)
        self.changed = asyncio.Event()

    def fail(self, error, *, worker=""):
        self.error = error

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


def start_workers(tmp_path, *, role, restart_workers, token=True):
    """Start a worker without a controller until it is given up; return what was reported: restarts, and the error."""

    async def go():
        run = Run(tmp_path, address=f"tcp://127.0.0.1:{unused_port()}", restart_workers=restart_workers)
        if not token:
            (tmp_path / "token").unlink()
            (tmp_path / "token").mkdir()
        try:
            run.workers.begin()
            run.workers.start(run.workers.replicas(role, threads=1, gpus=[["2"]]))
            await run.until(lambda: run.error is not None)
        finally:
            run.workers.kill()
            await run.workers.leave(grace_s=10.0)
        return run.notes, str(run.error)

    return asyncio.run(go())


@pytest.mark.parametrize("role", ["policy", "rollout"])
def test_a_worker_that_cannot_connect_is_reported_and_started_again(role, tmp_path):
    (note,), error = start_workers(tmp_path, role=role, restart_workers=1)
    began = f"{role}-0 died (exit code 1); starting it again. The end of logs/{role}-0.log:\n"
    assert note.startswith(f"{began}{role}-0: cannot connect to tcp://127.0.0.1:")
    assert error.startswith(f"{role}-0 died (exit code 1); the run cannot continue without it. The end of logs/")


def test_a_worker_is_started_though_the_token_file_was_removed(tmp_path):
    async def go():
        run = Run(tmp_path, address=f"tcp://127.0.0.1:{unused_port()}", restart_workers=0)
        (tmp_path / "token").unlink()
        run.workers.begin()
        run.workers.start(run.workers.replicas("rollout", threads=1, gpus=[[]]))
        await run.until(lambda: run.error is not None)
        await run.workers.leave(grace_s=10.0)
        return str(run.error), run.launch.token

    error, token = asyncio.run(go())
    assert "rollout-0: cannot connect to tcp://127.0.0.1:" in error
    assert read_token(tmp_path / "token") == token


def test_a_worker_the_user_has_to_mend_is_not_started_again(tmp_path):
    notes, error = start_workers(tmp_path, role="rollout", restart_workers=3, token=False)
    assert notes == []
    assert "rollout-0 died (exit code 2); the run cannot continue" in error and "cannot read the token file" in error


def test_workers_that_are_killed_at_the_end_are_no_deaths(tmp_path):
    async def go():
        async def hold(reader, writer):
            await reader.read()
            writer.close()

        server = await asyncio.start_server(hold, "127.0.0.1", 0)  # never says hello: the worker waits
        run = Run(tmp_path, address=f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", restart_workers=3)
        run.workers.begin()
        run.workers.start(run.workers.replicas("rollout", threads=1, gpus=[[], []]))
        assert run.workers.names("rollout") == ["rollout-0", "rollout-1"]
        await run.workers.leave(grace_s=0.05)
        server.close()
        await server.wait_closed()
        return run

    run = asyncio.run(go())
    assert (run.notes, run.error, run.workers.names("rollout")) == ([], None, [])


class Link(LauncherLink):
    """A launcher that starts nothing and notes the requests."""

    def __init__(self, *workers, ended=()):
        self.requests = []
        self.task = ControllerTask(
            command=(),
            recipe={},
            python_path=(),
            notes=(),
            directory="",
            directory_notes=(),
            is_orphaned=False,
            lock=0,
            resume=None,
            overwrite=False,
            launcher=7,
            interrupted=False,
            can_restart=True,
            began=bool(workers),
            workers=workers,
            ended=ended,
        )

    def start(self, specs):
        self.requests += [("start", spec.name, WorkerSpec.of(spec.data).starts) for spec in specs]
        self.started = specs

    def kill(self, names):
        self.requests.append(("kill", *names))

    def forget(self, name):
        self.requests.append(("forget", name))


def worker(name, **changes):
    address = WorkerAddress(role=name.partition("-")[0], name=name, token_file=Path("/runs/token"), threads=2)
    return WorkerSpec(**{"address": address, "node": Node(), "gpus": ("0", "1"), **changes})


def process(name, **changes):
    return ProcessSpec(name=name, command=(), data=worker(name, **changes).data)


def end(name, code, status=""):
    return ProcessEnd(name=name, exit_code=code, status=status or f"exit code {code}", last_lines="the end")


def test_the_last_rollout_worker_that_leaves_is_started_again_as_often_as_a_killed_one(tmp_path):
    link = Link()
    run = Run(tmp_path, link=link)
    run.workers.start(run.workers.replicas("rollout", threads=1, gpus=[[], []]))
    run.workers.ended(end("rollout-0", 0))
    assert (run.notes, run.workers.names("rollout")) == ([], ["rollout-1"])
    run.workers.ended(end("rollout-1", 0))
    assert link.requests[-1] == ("start", "rollout-1", 2)
    assert run.notes == ["no rollout worker is left: rollout-1 has left on request; starting it again"]
    run.workers.ended(end("rollout-1", 0))
    assert str(run.error).endswith("rollout-1 has left on request; the run cannot continue without it")


def test_a_later_controller_starts_the_workers_again_that_ended_meanwhile(tmp_path):
    """Those without a connection yet end with the controller: that is not their fault, and not counted."""
    processes = [process("policy-0", starts=2), *(process(f"rollout-{number}") for number in range(3))]
    link = Link(*processes, ended=(end("policy-0", 1), end("rollout-0", 0), end("rollout-2", 2)))
    run = Run(tmp_path, link=link)
    run.workers.take_over(link.task)
    assert [note.partition(". The end")[0] for note in run.notes] == [
        "policy-0 died (exit code 1); starting it again",
        "rollout-2 died (exit code 2); it is given up, and the run continues with rollout-1",
    ]
    assert link.requests == [("start", "policy-0", 2), ("forget", "rollout-0"), ("forget", "rollout-2")]
    [started] = link.started
    assert started.command[started.command.index("--controller") + 1] == "tcp://127.0.0.1:1"
    assert started.command[started.command.index("--launcher") + 1] == "7"
    assert started.variables["CUDA_VISIBLE_DEVICES"] == "0,1" and started.orphan_s == 60.0
    assert run.workers.names("policy") == ["policy-0"] and run.workers.names("rollout") == ["rollout-1"]
    run.workers.ended(end("policy-0", -9, "signal SIGKILL"))
    assert "the run cannot continue without it" in str(run.error), "it was restarted once before"


def test_a_worker_that_shall_leave_is_no_death(tmp_path):
    link = Link()
    run = Run(tmp_path, link=link)
    run.workers.start([worker("rollout-0"), worker("rollout-1")])
    run.workers.dismiss("rollout-0", connected=True)
    run.workers.dismiss("rollout-1", connected=False)
    assert run.workers.names("rollout") == [] and run.workers.has("rollout-0")
    for name in ("rollout-0", "rollout-1"):
        run.workers.ended(end(name, -15))
    assert (run.notes, run.error) == ([], None) and not run.workers.has("rollout-0")
    assert ("kill", "rollout-1") in link.requests and ("kill", "rollout-0") not in link.requests


@pytest.mark.parametrize("error", [UserError("mend this"), OSError("no room")])
def test_an_error_that_a_restart_would_repeat_is_raised(error):
    Link().crash_at(error)


def test_the_last_controller_raises_its_error():
    link = Link()
    link.task = structs.replace(link.task, can_restart=False)
    link.crash_at(RuntimeError("a bug"))
