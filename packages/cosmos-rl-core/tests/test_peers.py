"""The idle fraction of a worker, from its heartbeats; the order of messages to it."""

import asyncio

import pytest

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.peers import AT_ONCE, Peers, WorkerPeer
from cosmos_rl_core.observe.startup import Phases
from cosmos_rl_core.observe.trace import POLICY_WAITS, Timeline
from cosmos_rl_core.ops.dashboard.timeline import RunTimeline
from cosmos_rl_core.wire.channel import ConnectionClosed


class NoConnection:
    """Nothing is sent in these tests."""


def beat(waited_s, running_s):
    return p.Heartbeat(waited_s=waited_s, running_s=running_s)


def test_idleness_is_taken_over_the_time_between_two_steps():
    peer = WorkerPeer(name="rollout-0", role="rollout", connection=NoConnection(), heartbeat_at=100.0)
    peers = Peers()
    peers.add(peer)
    peer.beat(beat(1.0, 20.0), now=120.0)
    peer.ready(p.Ready(), now=120.5)
    assert peers.metrics() == {"members": 1.0}
    peer.beat(beat(1.0, 21.0), now=121.0)
    peer.beat(beat(2.0, 23.0), now=123.0)
    peer.beat(beat(2.0, 25.0), now=125.0)
    assert peers.metrics() == {"members": 1.0, "rollout_idle_fraction": 0.25}
    assert peers.metrics()["rollout_idle_fraction"] == 0.25, "without a new heartbeat the last value stands"
    peer.beat(beat(3.0, 26.0), now=126.0)
    assert peers.metrics()["rollout_idle_fraction"] == 1.0


def test_the_metric_and_the_timeline_agree_on_the_waits_of_short_steps(tmp_path):
    """Steps of 0.1 s, of which 80 % wait, with heartbeats that come late by less than a second."""
    now = 0.0
    timeline = Timeline("policy-0", clock=lambda: now, wall=lambda: now)
    timeline.stream(tmp_path / "policy-0.jsonl")
    peer = WorkerPeer(name="policy-0", role="policy", connection=NoConnection(), heartbeat_at=now)
    peers = Peers()
    peers.add(peer)
    parts = {"wait for batch": 0.07, "forward_backward": 0.01, "wait for commit": 0.01, "publish": 0.01}
    measured = []
    for step in range(100):
        for name, seconds in parts.items():
            with timeline.span(name):
                now += seconds
        if step % 10 == 9:
            peer.beat(beat(*timeline.waited()), now=now + (0.0 if step % 20 == 9 else 0.9))
        measured += [value for name, value in peers.metrics().items() if name == "policy_idle_fraction"]
    timeline.close()
    spans = RunTimeline(tmp_path)
    spans.update()
    shares = spans.recent_shares(length=now, end=now)
    assert sum(shares[name] for name in POLICY_WAITS) == pytest.approx(0.8, abs=0.01)
    assert measured == pytest.approx([0.8] * 81, abs=0.01)


def test_a_rollout_has_started_when_it_has_weights_and_a_policy_when_it_is_ready():
    peers = {role: WorkerPeer(name=role, role=role, connection=NoConnection()) for role in ("policy", "rollout")}
    for peer in peers.values():
        peer.phases.enter("importing", now=0.0)
        peer.ready(p.Ready(), now=2.0)
    assert (peers["policy"].phases.current, peers["policy"].phases.seconds) == ("", {"importing": 2.0})
    assert peers["rollout"].phases.current == "waiting for weights"
    peers["rollout"].beat(p.Heartbeat(version=-1), now=3.0)
    peers["rollout"].beat(p.Heartbeat(version=0), now=4.0)
    assert peers["rollout"].phases == Phases("", {"importing": 2.0, "waiting for weights": 2.0}, 4.0)
    peers["rollout"].beat(p.Heartbeat(version=1), now=9.0)
    assert peers["rollout"].phases.since == 4.0


def test_a_process_that_returns_has_no_start():
    peer = WorkerPeer(name="rollout-0", role="rollout", connection=NoConnection())
    peer.ready(p.Ready(), now=2.0)
    assert (peer.phases.current, peer.phases.seconds) == ("", {})


class Closing:
    """A connection whose other side has gone while nobody here has noticed."""

    def post(self, message):
        raise ConnectionClosed("closed by the peer")


def test_a_word_to_a_worker_that_has_just_left_disturbs_nobody():
    peer = WorkerPeer(name="policy-0", role="policy", connection=Closing(), heartbeat_at=100.0)
    peer.dismiss("the run is over")


class Wire:
    """A connection that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def post(self, message):
        self.sent.append(message)


def test_messages_wait_for_the_welcome_even_a_stop_because_the_policy_saves_before_it_leaves():
    wire = Wire()
    peer = WorkerPeer(name="policy-0", role="policy", connection=wire)
    address, stop, welcome = p.SyncFrom(address="here"), p.Stop(reason="interrupted"), p.Welcome(1, 0, 0)
    peer.post(address)
    peer.post(stop)
    assert wire.sent == []
    peer.welcome(welcome)
    assert wire.sent == [welcome, address, stop]


def test_a_dismissed_worker_leaves_before_its_welcome():
    wire = Wire()
    peer = WorkerPeer(name="rollout-0", role="rollout", connection=wire)
    peer.dismiss("the run is over")
    assert wire.sent == [p.Stop(reason="the run is over")]


def test_a_name_that_comes_back_in_another_role_is_counted_once():
    peers = Peers()
    for role in ("rollout", "policy"):
        peers.add(WorkerPeer(name="worker", role=role, connection=NoConnection()))
    assert (peers.of_role("rollout"), len(peers.of_role("policy")), len(peers.by_name)) == ([], 1, 1)
    peers.remove("worker")
    assert (peers.of_role("policy"), peers.by_name) == ([], {})


def test_messages_to_thousands_leave_in_turns_each_before_what_follows_it():
    peers, wires = Peers(), {f"rollout-{number}": Wire() for number in range(3 * AT_ONCE)}
    for name, wire in wires.items():
        peers.add(WorkerPeer(name=name, role="rollout", connection=wire, incarnation=1))
    release, stop = p.Release(["a file"]), p.Stop(reason="over")
    last = f"rollout-{3 * AT_ONCE - 1}"

    async def go():
        peers.post_each({**dict.fromkeys(wires, release), "gone": release})
        sent = [sum(map(len, (wire.sent for wire in wires.values())))]
        peers.by_name[last].post(stop)
        while len(sent) < 4:
            await asyncio.sleep(0)
            sent.append(sum(wire.sent.count(release) for wire in wires.values()))
        return sent

    assert asyncio.run(go()) == [AT_ONCE, 2 * AT_ONCE + 1, 3 * AT_ONCE, 3 * AT_ONCE]
    assert wires.pop(last).sent == [release, stop]
    assert all(wire.sent == [release] for wire in wires.values())
