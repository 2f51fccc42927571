"""`launch`, `Launched` and `cosmos-rl stop`, on a platform of files."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
from fake_platform import LEAVING, QUOTA, FakePlatform

from cosmos_rl_core.cli.app import main
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.clusters.launcher import ClusterRun, Launched, launch
from cosmos_rl_core.ops.clusters.local import Local, end_process
from cosmos_rl_core.processes import ChildProcess, is_alive
from cosmos_rl_core.testing.conformance import check_launcher, refused
from cosmos_rl_core.wire.channel import ConnectionClosed
from cosmos_rl_core.workers.directory import RunDirectory
from cosmos_rl_core.workers.main import connect_to
from cosmos_rl_core.workers.node import WorkerAddress

FAKE = "fake_platform:FakePlatform"
RECIPE = """
[run]
domain = "cosmos_rl_core.testing.tiny:TINY"
output_dir = "run"
max_steps = 100000
[policy]
prompts_per_step = 4
[rollout]
replicas = 2
[[reward.functions]]
name = "hits"
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return the recipe as a ClusterRun, with the directory `run`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RECIPE)
    return partial(ClusterRun.of, tmp_path / "run.toml")


def soon(condition, what):
    assert any(condition() for _ in range(len(LEAVING) + 1)), what


def test_a_fake_platform_conforms(cluster):
    run = cluster([])
    check_launcher(FakePlatform(), run, start=lambda: launch(FAKE, run, resume=False), until=soon)


def test_a_platform_that_refuses_a_job_has_none_of_the_run(cluster):
    run = cluster([f"rollout.replicas={QUOTA}"])
    refused(lambda: launch(FAKE, run, resume=False), because=f"rollout-{QUOTA - 1}: quota of {QUOTA} jobs exceeded")
    assert FakePlatform().alive(run) == {}


def test_here_a_run_that_cannot_start_is_an_error_with_the_end_of_its_output(cluster):
    run = cluster(['cluster.command="/nowhere/cosmos-rl"'])
    refused(lambda: launch("local", run, resume=False), because="/nowhere/cosmos-rl: No such file or directory")
    assert Local().alive(run) == {}


def test_an_earlier_run_is_continued_on_request_alone(cluster, tmp_path):
    run = cluster([])
    run.directory.mkdir()
    (run.directory / "resolved.toml").touch()
    refused(lambda: launch(FAKE, run, resume=False), because="continue it with --resume")
    launch(FAKE, run, resume=True)
    refused(lambda: launch("local", run, resume=True), because="has jobs already: run RUNNING")
    assert "--resume auto" in Local().plan(run)


def test_a_launched_run_is_found_from_any_directory(cluster, tmp_path, monkeypatch):
    launch(FAKE, cluster([]), resume=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    launched = Launched.of(tmp_path / "run")
    assert launched is not None
    assert set(launched.alive()) == {"run", "policy-0", "rollout-0", "rollout-1"}
    with pytest.raises(UserError, match=r"launch it with --resume policy\.replicas=2"):
        launched.scale({"policy": 2})
    with pytest.raises(UserError, match="at least one rollout worker must stay; cosmos-rl stop ends the run"):
        launched.scale({"rollout": 0})


def test_stop_ends_jobs_without_a_controller(cluster, capsys):
    run = cluster([])
    launch(FAKE, run, resume=False)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["stop", "run"])
    assert capsys.readouterr().out == (
        "run: ended\npolicy-0: ended\nrollout-0: ended\nrollout-1: ended\nthe run has ended\n"
    )
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["stop", "run", "--now"])
    assert capsys.readouterr().out == "the run has ended\n"
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["stop", "elsewhere"])
    assert "elsewhere: there is no such directory" in capsys.readouterr().err


def test_status_without_a_controller_says_so(cluster, tmp_path, capsys, monkeypatch):
    def shown():
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["status", "run"])
        return capsys.readouterr()

    run = cluster([])
    launch(FAKE, run, resume=False)
    assert shown().out.endswith("rollout-1: RUNNING\n\nrun: no controller yet: it starts with its job\n")
    (run.directory / "status.json").write_text(json.dumps({"time": 0.0, "phase": "train", "step": 1, "version": 1}))
    assert "phase train" in shown().out
    os.utime(run.directory / "status.json", (0.0, 0.0))  # of an earlier launch
    assert "no controller yet" in shown().out
    FakePlatform().stop(run, now=True)
    assert "NOT LIVE" in shown().out
    (run.directory / "status.json").unlink()
    assert shown().out == f"run: launched on {FAKE}, and ended without a controller: see its launch/*.log\n"
    monkeypatch.setattr(FakePlatform, "alive", lambda self, run: refuse("squeue is not installed here"))
    assert "not known here: squeue is not installed here" in shown().err
    monkeypatch.setattr(FakePlatform, "shares_files", False, raising=False)
    assert "its controller writes the status into the run's volume" in shown().out


def refuse(text):
    raise UserError(text)


def test_a_run_that_starts_has_no_controller_yet_and_can_be_stopped(tmp_path, capsys):
    with held(tmp_path) as holder:
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["status", str(tmp_path)])
        assert capsys.readouterr().out == f"{tmp_path}: no controller yet: process {holder.pid} starts it\n"
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["stop", str(tmp_path)])
        assert holder.wait(60) == -signal.SIGTERM


def test_a_run_of_another_machine_is_not_looked_for_here(tmp_path, capsys):
    with held(tmp_path) as holder:
        pid, host, started = (tmp_path / "run.lock").read_text().split()
        assert int(pid) == holder.pid
        (tmp_path / "run.lock").write_text(f"{pid} elsewhere {started}\n")
        with pytest.raises(UserError, match=f"is in use by process {pid} of elsewhere: stop the run there"):
            end_process(tmp_path, now=True)
        (tmp_path / "run.lock").write_text(f"{pid} {host} 1\n")  # a pod before this one
        with pytest.raises(UserError, match="in use by workers of a killed run"):
            end_process(tmp_path, now=True)


@pytest.mark.parametrize("now", [False, True])
def test_a_controller_that_does_not_answer_gets_a_signal(tmp_path, capsys, now):
    with held(tmp_path) as holder:
        unreachable = {"address": "tcp://127.0.0.1:1", "generation": 0, "pid": holder.pid, "host": "here"}
        (tmp_path / "controller.json").write_text(json.dumps(unreachable))
        (tmp_path / "token").write_text("0" * 64)
        (tmp_path / "token").chmod(0o600)
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["stop", str(tmp_path), *(["--now"] if now else [])])
        assert holder.wait(60) == (-signal.SIGKILL if now else -signal.SIGTERM)
    out, err = capsys.readouterr()
    assert f"process {holder.pid} gets {'SIGKILL' if now else 'SIGTERM'}" in out
    assert "the controller does not answer" in err
    assert end_process(tmp_path, now=now) == []


@contextlib.contextmanager
def held(run_dir):
    """A process that holds a run's directory."""
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
        holder.kill()


HOLD = """
import sys, time
from pathlib import Path
from cosmos_rl_core.workers.directory import RunDirectory
directory = RunDirectory.open(Path(sys.argv[1]), resume=False, overwrite=False)
print("held", flush=True)
time.sleep(600)
"""


def test_a_run_that_is_leaving_gets_no_second_signal(tmp_path):
    directory = RunDirectory.open(tmp_path, resume=False, overwrite=False)
    lock = (tmp_path / "run.lock").stat().st_mtime
    (tmp_path / "status.json").touch()
    os.utime(tmp_path / "status.json", (lock + 1, lock + 1))
    assert end_process(tmp_path, now=False) == ["run: its processes are leaving"]
    directory.close()


def test_a_worker_does_not_wait_for_the_address_of_a_controller_that_died(tmp_path):
    contact = {"address": "tcp://127.0.0.1:1", "generation": 0, "pid": 1, "host": "here"}
    (tmp_path / "controller.json").write_text(json.dumps(contact))
    resolved = WorkerAddress(role="rollout", run=tmp_path, wait_s=3600.0).resolved()
    assert (resolved.controller, resolved.wait_s) == ("tcp://127.0.0.1:1", 0.0)


def test_the_lines_of_a_launched_run_name_its_launch(cluster, tmp_path):
    run = cluster(["policy.threads=2"], external=False)
    launch(FAKE, run, resume=False)
    script = Local().plan(Launched.of(tmp_path / "run")._run())
    line = f"cosmos-rl launch {tmp_path}/run.toml policy.threads=2 --on {FAKE}"
    assert f"export COSMOS_RL_LAUNCH='{line}'\n" in script


def test_a_dry_run_has_the_problems_of_the_recipe_and_notes_on_names(cluster, capsys):
    cluster([])
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["launch", "run.toml", "--on", FAKE, "--dry-run", 'reward.functions=[{name="hitz"}]'])
    out, err = capsys.readouterr()
    assert "job rollout-1\n" in out
    assert 'note: reward.functions.0.name = "hitz": ' in err and "; the machines of the run must have it\n" in err
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["launch", "run.toml", "--on", FAKE, "--dry-run", "rollout.parallel.tp=2"])
    assert "[rollout.parallel] tp = 2" in capsys.readouterr().err


@pytest.mark.parametrize(("image", "code"), [("", 2), ("/images/a.sqsh", 0)])
def test_a_launch_finds_a_missing_package_of_a_sink(cluster, monkeypatch, capsys, image, code):
    """With an image it is a note, as the image may have it."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    cluster([])
    sink, slurm = 'logging.sinks=["wandb"]', f'cluster.slurm.container_image="{image}"'
    with pytest.raises(SystemExit, match=f"^{code}$"):
        main(["launch", "run.toml", "--on", FAKE, sink, slurm])
    assert "logging.sinks.0" in capsys.readouterr().err


def test_here_the_checks_are_made_once(cluster, monkeypatch, capsys):
    cluster([])
    monkeypatch.setattr(Local, "start", lambda self, run: [self.plan(run)])
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["launch", "run.toml", "--on", "local"])
    assert " --checked\n" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["renamed", "broken", "deleted"])
def test_a_launched_run_has_the_recipe_of_its_launch(cluster, tmp_path, change):
    """The user prepares the next run in the same file, or cleans up."""
    run = cluster(["run.name=first"])
    launch(FAKE, run, resume=False)
    match change:
        case "renamed":
            run.file.write_text(RECIPE.replace("[run]", '[run]\nname = "second"').replace('"run"', '"other"'))
        case "broken":
            run.file.write_text("[run\n")
        case "deleted":
            run.file.unlink()
    launched = Launched.of(tmp_path / "run")
    assert set(launched.alive()) == {"run", "policy-0", "rollout-0", "rollout-1"}
    assert launched.scale({"rollout": 1}) == ["rollout-1: ended"]
    found = launched._run()
    assert (found.label, found.config.model_dump()) == (run.label, run.config.model_dump())
    assert len(launched.stop(now=False)) >= 3


def test_a_worker_says_once_that_it_waits_and_the_end_of_the_wait_is_no_crash(tmp_path, capfd, monkeypatch):
    worker = WorkerAddress(role="rollout", name="rollout-0", run=tmp_path, wait_s=0.1)
    with pytest.raises(UserError, match=r"controller\.json is missing"):
        worker.resolved()
    waits = "rollout-0: waiting for the controller, up to 0.1 s: "
    assert capfd.readouterr().out == f"{waits}{tmp_path}/controller.json is missing\n"

    monkeypatch.setenv("COSMOS_RL_TOKEN", "0" * 64)
    worker = replace(worker, run=None, controller="tcp://127.0.0.1:1")
    with pytest.raises(UserError, match=r"the controller did not answer within 0.1 s: cannot connect to tcp"):
        asyncio.run(connect_to(worker, leaving=asyncio.Event()))
    assert capfd.readouterr().out.count(f"{waits}cannot connect to tcp://127.0.0.1:1") == 1
    with pytest.raises(ConnectionClosed):
        asyncio.run(connect_to(replace(worker, wait_s=0.0), leaving=asyncio.Event()))
    assert capfd.readouterr().out == ""


def test_ctrl_c_during_the_start_leaves_no_job(cluster, monkeypatch):
    run = cluster(["rollout.replicas=1"])
    submit = FakePlatform._submit

    def interrupted(platform, run, name):
        if name == "rollout-0":
            raise KeyboardInterrupt
        return submit(platform, run, name)

    monkeypatch.setattr(FakePlatform, "_submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(FAKE, run, resume=False)
    assert FakePlatform().alive(run) == {}


def test_an_earlier_run_is_one_error_with_the_flag_of_launch(cluster, capsys):
    run = cluster([])
    run.directory.mkdir()
    (run.directory / "resolved.toml").touch()
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["launch", "run.toml", "--on", "local"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("contains an earlier run; continue it with --resume, or choose another [run] output_dir")


def test_sigterm_during_a_launch_leaves_no_job_either(cluster, monkeypatch):
    run, submit = cluster([]), FakePlatform._submit

    def interrupted(platform, run, name):
        if name == "rollout-1":
            os.kill(os.getpid(), signal.SIGTERM)
        return submit(platform, run, name)

    monkeypatch.setattr(FakePlatform, "_submit", interrupted)
    with pytest.raises(SystemExit, match=r"^143$"):
        main(["launch", "run.toml", "--on", FAKE])
    assert FakePlatform().alive(run) == {}


def test_an_earlier_launch_whose_platform_does_not_answer_has_the_remedy(cluster, monkeypatch):
    run = cluster([])
    Launched(platform=FAKE, file=str(run.file), overrides=(), folders=()).write(run)
    monkeypatch.setattr(FakePlatform, "alive", lambda self, run: refuse("no cluster answers at 10.0.0.1"))
    with pytest.raises(
        UserError, match=r"are alive: no cluster answers at 10\.0\.0\.1; .* remove .*/launch/cluster\.json"
    ):
        launch("local", run, resume=True)


def test_ctrl_c_during_the_start_here_ends_the_run_that_has_not_locked_its_directory(cluster, tmp_path, monkeypatch):
    (tmp_path / "cosmos-rl").write_text("#!/bin/bash\necho $$ > started; exec sleep 600\n")
    (tmp_path / "cosmos-rl").chmod(0o755)
    run = cluster([f'cluster.command="{tmp_path}/cosmos-rl"'])
    wait = ChildProcess.wait

    def interrupted(process, timeout_s=None):
        if (tmp_path / "started").exists() and timeout_s is not None:
            monkeypatch.setattr(ChildProcess, "wait", wait)
            raise KeyboardInterrupt
        return wait(process, timeout_s)

    monkeypatch.setattr(ChildProcess, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch("local", run, resume=False)
    assert not is_alive(int((tmp_path / "started").read_text()))


def test_here_a_run_may_take_turns_on_its_gpus(cluster, tmp_path, capsys):
    cluster([])
    turns = ["run.colocate=true", "sync.max_staleness=0"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["launch", "run.toml", "--on", "local", "--dry-run", *turns])
    assert "run.colocate=true sync.max_staleness=0" in capsys.readouterr().out
    run = cluster(turns, external=False)
    Launched(platform="local", file=str(run.file), overrides=run.overrides, folders=run.folders).write(run)
    assert Launched.of(tmp_path / "run").alive() == {}
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["launch", "run.toml", "--on", FAKE, "--dry-run", *turns])
