"""What the reward service does when workers die, hang, or cannot start: nothing is lost and nothing is made up."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.ops.reward_service.backend import Backend
from cosmos_rl_core.ops.reward_service.settings import load_settings
from cosmos_rl_core.reward.pool.body import BodySpool
from cosmos_rl_core.reward.request import GroupSpec, Header, RewardSpec, encode_body

REWARDS = """
import os, signal

def held(group):
    row = group.prompt.row
    if row.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    if "gate" in row:
        open(row["started"], "w").close()
        open(row["gate"]).read()
    return [float(row.get("value", 0))] * len(group.rollouts)

class Fragile:
    def __init__(self, *, path):
        if os.path.exists(path):
            os._exit(3)
        open(path, "w").close()
    def __call__(self, group):
        os._exit(4)

def token(group):
    return [float("WFM_REWARD_TOKEN" in os.environ)] * len(group.rollouts)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return tmp_path


def start(folder, **reward):
    settings = load_settings({"rewards": [{"name": "my_rewards:held", **reward}]})
    said = []
    return Backend(settings, log=said.append, python_path=[str(folder)]), said


def enqueue(backend, **row):
    name = next(iter(backend.pools))
    encoded = encode_body(header := Header(groups=[GroupSpec(size=2, row=row)], rewards=[RewardSpec(name)]), {})
    spool = BodySpool()
    for piece in encoded.pieces():
        spool.write(piece)
    return backend.add(header, spool)


class Gate:
    """Two pipes: a reward that is given them says that it has started, and waits."""

    def __init__(self, folder, number):
        self.paths = {name: str(folder / f"{name}-{number}") for name in ("started", "gate")}
        for path in self.paths.values():
            os.mkfifo(path)

    async def started(self):
        await asyncio.to_thread(Path(self.paths["started"]).read_text)

    async def open(self):
        await asyncio.to_thread(Path(self.paths["gate"]).write_text, "")


async def results(jobs):
    async with asyncio.timeout(60):
        for job in jobs:
            await job.done.wait()
    return [(job.scores.get("held"), job.error) for job in jobs]


def test_two_workers_killed_in_the_middle_lose_nothing(folder):
    async def run():
        gates = [Gate(folder, i) for i in range(2)]
        backend, said = start(folder, workers=2, batch_size=1)
        async with backend:
            pool = backend.pools["held"]
            jobs = [enqueue(backend, value=i, **gate.paths) for i, gate in enumerate(gates)]
            jobs += [enqueue(backend, value=i) for i in range(2, 10)]
            for gate in gates:
                await gate.started()
            before = pool.pids
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            for gate in gates:  # the same requests, in other processes
                await gate.started()
                await gate.open()
            assert await results(jobs) == [([float(i)] * 2, "") for i in range(10)]
            restarts = backend.metrics.registry.get_sample_value(
                "cosmos_rl_reward_worker_restarts_total", {"reward": "held"}
            )
            assert restarts == 2
            assert not set(pool.pids) & set(before)
        assert said == ["held: the worker died (signal SIGKILL); starting another"] * 2

    asyncio.run(run())


def test_a_worker_that_dies_idle_is_replaced_before_it_is_asked(folder):
    async def run():
        backend, _ = start(folder, max_attempts=1)
        async with backend:
            worker = backend.pools["held"].pids[0]
            os.kill(worker, signal.SIGKILL)
            async with asyncio.timeout(30):
                while backend.pools["held"].pids in ([], [worker]):
                    await asyncio.sleep(0.01)
            assert await results([enqueue(backend, value=3)]) == [([3.0, 3.0], "")]

    asyncio.run(run())


def test_a_request_that_kills_its_worker_fails_alone(folder):
    async def run():
        gate = Gate(folder, 0)
        backend, _ = start(folder, batch_size=4, max_attempts=2)
        async with backend:
            first = enqueue(backend, value=1, **gate.paths)
            await gate.started()
            batch = [enqueue(backend, value=2), enqueue(backend, dies=True), enqueue(backend, value=3)]
            await gate.open()
            assert await results([first, batch[0], batch[2]]) == [([i, i], "") for i in (1.0, 2.0, 3.0)]
            reason = "held was tried 2 times: the worker died (signal SIGKILL)"
            assert await results([batch[1]]) == [(None, reason)]

    asyncio.run(run())


def test_a_worker_that_takes_too_long_is_killed(folder):
    async def run():
        gate = Gate(folder, 0)
        backend, _ = start(folder, timeout_s=0.3, max_attempts=1)
        async with backend:
            slow = enqueue(backend, value=1, **gate.paths)
            await gate.started()
            reason = "held was tried once: the worker took longer than timeout_s = 0.3 and was killed"
            assert await results([slow]) == [(None, reason)]
            assert await results([enqueue(backend, value=2)]) == [([2.0, 2.0], "")]

    asyncio.run(run())


def test_a_reward_whose_worker_cannot_start_again_fails_what_waits(folder):
    async def run():
        options = {"path": str(folder / "was_here")}
        backend, _ = start(folder, name="my_rewards:Fragile", options=options, max_attempts=9, max_failed_starts=1)
        async with backend:
            jobs = [enqueue(backend), enqueue(backend)]
            reasons = {error for _, error in await results(jobs)}
            assert len(reasons) == 1
            assert "its worker cannot be started again" in reasons.pop()
            assert backend.down() == ["Fragile"]
            (late,) = await results([enqueue(backend)])
            assert "cannot be started again" in late[1]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"name": "my_rewards:glow"}, "my_rewards.py) has no attribute 'glow'"),
        ({"name": "not_here:glow"}, "cannot be imported: ModuleNotFoundError"),
        ({"name": "glow"}, "no reward is called 'glow'"),
        ({"name": "cosmos_rl_core.testing.tiny:TINY:glow"}, "has no reward called 'glow'; known: hits"),
        ({"name": "my_rewards:Fragile", "options": {"size": 1}}, "does not take options {'size': 1}"),
        ({"python": "no-such-python"}, "cannot run no-such-python: No such file or directory"),
        (
            {"name": "my_rewards:Fragile", "options": {"path": __file__}},
            "the worker died (exit code 3) while it was building the reward",
        ),
    ],
)
def test_a_reward_that_cannot_be_built_stops_the_server_with_its_reason(folder, reward, said):
    async def run():
        backend, _ = start(folder, **reward)
        async with backend:
            pytest.fail("it started")

    with pytest.raises(UserError, match=re.escape(said)):
        asyncio.run(run())


@pytest.fixture
def command(folder):
    """Start `cosmos-rl reward-server` with a token in the environment, and end it afterwards."""
    running = []

    def start(*arguments, without="nothing"):
        code = f"import sys; sys.modules[{without!r}] = None; from cosmos_rl_core.cli.main import main; main()"
        environment = {**os.environ, "WFM_REWARD_TOKEN": "hush-hush", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", code, "reward-server", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_the_command_serves_and_stops_cleanly(command, folder):
    (folder / "rewards.toml").write_text('port = 8300\n\n[[rewards]]\nname = "my_rewards:token"\n')
    server = command("rewards.toml", "--port", "0")
    line = server.stdout.readline()
    assert re.fullmatch(r"reward server: http://127\.0\.0\.1:\d+ \(token x1\)\n", line)
    url = line.split()[2]
    header = Header(groups=[GroupSpec(size=1)], rewards=[RewardSpec("token")])
    content = b"".join(encode_body(header, {}).pieces())
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer hush-hush"}, trust_env=False) as http:
        uuid = http.post("/api/reward/enqueue", content=content).json()["uuid"]
        scores = http.post("/api/reward/fetch", json={"uuid": uuid, "wait_s": 20}, timeout=30).json()["scores"]
        assert httpx.post(f"{url}/api/reward/ping", trust_env=False).status_code == 401
    assert scores == {"token": [0.0]}, "a reward's process knows the token"
    server.send_signal(signal.SIGTERM)
    rest, _ = server.communicate(timeout=30)
    assert (server.returncode, rest) == (0, "reward server: stopped\n")


@pytest.mark.parametrize("route", ["enqueue", "fetch"])
def test_bodies_that_are_half_sent_are_refused_at_the_end(command, folder, route):
    (folder / "rewards.toml").write_text('port = 8300\n\n[[rewards]]\nname = "my_rewards:token"\n')
    server = command("rewards.toml", "--port", "0")
    url = httpx.URL(server.stdout.readline().split()[2])
    lines = [f"POST /api/reward/{route} HTTP/1.1", "Host: x", "Authorization: Bearer hush-hush", "Content-Length: 9"]
    with socket.create_connection((url.host, url.port), timeout=30) as slow:
        slow.sendall("\r\n".join([*lines, "", "{"]).encode())
        httpx.get(url.join("/health"), trust_env=False)  # the server has read what came before
        server.send_signal(signal.SIGTERM)
        rest, _ = server.communicate(timeout=30)
        assert slow.recv(100).startswith(b"HTTP/1.1 503 ")
    assert (server.returncode, rest) == (0, "reward server: stopped\n")


def test_the_command_ends_with_130_after_ctrl_c(command):
    server = command("--reward", "my_rewards:held", "--port", "0")
    assert "(held x1)" in server.stdout.readline()
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=30)
    assert server.returncode == 130


def test_a_server_that_is_killed_leaves_no_worker_behind(command):
    server = command("--reward", "my_rewards:held", "--port", "0")
    server.stdout.readline()
    server.kill()
    server.communicate(timeout=30)  # ends when nobody holds the pipe any more, and the worker holds it too


def test_a_missing_package_is_told_with_the_line_that_installs_it(command):
    server = command("--reward", "my_rewards:held", without="uvicorn")
    said, _ = server.communicate(timeout=30)
    assert (server.returncode, said) == (
        2,
        f"error: the reward server needs uvicorn: {pip_install('cosmos-rl-core[reward]')}\n",
    )


def test_a_port_that_is_taken_is_said(command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = command("--reward", "my_rewards:held", "--port", str(port))
        said, _ = server.communicate(timeout=30)
    assert server.returncode == 2
    assert said == f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another host or port\n"
