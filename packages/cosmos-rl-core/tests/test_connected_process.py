"""A child process with a connection: its answers, its failures, its limits and its end."""

import asyncio
import sys

import pytest

from cosmos_rl_core.connected_process import ChildFailed, ConnectedProcess, ProcessDied, TimeLimit
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import environment, is_alive

CHILD = """
import os, signal, sys, time
import msgspec
from cosmos_rl_core.connected_process import ChildFailed, receive_descriptors
from cosmos_rl_core.processes import end_with, inherited_socket
from cosmos_rl_core.wire.blocking import BlockingConnection
inherited = inherited_socket()
end_with(inherited, grace_s=60.0)
parent = BlockingConnection(inherited, decode=str)
while (order := parent.receive()):
    print(f"order: {order}", flush=True)
    if order == "exit":
        sys.exit(3)
    if order == "hang":
        time.sleep(600)
    if order == "descriptor":
        parent.send("ready")
        (descriptor,) = receive_descriptors(inherited)
        order = f"{parent.receive()} {os.pread(descriptor, 9, 0).decode()}"
    if order in ("user", "bug"):
        parent.send(ChildFailed(reason="out of order", user=order == "user"))
        sys.exit(1)
    parent.send(order.upper())
"""
SOON, LATER = TimeLimit("short_s", 0.5), TimeLimit("long_s", 60.0)


def child(**keys):
    command = [sys.executable, "-c", CHILD]
    return ConnectedProcess(command, name="the child", environment=environment(), **keys)


def asked(*orders, limit=LATER, **keys):
    """Ask one child after the other question; return the process, and the answers or the error that ended it."""

    async def go():
        process = child(**keys)
        await process.open(decode=str | ChildFailed)
        answers = []
        try:
            for order in orders:
                answers.append(await process.ask(order, limit=limit))
        except (ProcessDied, UserError) as error:
            answers.append(error)
        else:
            await process.close(grace_s=0.1)
        return process, answers

    return asyncio.run(go())


def test_answers_come_in_the_order_of_the_questions():
    process, answers = asked("a", "b")
    assert answers == ["A", "B"]
    assert not is_alive(process.process.pid)


@pytest.mark.parametrize(
    ("order", "limit", "kind", "text"),
    [
        ("exit", LATER, ProcessDied, "the child died (exit code 3)"),
        ("user", LATER, UserError, "out of order"),
        ("bug", LATER, ProcessDied, "out of order"),
        ("hang", SOON, ProcessDied, "the child took longer than short_s = 0.5 and was killed"),
    ],
)
def test_a_failure_is_an_error_and_ends_the_process(order, limit, kind, text, tmp_path):
    process, (error,) = asked(order, limit=limit, log=tmp_path / "log")
    assert type(error) is kind and str(error) == text
    assert getattr(error, "is_late", False) == (order == "hang")
    assert process.last_output in ("(its log is empty)", f"order: {order}")  # killed before it has printed
    assert not is_alive(process.process.pid)


def test_a_question_that_is_cancelled_ends_the_process():
    async def go():
        process = child()
        await process.open(decode=str)
        asking = asyncio.create_task(process.ask("hang", limit=LATER))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return process

    assert asyncio.run(go()).process.status == "signal SIGKILL"


def test_descriptors_arrive_before_their_message(tmp_path):
    (tmp_path / "content").write_text("inside")

    async def go():
        process = child()
        await process.open(decode=str)
        assert await process.ask("descriptor", limit=LATER) == "ready"
        with (tmp_path / "content").open() as file:
            answer = await process.ask("read", limit=LATER, descriptors=[file.fileno()])
        await process.close()
        return answer

    assert asyncio.run(go()) == "READ INSIDE"


def test_a_thread_has_the_same_connection_without_an_event_loop(tmp_path):
    process = child(log=(tmp_path / "log").open("w+b"))
    connection = process.open_blocking(decode=str)
    connection.send("a")
    assert connection.receive() == "A"
    connection.send("hang")
    assert process.close_blocking(grace_s=0.1) == "signal SIGKILL"
    assert process.last_output.startswith("order: a")


def test_a_command_that_does_not_exist_is_a_users_error():
    with pytest.raises(UserError, match="the child: cannot run /no/such: No such file or directory"):
        ConnectedProcess(["/no/such"], name="the child", environment={})
