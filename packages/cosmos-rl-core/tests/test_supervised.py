"""The launcher of `cosmos-rl run`: its controllers, one after the other, and the workers between them."""

import asyncio
import json
import os
import signal
import sys

import pytest

from cosmos_rl_core.launch.open_recipe import OpenRecipe
from cosmos_rl_core.launch.supervised import command
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.workers.directory import RunDirectory

CONTROLLER = """
import asyncio, json, os, socket, sys
from pathlib import Path
import msgspec
from cosmos_rl_core.launch.supervised.link import LauncherLink, ControllerTask
from cosmos_rl_core.supervisor import ProcessSpec

task = msgspec.msgpack.decode(open(int(sys.argv[2]), "rb").read(), type=ControllerTask)
link, folder = LauncherLink(task, socket.socket(fileno=int(sys.argv[1]))), Path(task.directory)

def worker(name, code):
    return ProcessSpec(name=name, command=("bash", "-c", code), log=str(folder / "logs" / name))

def note(*values):
    with (folder / "seen").open("a") as file:
        file.write(json.dumps([[one.name for one in task.workers], [one.name for one in task.ended], *values]) + "\\n")

async def run():
    await link.open()
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Run a launcher whose controllers have this body; return its exit code, and what the controllers have seen."""
    monkeypatch.chdir(tmp_path)

    def run(body, *, restarts=3):
        indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
        (tmp_path / "controller.py").write_text(f"{CONTROLLER}{indented}\nasyncio.run(run())\n")
        monkeypatch.setattr(command, "COMMAND", (sys.executable, str(tmp_path / "controller.py")))
        tables = {
            "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1, "output_dir": "run"},
            "model": {},
            "data": {},
            "reward": {"functions": [{"name": "hits"}]},
        }
        given = OpenRecipe(config=load_config(tables), python_path=())
        directory = RunDirectory.open(tmp_path / "run", resume=False, overwrite=False)
        (tmp_path / "run" / "controller.json").touch()  # it serves
        launcher = command.ControllerLauncher(given, directory, resume=None, overwrite=False)
        try:
            code = asyncio.run(asyncio.wait_for(launcher.run(restarts), 100))
        finally:
            directory.close()
        assert not (tmp_path / "run" / "controller.json").exists()
        seen = tmp_path / "run" / "seen"
        return code, [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []

    return run


def test_a_later_controller_gets_the_workers_and_the_ends_that_nobody_has_dealt_with(launched, capfd):
    body = """
if not task.began:
    note("first", task.is_orphaned)
    names = ["policy-0", "rollout-0", "rollout-1", "rollout-2"]
    link.start([worker(name, "exit 1" if name == "rollout-0" else "exec sleep 600") for name in names])
    end = await link.next_end()
    link.kill(["rollout-1"])
    killed = await link.next_end()
    link.forget("rollout-1")
    os.kill(os.getpid(), 9)
note("second", task.is_orphaned)
link.start([worker("rollout-0", "exit 3")])
end = await link.next_end()
note(end.name, end.exit_code)
link.kill(["policy-0", "rollout-2"])
for _ in range(2):
    await link.next_end()
os._exit(3)
"""
    code, seen = launched(body)
    workers = ["policy-0", "rollout-0", "rollout-2"]
    assert code == 3
    assert seen == [
        [[], [], "first", False],
        [workers, ["rollout-0"], "second", True],
        [workers, ["rollout-0"], "rollout-0", 3],
    ]
    assert capfd.readouterr().err == "the controller died (signal SIGKILL); starting it again\n"


def test_a_controller_that_crashes_again_and_again_is_given_up(launched, capfd):
    code, seen = launched("note(task.can_restart); os._exit(70)", restarts=2)
    assert (code, [line[2] for line in seen]) == (1, [True, True, False])
    error = capfd.readouterr().err
    assert error.count("the controller crashed; starting it again") == 2
    assert error.endswith("error: the controller crashed. Its workers leave; go on with --resume auto\n")


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_the_code_of_a_controller_that_ends_by_itself_is_that_of_the_command(launched, code):
    assert launched(f"note(); os._exit({code})") == (code, [[[], []]])


def test_a_controller_that_died_before_it_served_is_not_started_again(launched, capfd):
    assert launched("(folder / 'controller.json').unlink(); os.kill(os.getpid(), 9)") == (1, [])
    assert "error: the controller died (signal SIGKILL). Its workers leave" in capfd.readouterr().err


def test_ctrl_c_reaches_the_controller_and_the_next_one_that_is_ready(launched):
    body = f"""
import signal
asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: note("interrupted"))
if not task.is_orphaned:
    link.ready()
    os.kill({os.getpid()}, signal.SIGINT)
    while not (folder / "seen").exists():
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), 9)
note(task.interrupted)
os.kill({os.getpid()}, signal.SIGTERM)
await asyncio.sleep(0.1)
note("ready")
asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 130)
link.ready()
await asyncio.sleep(60)
"""
    before = signal.getsignal(signal.SIGINT)
    code, seen = launched(body)
    assert code == 130 and [line[2] for line in seen] == ["interrupted", True, "ready"]
    assert signal.getsignal(signal.SIGINT) == before


def test_workers_that_outlive_the_last_controller_are_killed(launched, monkeypatch):
    monkeypatch.setattr(command, "STOP_GRACE_S", 0.0)
    code, [[_, _, pid]] = launched("""
link.start([worker("rollout-0", "echo $$ > pid; exec sleep 600")])
while not (pid := Path("pid")).exists() or not pid.read_text():
    await asyncio.sleep(0.01)
note(int(pid.read_text()))
os._exit(2)
""")
    assert code == 2
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
