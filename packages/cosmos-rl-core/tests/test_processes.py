"""Child processes: how they end, and with whom."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rl_core.processes import ChildProcess, all_ended, environment, is_alive, last_lines

SLEEPER = "import time; time.sleep(600)"


def start(code, output, **keys):
    return ChildProcess([sys.executable, "-c", code], environment=environment(), output=output, **keys)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", "exit code 0"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL"),
    ],
)
def test_an_end_is_named(code, status):
    child = start(code, subprocess.DEVNULL)
    assert child.wait(30) == child.wait() == child.status == status


def test_an_end_is_awaited_by_several_and_time_may_run_out():
    async def main():
        child = start(SLEEPER, subprocess.DEVNULL)
        assert not await all_ended([child], timeout_s=0.05)
        assert child.status == "" and child.exit_code is None
        child.kill()
        assert await asyncio.gather(child.ended(), child.ended()) == ["signal SIGKILL"] * 2
        assert await all_ended([child])
        child.kill()  # again, without effect

    asyncio.run(main())


@pytest.mark.parametrize("own_session", [False, True])
def test_what_a_child_has_started_is_killed_with_it(own_session, tmp_path):
    grandchild = f"subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session={own_session})"
    code = f"import subprocess, sys; print({grandchild}.pid, flush=True); "
    with (tmp_path / "log").open("wb") as log:
        child = start(code + SLEEPER, log)
    while not (written := (tmp_path / "log").read_text()).endswith("\n"):
        assert child.status == ""
    grandchild = os.pidfd_open(int(written))
    child.kill()
    assert select.select([grandchild], [], [], 30)[0]
    os.close(grandchild)
    assert child.wait() == "signal SIGKILL"


PARENT = """
import subprocess, sys
from cosmos_rl_core.processes import ChildProcess, environment
child, ours = ChildProcess.connected([sys.executable, "-c", sys.argv[1]], environment=environment(), output=2)
print(child.pid, flush=True)
sys.stdin.read()
"""
CHILD = """
import time
from cosmos_rl_core.processes import end_with, inherited_socket
end_with(inherited_socket(), grace_s=0.0)
time.sleep(600)
"""


def test_a_child_ends_with_its_parent_whatever_it_does():
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdin=-1, stdout=-1) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert select.select([child], [], [], 30)[0]
    os.close(child)


AFTER = """
import sys, time
from cosmos_rl_core.processes import end_after
end_after(int(sys.argv[1]))
print("watches", flush=True)
time.sleep(600)
"""


def test_a_process_ends_after_another_one():
    watched = start(SLEEPER, subprocess.DEVNULL)
    with subprocess.Popen([sys.executable, "-c", AFTER, str(watched.pid)], stdout=-1) as process:
        assert process.stdout.readline() == b"watches\n"
        watched.kill()
        assert process.wait(30) == 1
    watched.wait(30)
    late = subprocess.run([sys.executable, "-c", AFTER, str(watched.pid)], capture_output=True, check=False)
    assert (late.returncode, late.stdout) == (1, b"")


KEEPER = """
import signal, subprocess, sys
from cosmos_rl_core.processes import ChildProcess, OrphanGuard, environment
guard = OrphanGuard()
children = [ChildProcess([sys.executable, "-c", sys.argv[1]], environment=environment(), output=2) for _ in range(2)]
for child, grace_s in zip(children, (0.0, 600.0)):
    guard.watch(child.pid, grace_s=grace_s)
ended = ChildProcess([sys.executable, "-c", ""], environment=environment(), output=2)
guard.watch(ended.pid, grace_s=0.0)
ended.wait()
guard.forget(ended.pid)
print(*(child.pid for child in children), guard._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_stopped_process_that_outlives_its_parent_is_killed_after_its_grace():
    with subprocess.Popen([sys.executable, "-c", KEEPER, SLEEPER], stdin=-1, stdout=-1) as parent:
        first, second, guard = map(os.pidfd_open, pids := [int(pid) for pid in parent.stdout.readline().split()])
        os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
    assert select.select([first], [], [], 30)[0]
    assert not select.select([second, guard], [], [], 0)[0]
    os.kill(pids[1], signal.SIGKILL)
    assert select.select([guard], [], [], 30)[0], "it ends with those that it watches"
    for descriptor in (first, second, guard):
        os.close(descriptor)


def test_the_environment_names_threads_and_gpus_where_they_are_given(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment()["OMP_NUM_THREADS"] == "7"
    given = environment(["/a"], threads=2, gpus=["1", "3"])
    assert (given["OMP_NUM_THREADS"], given["CUDA_VISIBLE_DEVICES"]) == ("2", "1,3")
    assert given["COSMOS_RL_PYTHON_PATH"].split(os.pathsep)[0] == "/a"
    assert given["COSMOS_RL_PYTHON_PATH"].endswith(str(Path.cwd()))


def test_the_end_of_a_log_says_when_there_is_none(tmp_path):
    log = tmp_path / "policy-0.log"
    assert str(log) in last_lines(log)
    log.touch()
    assert last_lines(log) == "(its log is empty)"
    log.write_text("one\ntwo\nthree\n")
    assert last_lines(log, count=2) == "two\nthree"


def test_a_process_that_has_ended_is_not_alive_before_its_parent_asks():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(process.pid)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert not is_alive(process.pid)
    process.communicate()
    assert not is_alive(process.pid)
