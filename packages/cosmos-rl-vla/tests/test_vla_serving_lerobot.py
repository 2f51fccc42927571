"""The policy server over lerobot's gRPC: its pickles, which are read without unpickling, its calls, the true client."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from vla_lerobot import HELPERS, RemotePolicyConfig, TimedAction, TimedObservation, lerobot_helpers, robot
from vla_serving import SumPolicy, batching, served, small_policy, until

from cosmos_rl_vla.serving.lerobot import lerobot_server
from cosmos_rl_vla.serving.lerobot_wire import PickledCall, pickled_actions, read_pickle
from cosmos_rl_vla.serving.observations import BadObservation

DRIVER = Path(__file__).parent / "support" / "drive_lerobot.py"
PYTHON = "COSMOS_RL_LEROBOT_PYTHON"
"""Variable with the interpreter of an environment with lerobot[grpcio-dep] and what reach needs."""


@pytest.fixture(autouse=True)
def helpers():
    with lerobot_helpers():
        yield


def features(cameras=("front", "wrist"), numbers=3):
    image = {"dtype": "image", "shape": (4, 6, 3), "names": ["height", "width", "channels"]}
    images = {f"observation.images.{name}": image for name in cameras}
    names = [f"joint_{place}.pos" for place in range(numbers)]
    return {**images, "observation.state": {"dtype": "float32", "shape": (numbers,), "names": names}}


def setup(**changes):
    values = {"policy_type": "pi05", "pretrained_name_or_path": "runs/sum", "lerobot_features": features()}
    return RemotePolicyConfig(**values | {"actions_per_chunk": 4} | changes)


def timed(timestep, *, first=0.0, at=0.0, must_go=False, **changes):
    raw = {"joint_0.pos": first, "joint_1.pos": 0.0, "joint_2.pos": 0.0, "task": "open the door"}
    raw |= {name: np.full((4, 6, 3), 7, np.uint8) for name in ("front", "wrist")}
    return TimedObservation(at, timestep, raw | changes, must_go)


@asynccontextmanager
async def server(policy, *, lines=None, realtime=True):
    said = lines if lines is not None else []
    async with (
        batching(policy, lines=said) as batcher,
        lerobot_server(batcher, "127.0.0.1:0", realtime=realtime, say=said.append) as port,
    ):
        yield port, batcher


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_observations_are_read_without_unpickling(protocol):
    arrays = {"image": np.arange(24, dtype=np.uint8).reshape(2, 4, 3), "turned": np.arange(6.0).reshape(2, 3).T}
    values = {"number": np.float32(0.5), "whole": 3, "negative": -70000, "text": "é", "none": None, "yes": True}
    read = read_pickle(pickle.dumps(timed(5, at=2.5, **arrays, **values), protocol))
    assert isinstance(read, PickledCall) and read.name == f"{HELPERS}.TimedObservation"
    assert (read.state["timestep"], read.state["timestamp"], read.state["must_go"]) == (5, 2.5, False)
    raw = read.state["observation"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(raw[name], array)
        assert raw[name].dtype == array.dtype
    assert {name: raw[name] for name in values} == values


class Evil:
    def __reduce__(self):
        return os.mkdir, ("called",)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (pickle.dumps(Evil()), "posix.mkdir in a pickle"),
        (pickle.dumps({"a": Evil()}), "posix.mkdir in a pickle"),
        (pickle.dumps(np.array([Evil()], dtype=object)), "posix.mkdir|object"),
        (pickle.dumps(torch.zeros(2)), "torch"),
        (pickle.dumps({(1, 2): 3}), "tuple in place of str"),
        (pickle.dumps([1])[:-3], "not a pickle"),
        (b"", "not a pickle"),
        (b"\x80\x04e.", "not a pickle"),
        (b"(" * 3000 + b"l." , "opcode LIST"),
        (b"]\x940].", "opcode POP"),
    ],
    ids=["call", "call in a value", "object array", "tensor", "tuple as key", "cut", "empty", "no mark", "deep", "pop"],
)  # fmt: skip
def test_other_pickles_are_refused_and_call_nothing(content, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadObservation, match=error):
        read_pickle(content)
    assert not list(tmp_path.iterdir())


def test_actions_are_a_pickle_that_lerobot_loads():
    actions = np.array([[0.5, -1.0], [2.0, 3.0]], np.float32)
    loaded = pickle.loads(pickled_actions(actions, module=HELPERS, timestep=7, timestamp=10.0, step_s=0.5))
    assert [(one.timestep, one.timestamp) for one in loaded] == [(7, 10.0), (8, 10.5)]
    assert all(isinstance(one, TimedAction) and one.action.dtype == torch.float32 for one in loaded)
    np.testing.assert_array_equal(torch.stack([one.action for one in loaded]).numpy(), actions)
    assert pickle.loads(pickled_actions(actions[:0], module=HELPERS, timestep=0, timestamp=0.0, step_s=0.0)) == []


def test_a_robot_gets_the_chunk_of_its_newest_observation():
    async def drive():
        async with server(SumPolicy()) as (port, batcher), robot(port) as one, robot(port) as other:
            await one.start(setup())
            await other.start(setup(actions_per_chunk=2))
            for step in (0, 1):
                await one.send(timed(step, first=1.0 + step))
            await other.send(timed(4, first=5.0))
            chunks = [await each.actions() for each in (one, other)]
            return chunks, batcher.latencies

    (first, second), latencies = asyncio.run(drive())
    assert [(one.timestep, one.action[0].item()) for one in first] == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert [(one.timestep, one.action[0].item()) for one in second] == [(4, 5.0), (5, 5.0)]
    assert (latencies.robots, latencies.requests) == (2, 2)


class RecordingPolicy(SumPolicy):
    def __init__(self):
        super().__init__()
        self.seen = []

    def act(self, requests):
        self.seen += [one.observation for one in requests]
        return super().act(requests)


@pytest.mark.parametrize(("realtime", "left"), [(True, [None, 2, None]), (False, [None] * 3)])
def test_a_chunk_continues_the_last_one_and_freezes_what_is_executed_meanwhile(realtime, left):
    policy = RecordingPolicy()

    async def drive():
        async with server(policy, realtime=realtime) as (port, _), robot(port) as one:
            await one.start(setup())
            for step, at in ((0, 0.0), (2, 2e6), (9, 9e6)):  # steps of a million seconds: a pass takes less than one
                await one.send(timed(step, first=float(step), at=at))
                await one.actions()

    asyncio.run(drive())
    assert [None if one.previous is None else len(one.previous) for one in policy.seen] == left
    assert [one.delay for one in policy.seen] == ([0, 2, 0] if realtime else [0, 0, 0])


def test_an_observation_that_came_during_a_pass_continues_its_chunk():
    policy = RecordingPolicy()
    policy.gate.clear()

    async def drive():
        async with server(policy) as (port, _), robot(port) as one:
            await one.start(setup())
            await one.send(timed(0, first=7.0))
            chunk = asyncio.create_task(one.actions())
            await until(policy.entered.is_set)
            await one.send(timed(1))
            policy.gate.set()
            await chunk
            await one.actions()

    asyncio.run(drive())
    np.testing.assert_array_equal(policy.seen[1].previous, np.full((3, 2), 7.0))


def test_an_observation_of_the_same_step_is_left_out_unless_it_must_go():
    async def drive():
        policy = SumPolicy()
        async with server(policy) as (port, _), robot(port) as one:
            await one.start(setup())
            await one.send(timed(0))
            await one.actions()
            await one.send(timed(0))
            await one.send(timed(0, must_go=True, first=1.0))
            return await one.actions(), policy.batches

    chunk, batches = asyncio.run(drive())
    assert chunk[0].action[0] == 1 and batches == [1, 1]


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"pretrained_name_or_path": "runs/other"}, "'runs/other', this server has 'sum'"),
        ({"lerobot_features": features(cameras=("front",))}, "wrist: the robot has no such camera; it has front"),
        ({"lerobot_features": features(numbers=6)}, "a robot of 6 numbers, the policy was trained with 3"),
        ({"rename_map": {"a": "b"}}, "rename_map: not supported"),
        ({"actions_per_chunk": 0}, "actions_per_chunk"),
    ],
)
def test_a_robot_that_the_policy_does_not_fit_is_refused_when_it_connects(config, error):
    async def drive():
        async with server(SumPolicy()) as (port, _), robot(port) as one:
            await one.start(setup(**config))

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        asyncio.run(drive())
    assert error in refused.value.details()


def test_bad_observations_are_one_error_each_and_the_others_go_on():
    bad = [
        (timed(1, front=np.zeros((4, 7, 3), np.uint8)), "front: [4, 7, 3], the policy was trained with [4, 6, 3]"),
        (timed(1, **{"joint_0.pos": 180.0}), "[0] = 180 is 180 after normalisation"),
        (timed(1, task=""), "prompt: the instruction is missing"),
        ({"timestep": 1}, "a pickle without a TimedObservation"),
    ]
    lines = []

    async def drive():
        async with server(SumPolicy(), lines=lines) as (port, batcher), robot(port) as one, robot(port) as other:
            await other.start(setup())
            await one.start(setup())
            details = []
            for sent, _ in bad:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await one.send(sent)
                details.append(refused.value.details())
            actions = []
            for each in (one, other):
                await each.send(timed(1, first=3.0))
                actions.append((await each.actions())[0].action[0].item())
            return details, actions, batcher.latencies.refused

    details, actions, refused = asyncio.run(drive())
    for detail, (_, error) in zip(details, bad, strict=True):
        assert error in detail
    assert (actions, refused) == ([3.0, 3.0], len(bad))


def test_a_robot_that_vanishes_is_forgotten_and_needs_to_start_anew():
    policy, lines = SumPolicy(), []

    async def drive():
        async with server(policy, lines=lines) as (port, batcher), robot(port) as other:
            await other.start(setup())
            async with robot(port) as one:
                await one.start(setup())
                waiting = asyncio.create_task(one.actions())
                await until(lambda: batcher.latencies.robots == 2)
                await other.send(timed(0, first=2.0))
                assert (await other.actions())[0].action[0] == 2
                waiting.cancel()
            await until(lambda: batcher.latencies.robots == 1)
            async with robot(port) as again:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await again.send(timed(0))
            return refused.value.details()

    assert "no policy instructions on this connection" in asyncio.run(drive())
    assert sum(line.endswith(" left") for line in lines) == 1


@pytest.mark.ci
@pytest.mark.timeout(1200)
def test_an_unmodified_lerobot_client_drives_a_simulator(tmp_path):
    python = os.environ.get(PYTHON)
    if not python:
        pytest.skip(f"{PYTHON} names no interpreter with lerobot[grpcio-dep]")
    policy = small_policy(tmp_path / "policy")
    with served(policy, "--camera", "board", "--port", "0", "--lerobot-port", "0") as server:
        port = server.wait_for(r"127.0.0.1:(\d+) \(lerobot")[1]
        server.wait_for(r"\(openpi\)")
        packages = [str(folder) for folder in Path(__file__).parents[2].glob("*/src")]
        done = subprocess.run(
            [python, DRIVER, port, "policy"],
            capture_output=True,
            text=True,
            timeout=900,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(packages)},
        )
        code, printed = server.stop()
    assert done.returncode == 0, done.stderr
    driven = json.loads(done.stdout.splitlines()[-1])
    assert driven["executed"] >= 20 and driven["moved"]
    assert code == 130 and "(lerobot" in printed
