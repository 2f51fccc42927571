"""The worker processes of `cosmos-rl run`, between one controller and the next."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.local import LocalWorkers
from cosmos_rl_core.launch.supervised.keeper import Present, WorkerEnded, WorkerSpec
from cosmos_rl_core.launch.supervised.link import AttachController, Outbox, SupervisedKeeper, link, serve_controllers
from cosmos_rl_core.processes import is_alive
from cosmos_rl_core.workers.node import Node, WorkerAddress


class Kept:
    """Implements `Keeper`: notes the requests."""

    def __init__(self, present=None):
        self.present = present or Present(began=False, workers=(), ended=())
        self.asked, self.on_end = [], None

    async def attach(self, controller, *, secrets, on_end):
        self.asked.append((controller, secrets))
        self.on_end = on_end
        return self.present

    def start(self, workers):
        self.asked += [("start", spec.name, spec.starts) for spec in workers]

    def kill(self, names):
        self.asked.append(("kill", *names))

    def forget(self, name):
        self.asked.append(("forget", name))


def spec(name, **changes):
    address = WorkerAddress(role=name.partition("-")[0], name=name, token_file=Path("/runs/token"), threads=2)
    return replace(WorkerSpec(address=address, node=Node(), gpus=("0", "1")), **changes)


def end(name, code, status="", last_lines="the end"):
    return WorkerEnded(name=name, exit_code=code, status=status, last_lines=last_lines)


def supervised(theirs):
    return SupervisedKeeper(socket=theirs, supervisor=0, interrupted=False, can_restart=True)


@contextlib.asynccontextmanager
async def served(kept):
    """The controllers' end of a link, whose other end works for them with this keeper."""
    ours, theirs = link()
    with ours, theirs:
        serving = asyncio.create_task(serve_controllers(ours, kept))
        yield theirs
        for task in asyncio.all_tasks():
            if task.get_coro().__name__ == "_read":  # the readers at this end
                task.cancel()
        await asyncio.sleep(0)
        theirs.close()
        await serving


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_a_controller_sends_requests_and_receives_ends():
    ended = []

    async def go():
        kept = Kept(Present(began=True, workers=(spec("policy-0", starts=3),), ended=(end("policy-0", -9),)))
        async with served(kept) as theirs:
            controller = supervised(theirs)
            present = await controller.attach("tcp://here:1", secrets={"token": "secret"}, on_end=ended.append)
            assert (present.workers, present.ended) == (kept.present.workers, kept.present.ended)
            controller.start([spec("rollout-0"), spec("rollout-1")])
            controller.kill(["rollout-0"])
            controller.forget("rollout-1")
            kept.on_end(end("rollout-0", -9, "signal SIGKILL"))
            await until(lambda: ended and len(kept.asked) == 5)
        return kept.asked

    assert asyncio.run(asyncio.wait_for(go(), 30)) == [
        ("tcp://here:1", {"token": "secret"}),
        ("start", "rollout-0", 1),
        ("start", "rollout-1", 1),
        ("kill", "rollout-0"),
        ("forget", "rollout-1"),
    ]
    assert ended == [end("rollout-0", -9, "signal SIGKILL")]


def test_messages_to_an_earlier_controller_are_skipped():
    async def go():
        kept, ended = Kept(Present(began=True, workers=(spec("policy-0"),), ended=())), []
        async with served(kept) as theirs:
            first = AttachController(controller="tcp://first:1", secrets={}, pid=os.getpid() + 1)
            Outbox(theirs).send(first)
            await until(lambda: kept.on_end is not None)
            kept.on_end(end("policy-0", 1))  # nobody reads it
            second = supervised(theirs)
            present = await second.attach("tcp://second:1", secrets={}, on_end=ended.append)
        return present.to, ended, [address for address, _ in kept.asked]

    expected = (os.getpid(), [], ["tcp://first:1", "tcp://second:1"])
    assert asyncio.run(asyncio.wait_for(go(), 30)) == expected


def test_serving_ends_with_the_last_controller_though_it_has_not_read_all():
    async def go():
        kept = Kept()
        async with served(kept) as theirs:
            controller = supervised(theirs)
            await controller.attach("tcp://here:1", secrets={}, on_end=lambda end: None)
            kept.on_end(end("policy-0", 0))

    asyncio.run(asyncio.wait_for(go(), 30))


@pytest.mark.timeout(60)
def test_both_ends_send_more_than_the_socket_holds():
    """The controller sends all its requests before it reads, and the launcher answers each while it reads."""
    names = [f"rollout-{number}" for number in range(2000)]

    async def go():
        kept, ended = Kept(), []
        kept.forget = lambda name: kept.on_end(end(name, 1))
        async with served(kept) as theirs:
            controller = supervised(theirs)
            await controller.attach("tcp://here:1", secrets={}, on_end=lambda report: ended.append(report.name))
            for name in names:
                controller.forget(name)
            await until(lambda: len(ended) == len(names))
        return ended

    assert asyncio.run(go()) == names


LARGE = 5_000_000


@pytest.mark.timeout(60)
def test_messages_of_megabytes_pass_in_both_directions_while_both_ends_send():
    text = "".join(chr(97 + place % 26) for place in range(LARGE))

    async def go():
        kept, ended = Kept(), []
        async with served(kept) as theirs:
            controller = supervised(theirs)
            await controller.attach("tcp://here:1", secrets={"token": text}, on_end=ended.append)
            kept.on_end(end("policy-0", 1, last_lines=text))
            controller.kill([text, "rollout-1"])  # neither end has read the other's packets
            controller.forget("rollout-0")
            kept.on_end(end("rollout-0", 0))
            await until(lambda: len(ended) == 2 and len(kept.asked) == 3)
        return kept.asked, ended

    asked, ended = asyncio.run(go())
    assert asked == [("tcp://here:1", {"token": text}), ("kill", text, "rollout-1"), ("forget", "rollout-0")]
    assert ended == [end("policy-0", 1, last_lines=text), end("rollout-0", 0)]


@pytest.mark.timeout(60)
def test_a_controller_that_dies_within_a_large_message_leaves_no_part_of_it():
    """Neither of its own, nor of one to it, whose beginning it has read."""
    text = "x" * LARGE

    async def go():
        kept, ended = Kept(), []
        async with served(kept) as theirs:
            first = supervised(theirs)
            await first.attach("tcp://first:1", secrets={}, on_end=ended.append)
            kept.on_end(end("policy-0", 1, last_lines=text))
            first.kill([text])
            # It reads and sends as much as the socket holds, and is killed.
            await until(lambda: first._inbox._begun)
            first._reading.cancel()
            asyncio.get_running_loop().remove_writer(theirs)
            assert first._outbox._waiting
            second = supervised(theirs)
            await second.attach("tcp://second:1", secrets={}, on_end=ended.append)
            second.forget("rollout-0")
            await until(lambda: ("forget", "rollout-0") in kept.asked)
        return kept.asked, ended

    asked, ended = asyncio.run(go())
    assert asked == [("tcp://first:1", {}), ("tcp://second:1", {}), ("forget", "rollout-0")]
    assert ended == []


def local(kept, tmp_path, *, restart_workers=1):
    deaths = []
    workers = LocalWorkers(
        keeper=kept,
        token_file=tmp_path / "token",
        log_dir=tmp_path,
        restart_workers=restart_workers,
        on_death=deaths.append,
    )
    return workers, deaths


def test_a_later_controller_starts_the_workers_again_that_ended_meanwhile(tmp_path):
    """Those without a connection yet end with the controller: that is not their fault, and not counted."""
    kept = Kept()
    workers, deaths = local(kept, tmp_path)
    present = Present(
        began=True,
        workers=(spec("policy-0", starts=2), spec("rollout-0"), spec("rollout-1"), spec("rollout-2")),
        ended=(end("policy-0", 1, "exit code 1"), end("rollout-0", 0), end("rollout-2", 2, "exit code 2")),
    )
    workers.take_over(present)
    assert [(death.name, death.restarting) for death in deaths] == [("policy-0", True), ("rollout-2", False)]
    assert kept.asked == [("start", "policy-0", 2), ("forget", "rollout-0"), ("forget", "rollout-2")]
    assert workers.names("policy") == ["policy-0"] and workers.names("rollout") == ["rollout-1"]
    workers.ended(end("policy-0", -9, "signal SIGKILL"))
    assert not deaths[-1].restarting, "it was restarted once before"


def test_a_worker_that_shall_leave_is_no_death(tmp_path):
    kept = Kept()
    workers, deaths = local(kept, tmp_path)
    workers.start([spec("rollout-0"), spec("rollout-1")])
    workers.dismiss("rollout-0", connected=True)
    workers.dismiss("rollout-1", connected=False)
    assert workers.names("rollout") == [] and workers.has("rollout-0")
    for name in ("rollout-0", "rollout-1"):
        workers.ended(end(name, -15))
    assert not deaths and not workers.has("rollout-0")
    assert ("kill", "rollout-1") in kept.asked and ("kill", "rollout-0") not in kept.asked


@pytest.mark.parametrize("error", [UserError("mend this"), OSError("no room")])
def test_an_error_that_a_restart_would_repeat_is_raised(error):
    supervised(None).crash_at(error)


def test_the_last_controller_raises_its_error():
    replace(supervised(None), can_restart=False).crash_at(RuntimeError("a bug"))


def test_a_process_that_has_ended_is_not_alive_before_its_parent_asks():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(process.pid)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert not is_alive(process.pid)
    process.communicate()
    assert not is_alive(process.pid)
