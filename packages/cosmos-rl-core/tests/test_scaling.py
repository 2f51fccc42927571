"""`cosmos-rl scale` without a run: who leaves, who is started, when a request is over, and wrong requests."""

import asyncio
import json
import socket
from types import SimpleNamespace

import pytest

from cosmos_rl_core.cli.app import main
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.peers import Peers, WorkerPeer
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.placement import Added
from cosmos_rl_core.launch.scaling import Scaling, wanted_rollouts
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.recipe.sections import AutoscaleSection


class Wire:
    """A connection that keeps the messages posted to it."""

    def __init__(self):
        self.sent = []

    def post(self, message):
        self.sent.append(message)


class Workers:
    """A placement without processes; `full` is the reason for which it starts nothing."""

    def __init__(self, *starting, full=""):
        self.running, self.dismissed, self.full = list(starting), [], full

    def names(self, role):
        return [name for name in self.running if name.startswith(role) and name not in self.dismissed]

    def has(self, name):
        return name in self.running

    def check(self, more, *, without):
        if self.full:
            raise UserError(self.full)

    def add(self, more):
        names = [f"{role}-{8 + i}" for role, number in more.items() for i in range(number)]
        self.running += names
        return Added(names=names)

    def dismiss(self, name, *, connected):
        self.dismissed.append(name)
        if not connected:
            self.running.remove(name)


class Run:
    """A run with these ready workers, the oldest first."""

    def __init__(self, *names, workers=None, algorithm="grpo", **elastic):
        self.peers, self.workers = Peers(), workers or Workers()
        self.outcome = SimpleNamespace(is_decided=False)
        self.ledger = SimpleNamespace(why_finished=lambda: None)
        self.lines, self.notes = [], []
        for name in names:
            self.joins(name)
        tables = {
            "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1},
            "algorithm": {"name": algorithm},
            "model": {},
            "data": {},
            "elastic": elastic,
        }
        if algorithm != "sft":
            tables["reward"] = {"functions": [{"name": "hits"}]}
        self.scaling = Scaling(self, self.workers, load_config(tables), note=self.notes.append)

    def joins(self, name):
        role = name.partition("-")[0]
        peer = WorkerPeer(name=name, role=role, connection=Wire(), incarnation=1, is_ready=True)
        self.peers.add(peer)
        return peer

    def leaves(self, name):
        self.peers.remove(name)
        if name in self.workers.running:
            self.workers.running.remove(name)

    def scale(self, **wanted):
        return asyncio.create_task(self.scaling.change(wanted, report=self.lines.append))

    async def until(self, condition):
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)


def test_a_worker_that_reconnects_is_asked_again_to_leave():
    """Or, if the request was lost with its connection, it would stay, and the operator wait for ever."""

    async def go():
        run = Run("policy-0", "rollout-0", "rollout-1")
        change = run.scale(rollout=1)
        await run.until(lambda: run.peers.by_name["rollout-1"].draining)
        again = run.joins("rollout-1")
        await run.until(lambda: again.connection.sent)
        assert again.connection.sent == [p.Drain()]
        run.leaves("rollout-1")
        await change
        assert run.peers.by_name["rollout-0"].connection.sent == []

    asyncio.run(go())


def test_the_youngest_leave_and_the_request_waits_until_they_have():
    async def go():
        run = Run("policy-0", "rollout-1", "rollout-0", workers=Workers("rollout-2"))  # rollout-2 has not connected
        youngest = run.peers.by_name["rollout-0"]
        change = run.scale(rollout=1)
        await run.until(lambda: "rollout-2 has left" in run.lines)
        assert youngest.connection.sent == [p.Drain()]
        assert run.peers.by_name["rollout-1"].connection.sent == []
        assert run.scaling.present("rollout") == ["rollout-1"], "one that leaves is not counted"
        assert not change.done()
        run.leaves("rollout-0")
        await change
        assert run.lines == ["rollout-0 leaves", "rollout-2 leaves", "rollout-2 has left", "rollout-0 has left"]
        assert run.notes == ["workers wanted: 1 rollout"]

    asyncio.run(go())


def test_new_workers_are_waited_for_until_they_are_ready_or_have_ended():
    async def go():
        run = Run("policy-0", "rollout-0")
        change = run.scale(rollout=3, policy=1)
        await run.until(lambda: len(run.lines) == 2)
        run.joins("rollout-8").is_ready = False
        await asyncio.sleep(0.2)
        assert run.lines == ["rollout-8 starts", "rollout-9 starts"], "a worker that builds its engine is not ready"
        run.peers.by_name["rollout-8"].is_ready = True
        await run.until(lambda: "rollout-8 is ready" in run.lines)
        run.workers.running.remove("rollout-9")
        await change
        assert run.lines[3] == "rollout-9 could not start; its log is logs/rollout-9.log"
        assert run.scaling.targets == {"policy": 1, "rollout": 3}

    asyncio.run(go())


def test_one_request_at_a_time_and_none_outlives_the_run():
    async def go():
        run = Run("policy-0", "rollout-0")
        change = run.scale(rollout=2)
        await run.until(lambda: run.lines)
        with pytest.raises(UserError, match="another change of the number of workers is in work"):
            await run.scale(rollout=3)
        run.outcome.is_decided = True
        with pytest.raises(UserError, match="the run has ended; it waited for rollout-8"):
            await change
        with pytest.raises(UserError, match="the run is over"):
            await run.scale(rollout=2)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("algorithm", "wanted", "message"),
    [
        ("grpo", {}, "name a role and its number of workers"),
        ("grpo", {"policy": 0}, "policy=0: a run needs at least one policy worker"),
        ("grpo", {"rollout": 0}, "rollout=0: a run needs at least one rollout worker"),
        ("grpo", {"rollout": 1, "trainer": 2}, "trainer=2: there is no role trainer; the roles are policy and rollout"),
        ("sft", {"rollout": 2}, "rollout=2: a supervised run has no rollout workers"),
        ("grpo", {"rollout": 9}, "8 GPUs are needed"),
    ],
)
def test_a_request_that_cannot_be_met_changes_nothing(algorithm, wanted, message):
    async def go():
        run = Run("policy-0", "rollout-0", workers=Workers(full="8 GPUs are needed"), algorithm=algorithm)
        before = dict(run.scaling.targets)
        with pytest.raises(UserError) as error:
            await run.scale(**wanted)
        assert str(error.value).startswith(message)
        assert (run.scaling.targets, run.lines, run.notes) == (before, [], [])
        assert not any(peer.connection.sent for peer in run.peers.by_name.values())

    asyncio.run(go())


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["rollout"], "rollout: give a role and its number of workers, such as rollout=4"),
        (["rollout=many"], "rollout=many: give a role and its number of workers"),
        (["rollout=1", "rollout=2"], "rollout=2: rollout is given twice"),
    ],
)
def test_a_malformed_argument_is_named(wanted, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["scale", str(tmp_path), *wanted])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_that_is_not_live_is_named(tmp_path, capsys, monkeypatch):
    def error_of(run_dir):
        with pytest.raises(SystemExit) as ended:
            main(["scale", str(run_dir), "rollout=2"])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "nowhere: there is no such directory" in error_of(tmp_path / "nowhere")
    assert "the run has not started, or has ended (no controller.json in it)" in error_of(tmp_path)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        contact = {"address": address, "generation": 0, "pid": 1, "host": "here"}
        (tmp_path / "controller.json").write_text(json.dumps(contact))
        monkeypatch.setenv("COSMOS_RL_TOKEN", "00" * 32)
        assert f"the controller does not answer: cannot connect to {address}" in error_of(tmp_path)


RULE = AutoscaleSection(min_rollouts=1, max_rollouts=4, steps=2, cooldown_steps=3)
STARVED, SATED, BOTH, NONE = (0.5, 0.1), (0.1, 0.5), (0.5, 0.5), (0.1, 0.1)
"""Idle fractions of the policy and of the rollout workers."""


@pytest.mark.parametrize(
    ("idle", "present", "wanted"),
    [
        ([NONE] * 3 + [STARVED] * 2, 2, 3),
        ([NONE] * 3 + [SATED] * 2, 2, 1),
        ([NONE] * 3 + [STARVED, NONE, STARVED], 2, 2),  # not in a row
        ([NONE] * 3 + [NONE, STARVED, STARVED], 2, 3),
        ([STARVED] * 4, 2, 2),  # the cooldown counts for nothing
        ([STARVED] * 5, 2, 3),
        ([STARVED] * 5, 4, 4),  # the maximum
        ([SATED] * 5, 1, 1),  # the minimum
        ([BOTH] * 5, 2, 2),  # the roles alternate: more workers help nobody
        ([NONE] * 5, 2, 2),
        ([(0.3, 0.0)] * 5, 2, 2),  # the limit itself is not above it
        ([], 2, 2),
        ([STARVED] * 5, 6, 6),  # an operator has gone beyond the maximum: the rule does not undo it
    ],
)
def test_the_autoscaling_rule(idle, present, wanted):
    assert wanted_rollouts(idle, present=present, section=RULE) == wanted


def test_steps_with_an_idle_policy_add_a_worker_and_the_cooldown_begins_after_it_is_ready():
    def metrics(idle):
        return {"policy_idle_fraction": idle[0], "rollout_idle_fraction": idle[1]}

    async def go():
        autoscale = {"max_rollouts": 3, "steps": 2, "cooldown_steps": 1}
        run = Run("policy-0", "rollout-0", autoscale=autoscale)
        for _ in range(3):
            run.scaling.stepped(metrics(STARVED))
        await run.until(lambda: run.workers.running == ["rollout-8"])
        assert run.notes == ["autoscaling: policy idle for 50%, rollouts for 10%", "workers wanted: 2 rollout"]
        for _ in range(9):
            run.scaling.stepped(metrics(STARVED))  # while it starts
        newest = run.joins("rollout-8")
        await asyncio.sleep(0.2)
        for _ in range(2):
            run.scaling.stepped(metrics(SATED))
        await asyncio.sleep(0.2)
        assert newest.connection.sent == [], "one step of the cooldown, and one that counts"
        run.scaling.stepped(metrics(SATED))
        await run.until(lambda: newest.connection.sent == [p.Drain()])
        assert run.notes[2:] == ["autoscaling: policy idle for 10%, rollouts for 50%", "workers wanted: 1 rollout"]

    asyncio.run(go())


def test_without_a_maximum_nothing_is_scaled():
    async def go():
        run = Run("policy-0", "rollout-0")
        for _ in range(99):
            run.scaling.stepped({"policy_idle_fraction": 0.9, "rollout_idle_fraction": 0.0})
        await asyncio.sleep(0.05)
        assert run.notes == []

    asyncio.run(go())
