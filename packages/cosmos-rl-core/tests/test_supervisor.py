"""The owner of child processes: what it starts again, ends, and reports."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from cosmos_rl_core.supervisor import ProcessEnd, ProcessSpec, ProcessSupervisor

WAITING = "trap 'echo saved; exit 5' TERM; echo ready; while true; do sleep 0.01; done"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("cosmos_rl_core.supervisor.PAUSE_S", 0.0)


@pytest.fixture
def spec(tmp_path):
    """A process with a script for bash and a log, NAME.log."""

    def make(script, **changes):
        name = changes.pop("name", "rollout-0")
        fixed = {"log": str(tmp_path / f"{name}.log"), "restarts": 2}
        return ProcessSpec(**{**fixed, "name": name, "command": ("bash", "-c", script, "worker"), **changes})

    return make


def text_of(spec):
    with open(spec.log) as log:
        return log.read()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (2, 1), (1, 3)])
def test_a_process_is_started_again_after_a_crash_alone(spec, code, starts):
    kept, supervisor = spec(f"echo start $*; exit {code}", first=("--resume", "auto")), ProcessSupervisor()
    assert asyncio.run(supervisor.keep(kept)) == code
    crash = [f"rollout-0: exit code {code}"] if code else []
    end = [f"rollout-0: not started again, after {starts} starts ([elastic] restart_workers)"] if code == 1 else []
    lines = text_of(kept).splitlines()
    assert lines == [*["start --resume auto", *crash], *["start", *crash] * (starts - 1), *end]
    assert supervisor.starts("rollout-0") == starts and not supervisor.is_last("rollout-0")


def test_a_process_gets_variables_the_preamble_and_the_arguments_of_each_start(spec):
    given = iter([["a b"], ["c"], ["d"]])

    async def arguments():
        return next(given)

    script = 'echo "$WORD" "$COLOR" "$1"; kill -9 $$'
    kept = spec(script, preamble=("export WORD='two words'",), variables={"COLOR": "red"})
    assert asyncio.run(ProcessSupervisor().keep(kept, arguments=arguments)) == 137
    starts = ["two words red a b", "two words red c", "two words red d"]
    assert text_of(kept).splitlines()[:-1:2] == starts


def test_a_process_that_is_asked_to_end_saves_and_is_not_started_again(spec):
    """SIGTERM to one name; the other one, which gets none, is killed after the time to save."""
    first, second = spec(WAITING), spec(WAITING, name="rollout-1")

    async def go():
        supervisor = ProcessSupervisor()
        kept = [asyncio.create_task(supervisor.keep(one)) for one in (first, second)]
        await until(lambda: all(os.path.exists(one.log) and "ready" in text_of(one) for one in (first, second)))
        supervisor.terminate(["rollout-0"])
        assert await kept[0] == 5 and supervisor.is_last("rollout-0")
        assert not kept[1].done() and not supervisor.is_last("rollout-1")
        await supervisor.stop(grace_s=0.0)
        return await kept[1], supervisor.starts("rollout-0")

    assert asyncio.run(go()) == (137, 1)
    assert text_of(first).splitlines()[1] == "saved"


def test_a_process_that_is_killed_is_started_again_if_that_is_asked_for(spec):
    kept = spec("echo ready; exec sleep 600")

    async def go():
        supervisor = ProcessSupervisor()
        keeping = asyncio.create_task(supervisor.keep(kept))
        for starts in (1, 2):
            await until(lambda: os.path.exists(kept.log) and text_of(kept).count("ready") == starts)  # noqa: B023
            supervisor.kill(restart=starts == 1)
        return await keeping, supervisor.starts("rollout-0")

    assert asyncio.run(go()) == (137, 2)


def test_a_process_that_shall_end_before_its_start_is_not_started(spec):
    async def go():
        supervisor = ProcessSupervisor()

        async def arguments():
            supervisor.terminate()
            return []

        return await supervisor.keep(spec("echo ready"), arguments=arguments), supervisor.starts("rollout-0")

    assert asyncio.run(go()) == (143, 0)


def test_without_a_rule_the_end_is_reported_and_its_owner_decides(spec):
    kept = [spec("echo $0 ends; exit 3"), spec("kill -9 $$", name="rollout-1")]

    async def go():
        supervisor = ProcessSupervisor()
        supervisor.start(kept)
        ends = [await supervisor.next_end() for _ in kept]
        supervisor.start(kept[:1])
        ends.append(await supervisor.next_end())
        await supervisor.stop(grace_s=0.0)
        return ends

    first, second, again = asyncio.run(go())
    by_name = {end.name: end for end in (first, second)}
    assert by_name["rollout-0"] == ProcessEnd(
        name="rollout-0", exit_code=3, status="exit code 3", last_lines="worker ends"
    )
    killed = by_name["rollout-1"]
    assert (killed.exit_code, killed.status, killed.last_lines) == (-9, "signal SIGKILL", "(its log is empty)")
    assert again.last_lines == "worker ends\nworker ends"


def test_processes_without_a_log_have_the_output_of_this_one(capfd):
    command = ("bash", "-c", 'echo out "$@"; echo error >&2; exit 7', "x")
    kept = ProcessSpec(name="one", command=command, first=("first",), restarts=1)
    assert asyncio.run(ProcessSupervisor().keep(kept)) == 7
    out, error = capfd.readouterr()
    assert out == (
        "out first\none: exit code 7\nout\none: exit code 7\n"
        "one: not started again, after 2 starts ([elastic] restart_workers)\n"
    )
    assert error == "error\nerror\n"


PARENT = """
import asyncio
from cosmos_rl_core.supervisor import ProcessSpec, ProcessSupervisor
async def go():
    supervisor = ProcessSupervisor()
    command = ("bash", "-c", "trap '' HUP TERM; echo $$; while true; do sleep 600; done")
    supervisor.start([ProcessSpec(name="a", command=command)])
    print("watched", flush=True)
    await supervisor.next_end()
asyncio.run(go())
"""


def test_a_process_ends_with_its_supervisor_though_it_ignores_signals():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=-1) as parent:
        lines = {parent.stdout.readline().strip() for _ in range(2)}
        child = os.pidfd_open(int((lines - {b"watched"}).pop()))
        parent.send_signal(signal.SIGKILL)
    assert select.select([child], [], [], 60)[0]
    os.close(child)
