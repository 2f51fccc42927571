"""Workers that are forked from a process with a run's imports."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cosmos_rl_core.imports import PYTHON
from cosmos_rl_core.launch.local import LocalWorkers, fork_server
from cosmos_rl_core.launch.supervised.keeper import ProcessKeeper
from cosmos_rl_core.processes import environment
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.wire.handshake import make_token
from cosmos_rl_core.workers.fork_server import ForkedProcess, ForkServer, opened
from cosmos_rl_core.workers.node import WorkerAddress, to_arguments

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")

STARTS_A_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"


@pytest.fixture
def quiet():
    """An address that accepts connections and says nothing, so that workers wait there."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def serving(tmp_path):
    """Opens servers that import from the test's folder."""
    with contextlib.ExitStack() as stack:

        def open_server(*modules):
            variables = environment() | {"PYTHONPATH": str(tmp_path)}
            server = stack.enter_context(ForkServer(environment=variables))
            server.load(modules, log=tmp_path / "imports.log")
            return server

        yield open_server


@pytest.fixture
def started(tmp_path):
    """Starts a worker of a server; its log is tmp_path / NAME.log."""
    make_token(tmp_path / "token")

    def start(server, *, controller, name="rollout-0", token="token", **keys):
        address = WorkerAddress(controller=controller, role="rollout", name=name, token_file=tmp_path / token)
        with (tmp_path / f"{name}.log").open("wb") as log:
            return server.start(to_arguments(address), environment=environment() | keys, output=log)

    return start


def words_of(pid, file="cmdline"):
    return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")


def waits(pid, seconds=60.0):
    """Wait until a worker shows its own command."""
    deadline = time.monotonic() + seconds
    while b"--name" not in words_of(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_forked_worker_is_a_process_like_a_command(serving, started, tmp_path, quiet):
    server = serving()
    child = started(server, controller=quiet)
    waits(child.pid)
    assert child.started and child.status == "" and child.exit_code is None
    words = words_of(child.pid)
    assert words[1:4] == [b"-P", b"-m", b"cosmos_rl_core.workers.main"]
    assert str(tmp_path / "token").encode() in words and b"rollout-0" in words
    assert os.getsid(child.pid) == child.pid != os.getsid(server.pid)
    child.kill()
    assert child.wait(30) == child.status == "signal SIGKILL"
    child.kill()  # again, without effect


def test_the_exit_code_and_the_output_of_each_worker_are_its_own(serving, started, tmp_path):
    server = serving()
    unreachable = started(server, controller="tcp://127.0.0.1:9", name="rollout-0")
    no_token = started(server, controller="tcp://127.0.0.1:9", name="rollout-1", token="missing")
    assert (unreachable.wait(60), no_token.wait(60)) == ("exit code 1", "exit code 2")
    assert (tmp_path / "rollout-0.log").read_text().startswith("rollout-0: cannot connect to tcp://127.0.0.1:9")
    assert "cannot read the token file" in (tmp_path / "rollout-1.log").read_text()
    assert (tmp_path / "imports.log").read_text() == ""


def test_workers_survive_their_server_which_then_forks_no_more(serving, started, quiet):
    server = serving()
    child = started(server, controller=quiet)
    waits(child.pid)
    os.kill(server.pid, 9)
    assert child.wait(0.2) == ""
    while (late := started(server, controller=quiet, name="rollout-1")) is not None:
        assert late.wait(30) == "exit code 1" and not late.started
    child.kill()
    assert child.wait(30) == "unknown, its fork server had ended"
    assert child.exit_code == 1


@pytest.mark.ci
def test_a_rollout_that_does_not_notice_the_end_of_its_run_is_killed(serving, started, quiet):
    server = serving()
    child = started(server, controller=quiet)
    waits(child.pid)
    os.kill(child.pid, signal.SIGSTOP)  # as in a call that keeps Python's lock, nothing of it runs
    server._socket.close()  # of a run that was killed
    assert server._process.wait(60) == "exit code 0"
    assert child.wait(60) == "unknown, its fork server had ended"


def test_a_worker_killed_before_the_fork_is_not_forked(serving, started, tmp_path, quiet):
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(1.0)\n")
    server = serving("takes_long")
    early, other = (started(server, controller=quiet, name=name) for name in ("rollout-0", "rollout-1"))
    early.kill()
    assert early.wait(5) == "exit code 1" and not early.started
    waits(other.pid)
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    names = [words_of(pid) for pid in map(int, children)]
    assert all(b"rollout-0" not in words for words in names) and len(names) <= 2
    other.kill()


async def attached(controller, server, tmp_path, deaths, *, restart_workers=1):
    """Return workers that this fork server starts."""
    keeper = ProcessKeeper(log_dir=tmp_path, fork_server=server)
    workers = LocalWorkers(
        keeper=keeper,
        token_file=tmp_path / "token",
        log_dir=tmp_path,
        restart_workers=restart_workers,
        on_death=deaths.put_nowait,
    )
    await keeper.attach(controller, secrets={}, on_end=workers.ended)
    return workers


@pytest.mark.parametrize(
    ("module", "told"), [(STARTS_A_THREAD, "1 threads running"), ("import os; os._exit(3)", "")], ids=["thread", "exit"]
)
def test_without_a_server_workers_are_started_as_commands(module, told, serving, tmp_path):
    (tmp_path / "unsuitable.py").write_text(module)
    make_token(tmp_path / "token")
    deaths: asyncio.Queue = asyncio.Queue()

    async def go():
        workers = await attached("tcp://127.0.0.1:9", serving("unsuitable"), tmp_path, deaths)
        workers.start(workers.replicas("rollout", threads=1, gpus=[[]]))
        found = [await asyncio.wait_for(deaths.get(), 60.0) for _ in range(2)]
        await workers.leave(grace_s=10.0)
        return found

    first, second = asyncio.run(go())
    assert (first.status, first.restarting, second.restarting) == ("exit code 1", True, False)
    assert first.last_lines.startswith("rollout-0: cannot connect to")
    assert told in (tmp_path / "imports.log").read_text()


def test_a_worker_that_cannot_be_started_as_a_command_either_has_ended(serving, tmp_path):
    (tmp_path / "unsuitable.py").write_text("import os, time; time.sleep(1.0); os._exit(3)")
    make_token(tmp_path / "token")
    deaths: asyncio.Queue = asyncio.Queue()

    async def go():
        server = serving("unsuitable")
        workers = await attached("tcp://127.0.0.1:9", server, tmp_path, deaths, restart_workers=0)
        workers.start(workers.replicas("rollout", threads=1, gpus=[[]]))
        (log := tmp_path / "rollout-0.log").unlink()
        log.mkdir()
        death = await asyncio.wait_for(deaths.get(), 60.0)
        await workers.leave(grace_s=10.0)
        return death

    death = asyncio.run(go())
    assert death.status.startswith("cannot be started: [Errno 21]")
    assert death.last_lines.startswith("(its log cannot be read")


def test_a_restarted_worker_is_forked_again(serving, tmp_path, quiet):
    make_token(tmp_path / "token")
    deaths: asyncio.Queue = asyncio.Queue()

    async def go():
        workers = await attached(quiet, server := serving(), tmp_path, deaths)
        workers.start(workers.replicas("rollout", threads=1, gpus=[[]]))
        first = await asyncio.to_thread(workers.keeper.pid, "rollout-0")
        os.kill(first, 9)
        death = await asyncio.wait_for(deaths.get(), 60.0)
        second = await asyncio.to_thread(workers.keeper.pid, "rollout-0")
        parent = int(Path(f"/proc/{second}/stat").read_text().rpartition(")")[2].split()[1])
        workers.kill()
        await workers.leave(grace_s=10.0)
        return death, first != second, parent == server.pid

    death, another, forked = asyncio.run(go())
    assert (death.status, death.restarting, another, forked) == ("signal SIGKILL", True, True, True)


def test_a_module_that_cannot_be_imported_is_left_to_the_worker(serving, started, tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('broken')\n")
    child = started(serving("broken", "no_such_module"), controller="tcp://127.0.0.1:9")
    assert isinstance(child, ForkedProcess)
    assert child.wait(60) == "exit code 1" and child.started


def test_the_log_has_the_output_of_all_imports(serving, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('first')\n")
    (tmp_path / "speaks.py").write_text("print('second')\n")
    server = serving("speaks")
    deadline = time.monotonic() + 60.0
    while "second" not in (text := (tmp_path / "imports.log").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert text.split() == ["first", "second"]
    server.close()
    server.close()  # again, without effect


def test_the_server_imports_from_the_folders_of_the_recipe(tmp_path):
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "beside_the_recipe.py").write_text("print(__file__)\n")
    log = tmp_path / "imports.log"
    with ForkServer(environment=environment()) as server:
        server.load(["beside_the_recipe"], folders=[str(folder)], log=log)
        deadline = time.monotonic() + 60.0
        while not log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert log.read_text().strip() == str(folder / "beside_the_recipe.py")


def tiny(*, placement="local", ranks=1):
    return load_config(
        {
            "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1, "placement": placement},
            "policy": {"parallel": {"dp_replicate": ranks}},
            "reward": {"functions": [{"name": "hits"}]},
        }
    )


def test_imports_begin_for_two_workers_and_not_for_one(tmp_path):
    with fork_server(tiny(), tmp_path, python_path=(), begun=None) as server:
        assert server is not None
    with fork_server(tiny(ranks=2), tmp_path, python_path=(), begun=None) as server:
        assert server is None  # ranks of a policy are started as commands


@pytest.mark.parametrize(
    ("placement", "ranks", "is_used"), [("inline", 1, False), ("local", 1, True), ("local", 2, True)]
)
def test_a_server_that_has_begun_is_used_or_closed(placement, ranks, is_used, tmp_path):
    config = tiny(placement=placement, ranks=ranks)
    with opened() as begun, fork_server(config, tmp_path, python_path=(), begun=begun) as server:
        assert begun is not None
        if is_used:
            assert server is begun
        else:
            assert server is None
            with pytest.raises(ProcessLookupError):
                os.kill(begun.pid, 0)


def test_the_server_ends_in_silence_after_a_run_that_was_killed(tmp_path):
    log = tmp_path / "imports.log"
    with ForkServer(environment=environment()) as server:
        server.load((), log=log)
        server._socket.close()  # with the server's byte unread
        assert server._process.wait(60) == "exit code 0"
    assert log.read_text() == ""


PRELOADED = """
import sys, time
from pathlib import Path
from cosmos_rl_core.workers import fork_server
def import_module(name, before=set(sys.modules)):
    __import__(name)
    if name == "sympy":
        files = [str(getattr(sys.modules[each], "__file__", "")) for each in set(sys.modules) - before]
        print([file for file in files if file.endswith(".so")])
    before |= set(sys.modules)
fork_server.importlib.import_module = import_module
fork_server.preload_torch()
print("libtorch_cpu" in Path("/proc/self/maps").read_text(), "torch" in sys.modules)
deadline = time.monotonic() + 10.0
while len(list(Path("/proc/self/task").iterdir())) > 1:  # the kernel ends a thread a moment after its join
    assert time.monotonic() < deadline
import torch
print(torch.ones(2).sum().item())
"""


def test_torch_is_opened_while_sympy_imports_nothing_compiled():
    done = subprocess.run([*PYTHON, "-c", PRELOADED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["[]", "True False", "2.0"]


def test_the_server_ends_with_the_run(serving, tmp_path):
    with ForkServer(environment=environment()) as server:
        server.load((), log=tmp_path / "imports.log")
        handle = os.pidfd_open(server.pid)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    os.close(handle)
