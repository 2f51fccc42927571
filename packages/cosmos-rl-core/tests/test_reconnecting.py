"""A worker's side of a connection that closes: what is sent again on the next one, and when it gives up."""

import asyncio
import functools
import json
import os
import subprocess
import sys

import pytest

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.workers.connection import LastingConnection, Unanswered


def in_a_loop(test):
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def run(*arguments, **keywords):
        asyncio.run(asyncio.wait_for(test(*arguments, **keywords), 60))

    return run


class Line:
    """A connection whose other end is the test."""

    def __init__(self, *inbox):
        self.sent, self.reason, self.closed = [], "", asyncio.Event()
        self._inbox = asyncio.Queue()
        for message in inbox:
            self._inbox.put_nowait(message)

    def give(self, message):
        self._inbox.put_nowait(message)

    def cut(self):
        self.reason = "cut"
        self.closed.set()
        self._inbox.put_nowait(None)

    def post(self, message):
        if self.closed.is_set():
            raise ConnectionClosed(self.reason)
        self.sent.append(message)

    async def send(self, message):
        self.post(message)

    async def receive(self):
        if (message := await self._inbox.get()) is None:
            raise ConnectionClosed("cut")
        return message

    def close(self):
        self.closed.set()


def lasting(*lines, wait_s=30.0, leave_s=30.0, run_dir=None, launcher=0, leaving=False):
    """A connection over these lines, one after the other, and the addresses and incarnations of its attempts."""
    first, *others = lines
    attempts = []

    async def connect(address, incarnation):
        attempts.append((address, incarnation))
        if not others:
            raise ConnectionClosed("nobody listens")
        return others.pop(0)

    event = asyncio.Event()
    if leaving:
        event.set()
    connection = LastingConnection(first, connect=connect, leaving=event, launcher=launcher)
    connection.last(wait_s, leave_s=leave_s, run_dir=run_dir)
    return connection, attempts


WELCOME = p.Welcome(incarnation=3, lineage=0, version=0)
GROUP = p.Deliver(sample=4, attempt=1, min_version=0, max_version=0, num_terms=2, payload=b"group")
PROMPT = p.LeasedPrompt(sample=4, attempt=1)


@in_a_loop
async def test_what_was_not_answered_is_sent_again_and_what_was_is_not():
    first, second = Line(WELCOME), Line(WELCOME, p.Cancel(9))
    connection, attempts = lasting(first, second)
    await connection.receive()
    connection.post(p.Ready(address="here"))
    connection.post(p.RequestLeases(version=0, capacity=2))
    first.give(p.Grant((PROMPT, p.LeasedPrompt(sample=5, attempt=1))))
    await connection.receive()
    first.cut()
    first.closed.set()
    await connection.send(GROUP)  # while there is no connection
    assert await connection.receive() == p.Cancel(9)
    assert attempts == [("", 3)]
    assert second.sent == [p.Rejoin(holding=(4, 5)), p.Ready(address="here"), GROUP]


@in_a_loop
async def test_a_rollback_that_was_missed_is_received():
    connection, _ = lasting(Line(WELCOME, None), Line(p.Welcome(incarnation=3, lineage=1, version=2)))
    await connection.receive()
    assert await connection.receive() == p.LineageRolledBack(lineage=1, version=2)


@in_a_loop
async def test_a_controller_of_an_earlier_generation_is_left_for_a_later_one():
    later = p.Welcome(incarnation=3, lineage=0, version=0, generation=2)
    stale = Line(p.Welcome(incarnation=3, lineage=0, version=0, generation=1))
    connection, attempts = lasting(Line(later, None), stale, Line(later, p.Cancel(1)))
    await connection.receive()
    assert await connection.receive() == p.Cancel(1)
    assert stale.closed.is_set() and len(attempts) == 2


@in_a_loop
async def test_a_worker_whose_work_others_have_gives_up_with_the_reason():
    connection, _ = lasting(Line(WELCOME, None), Line(p.Refused("others have its work")))
    await connection.receive()
    with pytest.raises(ConnectionClosed, match="others have its work"):
        await connection.receive()
    connection.post(p.Heartbeat())  # nothing is sent, and the end is raised where a reply is awaited
    with pytest.raises(ConnectionClosed, match="others have its work"):
        await connection.leave()


@in_a_loop
async def test_without_a_controller_it_gives_up_in_the_end():
    connection, attempts = lasting(Line(WELCOME, None), wait_s=0.5)
    await connection.receive()
    with pytest.raises(ConnectionClosed, match="cut"):
        await connection.receive()
    assert attempts and connection.closed.is_set()


@in_a_loop
async def test_in_the_directory_of_a_run_that_has_ended_it_gives_up_at_once(tmp_path):
    connection, attempts = lasting(Line(WELCOME, None), run_dir=tmp_path)
    await connection.receive()
    with pytest.raises(ConnectionClosed, match="the run has ended"):
        await connection.receive()
    assert attempts == []


@in_a_loop
async def test_a_later_controller_is_found_in_the_directory(tmp_path):
    content = {"address": "tcp://10.0.0.2:7", "generation": 1, "pid": 1, "host": "b"}
    (tmp_path / "controller.json").write_text(json.dumps(content))
    connection, attempts = lasting(Line(WELCOME, None), Line(WELCOME, p.Cancel(1)), run_dir=tmp_path)
    await connection.receive()
    await connection.receive()
    assert attempts == [("tcp://10.0.0.2:7", 3)]


@in_a_loop
async def test_goodbye_is_repeated_until_the_controller_has_it():
    second = Line(WELCOME, p.Stop("it has left"))
    connection, _ = lasting(Line(WELCOME, None), second)
    await connection.receive()
    connection.post(p.CheckpointDone(step=4, path="step_4"))
    await connection.leave()
    assert second.sent == [p.Rejoin(), p.CheckpointDone(step=4, path="step_4"), p.Goodbye()]


@in_a_loop
async def test_a_worker_that_leaves_while_the_controller_is_away_hands_its_groups_to_the_next_one():
    second = Line(WELCOME, p.Stop("it has left"))
    connection, _ = lasting(Line(WELCOME, None), second, leaving=True)
    await connection.receive()
    await connection.send(GROUP)
    await connection.leave()
    assert second.sent == [p.Rejoin(holding=(4,)), GROUP, p.Goodbye()]


@in_a_loop
async def test_a_worker_that_leaves_waits_for_a_controller_no_longer_than_leave_s():
    connection, attempts = lasting(Line(WELCOME, None), leave_s=0.3, leaving=True)
    await connection.receive()
    with pytest.raises(ConnectionClosed, match="cut"):
        await connection.leave()
    assert attempts and connection.closed.is_set()


@in_a_loop
async def test_a_worker_that_returns_when_the_run_is_over_leaves_in_good_order():
    second = Line(p.Stop("the run is over"))
    connection, _ = lasting(Line(WELCOME, None), second)
    await connection.receive()
    assert await connection.receive() == p.Stop("the run is over")
    second.cut()
    await connection.leave()
    assert connection.closed.is_set()


def test_reports_are_kept_until_a_later_step_is_committed():
    unanswered = Unanswered()
    done = [p.StepDone(step=step, version=step + 1, metrics={}) for step in range(2)]
    unanswered.sent(p.Vote(step=0, epoch=1))
    assert unanswered.received(p.Committed(0, 4, ()))
    unanswered.sent(done[0])
    unanswered.sent(p.Vote(step=1, epoch=1))
    unanswered.sent(p.CheckpointDone(step=1))  # after the vote: the commit says nothing about it
    assert unanswered.messages() == [done[0], p.CheckpointDone(step=1), p.Vote(step=1, epoch=1)]
    assert unanswered.received(p.Committed(1, 8, ()))
    assert not unanswered.received(p.Committed(1, 8, ()))  # the answer to the repeated vote
    assert unanswered.messages() == [p.CheckpointDone(step=1)]


def test_a_policy_that_leaves_asks_again_until_it_may():
    unanswered = Unanswered()
    unanswered.sent(p.Leaving())
    assert unanswered.messages() == [p.Leaving()]
    assert unanswered.received(p.Leave(save=True))
    assert unanswered.messages() == []


def test_a_batch_that_comes_twice_is_received_once():
    unanswered = Unanswered()
    unanswered.sent(p.RequestBatch(step=2, epoch=1))
    assert unanswered.received(p.Batch(step=2, epoch=1, samples=(1,)))
    assert not unanswered.received(p.Batch(step=2, epoch=1, samples=(1,)))


def test_a_vote_ends_with_a_later_mesh_unless_its_step_was_committed_before():
    undone, committed = Unanswered(), Unanswered()
    for unanswered in (undone, committed):
        assert unanswered.received(p.Remesh(epoch=1, members=("policy-0", "policy-1"), version=5, lineage=0))
        unanswered.sent(p.Vote(step=5, epoch=1))
    assert undone.received(p.Remesh(epoch=2, members=("policy-0",), version=5, lineage=0))
    assert undone.messages() == []
    assert committed.received(p.Remesh(epoch=2, members=("policy-0",), version=6, lineage=0))
    assert committed.messages() == [p.Vote(step=5, epoch=1)]
    assert not committed.received(p.Remesh(epoch=2, members=("policy-0",), version=6, lineage=0))


def test_a_group_is_kept_until_it_is_released():
    unanswered = Unanswered()
    assert unanswered.received(p.Grant((PROMPT,)))
    unanswered.sent(GROUP)
    assert list(unanswered.groups.values()) == [GROUP]
    unanswered.received(p.Release([], groups=((4, 2),)))  # another attempt of the sample
    assert unanswered.rejoin() == p.Rejoin(holding=(4,))
    unanswered.received(p.Release([], groups=((4, 1),)))
    assert unanswered.rejoin() == p.Rejoin() and not unanswered.groups


@in_a_loop
async def test_without_its_launcher_a_worker_waits_for_no_other_controller():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for launcher, returns in ((ended.pid, False), (os.getpid(), True)):
        connection, attempts = lasting(Line(WELCOME, None), Line(WELCOME, p.Cancel(9)), launcher=launcher)
        await connection.receive()
        if returns:
            assert await connection.receive() == p.Cancel(9)
        else:
            with pytest.raises(ConnectionClosed, match="cut"):
                await connection.receive()
        assert len(attempts) == returns
