"""Worker processes on this machine."""

import asyncio
import socket

import pytest

from cosmos_rl_core.launch.local import LocalWorkers
from cosmos_rl_core.launch.placement import share_threads
from cosmos_rl_core.launch.supervised.keeper import ProcessKeeper, WorkerEnded
from cosmos_rl_core.processes import LAST_LINES, last_lines
from cosmos_rl_core.wire.handshake import make_token, read_token


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


async def attached(tmp_path, controller, *, restart_workers, on_death, secrets=()):
    """Return workers of this machine that start with this controller's address."""
    keeper = ProcessKeeper(log_dir=tmp_path)
    workers = LocalWorkers(
        keeper=keeper,
        token_file=tmp_path / "token",
        log_dir=tmp_path,
        restart_workers=restart_workers,
        on_death=on_death,
    )
    await keeper.attach(controller, secrets=dict(secrets), on_end=workers.ended)
    return workers


def start_workers(tmp_path, *, role, restart_workers, deaths_expected, token=True):
    """Start a worker without a controller; return the deaths that are reported."""
    if token is True:
        make_token(tmp_path / "token")

    async def go():
        deaths: asyncio.Queue = asyncio.Queue()
        address = f"tcp://127.0.0.1:{unused_port()}"
        secrets = {str(tmp_path / "token"): token.hex()} if isinstance(token, bytes) else {}
        workers = await attached(
            tmp_path, address, secrets=secrets, restart_workers=restart_workers, on_death=deaths.put_nowait
        )
        try:
            workers.start(workers.replicas(role, threads=1, gpus=[["2"]]))
            seen = [await asyncio.wait_for(deaths.get(), 60.0) for _ in range(deaths_expected)]
        finally:
            workers.kill()
            await workers.leave(grace_s=10.0)
        return seen + [deaths.get_nowait() for _ in range(deaths.qsize())]

    return asyncio.run(go())


def test_a_rollout_worker_that_cannot_connect_is_told_and_started_again(tmp_path):
    first, second = start_workers(tmp_path, role="rollout", restart_workers=1, deaths_expected=2)
    assert (first.name, first.status, first.restarting) == ("rollout-0", "exit code 1", True)
    assert first.last_lines.startswith("rollout-0: cannot connect to tcp://127.0.0.1:")
    assert not second.restarting


def test_a_worker_is_started_though_the_token_file_was_removed(tmp_path):
    token = make_token(tmp_path / "token")
    (tmp_path / "token").unlink()
    (death,) = start_workers(tmp_path, role="rollout", restart_workers=0, deaths_expected=1, token=token)
    assert death.last_lines.startswith("rollout-0: cannot connect to tcp://127.0.0.1:")
    assert read_token(tmp_path / "token") == token


def test_a_policy_worker_is_started_again_like_a_rollout_worker(tmp_path):
    first, second = start_workers(tmp_path, role="policy", restart_workers=1, deaths_expected=2)
    assert (first.name, first.status, first.restarting) == ("policy-0", "exit code 1", True)
    assert not second.restarting


def test_a_worker_the_user_has_to_mend_is_not_started_again(tmp_path):
    (death,) = start_workers(tmp_path, role="rollout", restart_workers=3, deaths_expected=1, token=False)
    assert (death.status, death.restarting) == ("exit code 2", False)
    assert "cannot read the token file" in death.last_lines


def test_workers_that_are_killed_at_the_end_are_no_deaths(tmp_path):
    make_token(tmp_path / "token")
    deaths = []

    async def go():
        async def hold(reader, writer):
            await reader.read()
            writer.close()

        server = await asyncio.start_server(hold, "127.0.0.1", 0)  # never says hello: the worker waits
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        workers = await attached(tmp_path, address, restart_workers=3, on_death=deaths.append)
        workers.start(workers.replicas("rollout", threads=1, gpus=[[], []]))
        assert len({workers.keeper.pid("rollout-0"), workers.keeper.pid("rollout-1")}) == 2
        await workers.leave(grace_s=0.05)
        server.close()
        await server.wait_closed()

    asyncio.run(go())
    assert deaths == []


class StartsOnly:
    """A keeper that notes which workers are started."""

    def __init__(self):
        self.started = []

    def start(self, workers):
        self.started += [spec.name for spec in workers]

    def forget(self, name):
        pass


def left(name):
    return WorkerEnded(name=name, exit_code=0, status="exit code 0", last_lines="left")


def test_the_last_rollout_worker_that_leaves_is_started_again_as_often_as_a_killed_one(tmp_path):
    keeper, deaths = StartsOnly(), []
    workers = LocalWorkers(
        keeper=keeper, token_file=tmp_path / "token", log_dir=tmp_path, restart_workers=1, on_death=deaths.append
    )
    workers.is_missed = lambda name: len(workers.names("rollout")) == 1
    workers.start(workers.replicas("rollout", threads=1, gpus=[[], []]))
    workers.ended(left("rollout-0"))
    assert (deaths, workers.names("rollout")) == ([], ["rollout-1"])
    workers.ended(left("rollout-1"))
    assert keeper.started == ["rollout-0", "rollout-1", "rollout-1"]
    workers.ended(left("rollout-1"))
    assert [(death.name, death.left, death.restarting) for death in deaths] == [
        ("rollout-1", True, True),
        ("rollout-1", True, False),
    ]
