"""When the controller evaluates, and which replica gets which rows."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.evaluation import Evaluator
from cosmos_rl_core.control.peers import Peers, WorkerPeer
from cosmos_rl_core.control.settings import ControllerSettings
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.wire.payload import encode_group

ROWS = 5


@dataclass
class Wire:
    """A connection that keeps what is posted."""

    posted: list = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def post(self, message):
        if self.closed.is_set():
            raise ConnectionClosed("closed by the peer")
        self.posted.append(message)

    @property
    def rows(self):
        """Rows granted so far."""
        return [item.sample for grant in self.posted for item in grant.prompts]


def job(*, every_steps=2, max_steps: int | None = 5, rows_per_group=2):
    return ControllerSettings(
        config_toml="",
        run_dir=Path(),
        resume_from="",
        supervised=False,
        max_steps=max_steps,
        eval_every_steps=every_steps,
        eval_by=(),
        group_size=rows_per_group,
    )


def make(*, rows=ROWS, **settings):
    """Return an evaluator of `rows` held-out rows."""
    source = PromptSource([{"q": i} for i in range(rows)], origin="test.jsonl", shuffle=False, epochs=1)
    return Evaluator(source=source, job=job(**settings))


def replica(name) -> Any:
    """A rollout replica on a wire that keeps what is posted."""
    wire: Any = Wire()
    return WorkerPeer(name=name, role="rollout", connection=wire, incarnation=1)


def connected(*replicas):
    peers = Peers()
    for peer in replicas:
        peers.add(peer)
    return peers


def deliver(row):
    rollout = Rollout(
        arrays={},
        rollout_logprobs=np.zeros(1, np.float32),
        versions=np.zeros(1, np.int32),
        loss_mask=np.ones(1, np.bool_),
    )
    group = RolloutGroup(prompt=Prompt(sample_id=row, row={"q": row}), rollouts=(rollout,))
    return p.Deliver(
        sample=row,
        attempt=0,
        min_version=0,
        max_version=0,
        num_terms=1,
        payload=encode_group(group),
        evaluation=True,
    )


def failed(row, reason="too long"):
    return p.Failed(sample=row, attempt=0, reason=reason, final=True, evaluation=True)


@pytest.mark.parametrize(
    ("every_steps", "max_steps", "due"),
    [(0, None, {0}), (0, 5, {0, 5}), (2, 5, {0, 2, 4, 5}), (3, None, {0, 3, 6}), (1, 3, {0, 1, 2, 3})],
)
def test_evaluations_come_first_every_so_often_and_last(every_steps, max_steps, due):
    evaluator = make(every_steps=every_steps, max_steps=max_steps)
    versions = range(7 if max_steps is None else max_steps + 1)
    assert {version for version in versions if evaluator.begin_if_due(version)} == due


def test_the_last_version_is_evaluated_whatever_its_number_and_once():
    evaluator = make(every_steps=0, max_steps=None)
    assert not evaluator.begin_if_due(3)
    assert evaluator.begin_if_due(3, last=True)
    assert evaluator.current is not None
    assert evaluator.current.version == 3
    assert not evaluator.begin_if_due(3, last=True)


def test_without_held_out_rows_nothing_is_ever_due():
    evaluator = Evaluator(source=None, job=job(every_steps=1, max_steps=2))
    assert not any(evaluator.begin_if_due(version, last=True) for version in range(3))
    assert evaluator.current is None


def test_a_request_is_granted_rows_as_far_as_its_capacity_in_sequences_goes():
    evaluator = make(rows_per_group=2)
    evaluator.begin_if_due(0)
    peer = replica("a")
    evaluator.request(peer, p.RequestLeases(version=0, capacity=2))
    (grant,) = peer.connection.posted
    assert [(item.sample, item.origin, item.evaluation) for item in grant.prompts] == [
        (row, f"test.jsonl:{row + 1}", True) for row in range(4)
    ]
    assert [json.loads(item.row) for item in grant.prompts] == [{"q": row} for row in range(4)]
    assert peer.deferred is None


def test_a_request_on_older_weights_waits():
    evaluator = make()
    evaluator.begin_if_due(2)
    peer, request = replica("a"), p.RequestLeases(version=1, capacity=2)
    evaluator.request(peer, request)
    assert (peer.deferred, peer.connection.posted) == (request, [])
    evaluator.request(peer, p.RequestLeases(version=2, capacity=1))
    assert (peer.deferred, peer.connection.rows) == (None, [0, 1])


def test_a_request_waits_when_every_row_is_out():
    evaluator = make(rows=1)
    evaluator.begin_if_due(0)
    first, second = replica("a"), replica("b")
    request = p.RequestLeases(version=0, capacity=1)
    evaluator.request(first, request)
    evaluator.request(second, request)
    assert (first.connection.rows, second.connection.posted, second.deferred) == ([0], [], request)


def test_the_last_answer_ends_the_evaluation():
    evaluator = make(rows=2)
    evaluator.begin_if_due(0)
    evaluator.request(replica("a"), p.RequestLeases(version=0, capacity=1))
    assert evaluator.finish(deliver(1)) is None
    evaluation = evaluator.finish(failed(0))
    assert evaluation is not None and evaluator.current is None
    assert (sorted(evaluation.groups), evaluation.failures) == ([1], {0: "too long"})
    assert evaluation.groups[1].prompt.row == {"q": 1}


def test_an_answer_sent_twice_counts_once_and_one_after_the_end_is_ignored():
    evaluator = make(rows=2)
    evaluator.begin_if_due(0)
    evaluator.request(replica("a"), p.RequestLeases(version=0, capacity=1))
    assert [evaluator.finish(deliver(0)) for _ in range(3)] == [None] * 3
    assert evaluator.finish(deliver(1)) is not None
    assert [evaluator.finish(deliver(1)), evaluator.finish(failed(1))] == [None, None]


def test_rows_of_a_lost_replica_go_to_those_that_wait():
    evaluator = make(rows=4)
    evaluator.begin_if_due(0)
    lost, waiting, other = replica("a"), replica("b"), replica("c")
    request = p.RequestLeases(version=0, capacity=2)
    for peer in (lost, waiting, other):
        evaluator.request(peer, request)
    evaluator.finish(deliver(1))
    evaluator.lose(lost.name, connected(waiting, other))
    assert (waiting.connection.rows, other.connection.rows) == ([0, 2, 3], [])
    assert (waiting.deferred, other.deferred) == (None, request)
    assert [evaluator.finish(deliver(row)) is not None for row in (0, 2, 3)] == [False, False, True]


def test_losing_a_replica_between_evaluations_changes_nothing():
    evaluator = make()
    waiting = replica("b")
    evaluator.lose("a", connected(waiting))
    assert waiting.connection.posted == []


def test_nothing_is_sent_to_a_replica_whose_connection_has_ended():
    evaluator = make()
    evaluator.begin_if_due(0)
    peer = replica("a")
    peer.connection.closed.set()
    evaluator.request(peer, p.RequestLeases(version=0, capacity=2))
    assert peer.connection.posted == []
