"""The policy server over openpi's websocket: wire format, batching, bad input, robots that leave, the true client."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from vla_fixtures import why_not_drawn
from vla_serving import SumPolicy, batching, client_python, layout, observation, openpi, served, small_policy, until
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from cosmos_rl_vla.serving.batching import PassFailed
from cosmos_rl_vla.serving.observations import BadObservation
from cosmos_rl_vla.serving.openpi import packed, unpacked

DRIVER = Path(__file__).parent / "support" / "drive_openpi.py"
CLIENT = ("openpi-client==0.1.2", "msgpack>=1.0.5", "dm-tree>=0.1.8")


async def ask(robot, sent):
    await robot.send(packed(sent))
    answer = await robot.recv()
    return answer if isinstance(answer, str) else unpacked(answer)


async def answers_behind_the_first(batcher, policy, seen):
    """Ask for all of `seen`; those behind the first wait together, until its pass ends."""
    requests = [policy.admit(one, seed=0, place=0) for one in seen]
    asked = [asyncio.create_task(batcher.infer(requests[0]))]
    await until(policy.entered.is_set)
    asked += [asyncio.create_task(batcher.infer(request)) for request in requests[1:]]
    await until(lambda: batcher.waiting == len(seen) - 1)
    policy.gate.set()
    return await asyncio.gather(*asked, return_exceptions=True)


def test_arrays_have_the_bytes_of_openpi_client():
    array = np.array([[1.0, 2.0]], np.float32)
    # msgpack_numpy.packb({"a": array, "n": np.int64(3)}) of openpi-client 0.1.2
    sent = b"\x82\xa1a\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x08" + array.tobytes()
    sent += b"\xc4\x05dtype\xa3<f4\xc4\x05shape\x92\x01\x02"
    assert packed({"a": array}) == b"\x81" + sent[1:]
    sent += b"\xa1n\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\x03\xc4\x05dtype\xa3<i8"
    decoded = unpacked(sent)
    assert decoded["n"] == 3 and decoded["n"].dtype == np.int64
    np.testing.assert_array_equal(decoded["a"], array)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"\xc1", "not msgpack"),
        ("text", "a text message"),
        (packed({b"__ndarray__": True, b"data": b"123", b"dtype": "<f4", b"shape": [1]}), "in 3 bytes"),
        (packed({b"__ndarray__": True, b"data": b"", b"dtype": "<f4", b"shape": [-1, 0]}), "in 0 bytes"),
        (packed({b"__ndarray__": True, b"data": b"12345678", b"dtype": "O", b"shape": [1]}), "an array of object"),
        (b"\x91" * 5000, "not msgpack"),
    ],
)
def test_a_message_of_another_format_is_one_error(sent, error):
    with pytest.raises(BadObservation, match=error):
        unpacked(sent)


def test_a_robot_gets_metadata_chunks_and_times():
    async def drive():
        async with openpi(SumPolicy()) as (url, _), connect(url) as robot:
            metadata = unpacked(await robot.recv())
            return metadata, [await ask(robot, observation((place, 0, 0.5))) for place in (1, 2)]

    metadata, answers = asyncio.run(drive())
    assert metadata["cameras"] == ["front", "wrist"]
    assert (metadata["state_dim"], metadata["action_dim"], metadata["action_horizon"]) == (3, 2, 4)
    for place, answer in enumerate(answers, 1):
        np.testing.assert_array_equal(answer["actions"], np.full((4, 2), place + 0.5, np.float32))
        assert answer["server_timing"]["infer_ms"] >= 0 and answer["server_timing"]["wait_ms"] >= 0


def test_bad_observations_are_one_error_each_and_the_connection_goes_on():
    bad = [
        (observation((1, 2)), "state: 2 numbers, the policy was trained with 3"),
        ({k: v for k, v in observation().items() if "wrist" not in k}, "wrist: this camera is missing; sent: front"),
        (observation(**{"observation/front": np.zeros((4, 7, 3), np.uint8)}), r"front: [4, 7, 3], the policy was"),
        (observation(**{"observation/front": np.zeros((4, 6, 3))}), "front: float64 [4, 6, 3], needs uint8"),
        (observation((500, 0, 0)), "state[0] = 500 is 500 after normalisation"),
        (observation((np.nan, 0, 0)), "state: has numbers that are not finite"),
        (observation(prompt=""), "prompt: the instruction is missing"),
        (observation(promt="x"), "promt: unknown; the policy takes"),
        (observation(inference_delay=3, prev_chunk_left_over=np.zeros((2, 2))), "inference_delay: 3, but"),
        (observation(prev_chunk_left_over=np.zeros((2, 3))), "prev_chunk_left_over: [2, 3], needs at most 4 actions"),
        ([1], "an observation is a map"),
    ]

    async def drive():
        async with openpi(SumPolicy()) as (url, batcher), connect(url) as robot:
            await robot.recv()
            errors = [await ask(robot, sent) for sent, _ in bad]
            return errors, await ask(robot, observation((1, 1, 1))), batcher.latencies

    errors, answer, latencies = asyncio.run(drive())
    for error, (_, begin) in zip(errors, bad, strict=True):
        assert error.startswith(begin)
    assert answer["actions"][0, 0] == 3
    assert (latencies.refused, latencies.requests) == (len(bad), 1)


def test_robots_that_wait_are_answered_in_one_pass_and_none_is_made_for_one_that_vanished():
    policy, lines = SumPolicy(), []
    policy.gate.clear()

    async def drive():
        async with openpi(policy, lines=lines) as (url, batcher):
            robots = [await connect(url) for _ in range(4)]
            for robot in robots:
                await robot.recv()
            asked = [asyncio.create_task(ask(robots[0], observation((1, 0, 0))))]
            await until(policy.entered.is_set)
            asked += [asyncio.create_task(ask(robot, observation((n, 0, 0)))) for n, robot in enumerate(robots[1:], 2)]
            await until(lambda: batcher.waiting == 3)
            asked.pop().cancel()
            robots[3].transport.abort()
            await until(lambda: batcher.latencies.robots == 3)
            policy.gate.set()
            answers = [await each for each in asked]
            for robot in robots:
                await robot.close()
            return [answer["actions"][0, 0] for answer in answers]

    assert asyncio.run(drive()) == [1, 2, 3]
    assert policy.batches == [1, 2]
    assert sum("vanished" in line for line in lines) == 1


def test_a_pass_that_fails_is_an_error_for_its_robot_alone():
    policy, lines = SumPolicy(), []
    policy.gate.clear()

    async def drive():
        async with batching(policy, lines=lines) as batcher:
            seen = [policy.layout.read(observation((number, 0, 0))) for number in (1, 1, -1, 2)]
            return await answers_behind_the_first(batcher, policy, seen)

    _, first, failed, second = asyncio.run(drive())
    assert (first.actions[0, 0], second.actions[0, 0]) == (1, 2)
    assert isinstance(failed, PassFailed)
    assert policy.batches == [1, 3, 1, 1, 1]
    assert lines == ["a pass of 3 failed: FloatingPointError: no number", lines[0].replace("3", "1")]


def test_a_pass_has_images_of_one_size_and_at_most_so_many_robots():
    policy = SumPolicy()
    policy.layout = layout(image_size=None)
    policy.gate.clear()

    async def drive():
        async with batching(policy, max_batch=2) as batcher:
            small = {f"observation/{name}": np.zeros((2, 2, 3), np.uint8) for name in ("front", "wrist")}
            kinds = [{}, {}, small, {}, {}]
            seen = [policy.layout.read(observation((number, 0, 0), **kind)) for number, kind in enumerate(kinds)]
            return [chunk.actions[0, 0] for chunk in await answers_behind_the_first(batcher, policy, seen)]

    assert asyncio.run(drive()) == [0, 1, 2, 3, 4]
    assert policy.batches == [1, 2, 1, 1]


def test_the_page_has_percentiles_and_a_token_closes_it_and_the_protocol():
    async def drive():
        async with openpi(SumPolicy(), token="secret") as (url, _):
            page = url.replace("ws", "http")
            given = {"Authorization": "Api-Key secret"}
            async with connect(url, additional_headers=given) as robot:
                await robot.recv()
                await ask(robot, observation())
                text = (await asyncio.to_thread(urlopen, Request(page, headers=given))).read().decode()
            health = (await asyncio.to_thread(urlopen, page + "/healthz")).read()
            refused = []
            for call in (lambda: urlopen(page), lambda: urlopen(Request(page, headers={"Authorization": "Api-Key s"}))):
                with pytest.raises(HTTPError) as error:
                    await asyncio.to_thread(call)
                refused.append(error.value.code)
                error.value.close()
            with pytest.raises(InvalidStatus):
                await connect(url)
            return text, health, refused

    text, health, refused = asyncio.run(drive())
    assert "robots 1  requests 1  refused 0  passes 1" in text
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["ms", "wait", "inference"]
    assert (health, refused) == (b"OK\n", [401, 401])


@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize("simulator", ["reach", "metaworld"])
def test_an_unmodified_openpi_client_drives_a_simulator(tmp_path, simulator):
    python = client_python("openpi_client", *CLIENT)
    if simulator == "metaworld" and (why := why_not_drawn("metaworld")):
        pytest.skip(why)
    camera, task = {"reach": ("board", "red"), "metaworld": ("corner2", "faucet-open")}[simulator]
    state = {"reach": 2, "metaworld": 4}[simulator]
    policy = small_policy(tmp_path / "policy", dims=(state, {"reach": 2, "metaworld": 4}[simulator]))
    with served(policy, "--camera", camera, "--port", "0", "--state-limit", "0") as server:
        port = server.wait_for(r"ws://127.0.0.1:(\d+)")[1]
        done = subprocess.run(
            [python, DRIVER, port, simulator, task], capture_output=True, text=True, timeout=600, cwd=tmp_path
        )
        code, printed = server.stop()
    assert done.returncode == 0, done.stderr
    driven = json.loads(done.stdout.splitlines()[-1])
    assert driven["steps"] == 20 and driven["moved"]
    assert driven["error"].startswith("Error in inference server:\nstate: ")
    assert code == 130
    assert "robots 0  requests 5  refused 1  passes 5" in printed
