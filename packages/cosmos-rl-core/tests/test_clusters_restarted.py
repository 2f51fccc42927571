"""Processes that are started again: those of `cosmos-rl node`, and the one of an actor of Ray."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from cosmos_rl_core.ops.clusters.restarted import Processes, ProcessJob, RestartedProcess


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("cosmos_rl_core.ops.clusters.restarted.PAUSE_S", 0.0)


@pytest.fixture
def process(tmp_path):
    """A process with `script` for bash, and its log."""

    def make(script, **changes):
        fixed = {"name": "rollout-0", "log": str(tmp_path / "log"), "restarts": 2, "last": (0, 2)}
        job = ProcessJob(**{**fixed, "command": ("bash", "-c", script, "worker"), **changes})
        return RestartedProcess(job, dict(os.environ)), tmp_path / "log"

    return make


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (2, 1), (1, 3)])
def test_a_process_is_started_again_after_a_crash_alone(process, code, starts):
    kept, log = process(f"echo start $*; exit {code}", first=("--resume", "auto"))
    assert asyncio.run(kept.run()) == code
    lines = log.read_text().splitlines()
    crash = [f"rollout-0: exit code {code}"] if code else []
    end = [f"rollout-0: not started again, after {starts} starts ([elastic] restart_workers)"] if code == 1 else []
    assert lines == [*["start --resume auto", *crash], *["start", *crash] * (starts - 1), *end]
    assert kept.starts == starts


def test_a_process_gets_the_preamble_and_the_arguments_of_each_start(process):
    arguments = iter([["a b"], ["c"], ["d"]])
    kept, log = process('echo "$WORD" "$1"; kill -9 $$', preamble=("export WORD='two words'",))
    assert asyncio.run(kept.run(partial(next, arguments))) == 137
    assert log.read_text().splitlines()[:-1:2] == ["two words a b", "two words c", "two words d"]


def test_a_process_that_is_ended_saves_and_is_not_started_again(process):
    kept, log = process("trap 'echo saved; exit 1' TERM; echo ready; while true; do sleep 0.01; done")
    codes = []
    thread = threading.Thread(target=lambda: codes.append(asyncio.run(kept.run())))
    thread.start()
    wait_until(lambda: log.exists() and "ready" in log.read_text())
    kept.end()
    thread.join(60)
    assert codes == [1] and kept.starts == 1
    assert log.read_text().splitlines()[1] == "saved"


def test_a_process_that_shall_end_before_its_start_is_not_started(process):
    kept, log = process("echo ready")
    kept.end()
    assert (asyncio.run(kept.run()), kept.starts, log.read_text()) == (143, 0, "")


def test_a_process_ends_with_the_one_that_has_started_it(tmp_path):
    text = (
        "import asyncio, os; from cosmos_rl_core.ops.clusters.restarted import ProcessJob, RestartedProcess\n"
        "command = ('bash', '-c', 'echo $$; exec sleep 600')\n"
        f"job = ProcessJob(name='a', command=command, log='{tmp_path}/log', restarts=0)\n"
        "asyncio.run(RestartedProcess(job, os.environ).run())"
    )
    parent = subprocess.Popen([sys.executable, "-c", text])
    wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().endswith("\n"))
    pid = int((tmp_path / "log").read_text())
    wait_until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"))
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(pid))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_of_a_machine_print_their_output_and_their_crashes(capfd):
    async def go():
        processes = Processes(preamble=["export A=b"], variables={"C": "d"}, restarts=1)
        script = 'echo $A $C "$@"; exit 7'
        return await processes.keep("one", ["bash", "-c", script, "x"], first=["first"])

    assert asyncio.run(go()) == 7
    assert capfd.readouterr().out == (
        "b d first\none: exit code 7\nb d\none: exit code 7\n"
        "one: not started again, after 2 starts ([elastic] restart_workers)\n"
    )


def test_processes_of_a_machine_that_were_terminated_are_not_started_again(tmp_path):
    """SIGTERM to one name; the other one, which gets none, is killed after the time to save."""

    async def go():
        processes = Processes(preamble=[], variables={}, restarts=2)
        kept = {name: asyncio.create_task(processes.keep(name, waiting(tmp_path / name))) for name in ("one", "two")}
        while not all((tmp_path / name).exists() for name in kept):
            await asyncio.sleep(0.01)
        processes.terminate(["one"])
        assert await kept["one"] == 5
        assert not kept["two"].done()
        await processes.end(grace_s=0.0)
        return await kept["two"]

    assert asyncio.run(asyncio.wait_for(go(), 60)) == 137


def waiting(up):
    return ["bash", "-c", f"trap 'exit 5' TERM; touch {up}; while true; do sleep 0.01; done"]
