"""The controller of `cosmos-rl run` is killed while its workers live: another one takes the run over.

The run ends with exit code 0, every sample is trained once, metrics have neither doubles nor holes, and with
max_staleness = 0 weights and optimizer state equal those of a run of as many policies that nobody disturbed, to the
bit.
"""

import contextlib
import json
import os
import random
import signal
import time

import pytest
from lives import num_lines, processes_of

from cosmos_rl_core.checkpoint.manifest import read_state
from cosmos_rl_core.cli.app import main
from cosmos_rl_core.control.ledger import records
from cosmos_rl_core.processes import is_alive
from cosmos_rl_core.workers.directory import lock_holder

pytestmark = pytest.mark.ci

STEPS, PROMPTS = 24, 4
CRASHING = """
from pathlib import Path
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.testing.tiny import Tiny

class Rows(list):
    def __getitem__(self, index):
        if index == 3 and not (crashed := Path(__file__).with_name("crashed")).exists():
            {before}
            raise {error}
        return super().__getitem__(index)

class Crashing(Tiny):
    def load_rows(self, data):
        rows, origin = super().load_rows(data)
        return Rows(rows), origin

DOMAIN = Crashing()
"""


@pytest.fixture
def begin(tmp_path, bandit, write_recipe, start):
    """Start the command in a directory; return its process, its directory and its tables."""

    def begin(*arguments, **changes):
        run_dir = tmp_path / "run"
        usual = {"run__max_steps": STEPS, "sync__max_staleness": 0, "rollout__options": {"delay_s": 0.02}}
        console = {"logging__sinks": ["console", "jsonl"], "checkpoint__every_steps": 3}
        tables = bandit(run_dir, **{**usual, **console, **changes})
        return start("run", write_recipe(tmp_path / "run.toml", tables), *arguments), run_dir, tables

    return begin


def contact(run_dir):
    """The content of controller.json; None without it."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((run_dir / "controller.json").read_text())
    return None


def kill_controller(run_dir):
    os.kill(contact(run_dir)["pid"], signal.SIGKILL)


@pytest.fixture
def left_no_trace(rows_of, journal_of, bits_of, write_recipe, start, finished, tmp_path):
    """Compare a run whose controller was killed with one that nobody disturbed."""

    def compare(run_dir, tables, *, generations):
        steps = tables["run"]["max_steps"]
        assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(steps))
        rollouts = [rows_of(run_dir / f"rollouts/step_{step:06d}.jsonl") for step in range(steps)]
        assert sorted({row["sample"] for rows in rollouts for row in rows}) == list(range(steps * PROMPTS))
        journal = journal_of(run_dir)
        assert [record.generation for record in journal if isinstance(record, records.Restarted)] == generations
        policies = tables["policy"].get("replicas", 1)
        assert {len(record.voters) for record in journal if isinstance(record, records.Commit)} == {policies}
        whole, placement = tmp_path / "whole", "inline" if policies == 1 else "local"
        run = {**tables["run"], "output_dir": str(whole), "placement": placement}
        finished(start("run", write_recipe(tmp_path / "whole.toml", {**tables, "run": run})), timeout_s=300)
        last = f"checkpoints/step_{steps}"
        assert bits_of(run_dir / last) == bits_of(whole / last)

    return compare


@pytest.mark.timeout(600)
def test_a_controller_that_is_killed_in_a_step_is_started_again(begin, wait_for, finished, left_no_trace):
    process, run_dir, tables = begin()
    wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= 5, "step 5")
    workers = processes_of(run_dir)
    kill_controller(run_dir)
    wait_for(lambda: (found := contact(run_dir)) and found["generation"] == 1, "the next controller")
    assert processes_of(run_dir) == workers, "a worker did not live through it"
    out, errors = finished(process)
    assert errors.splitlines() == ["the controller died (signal SIGKILL); starting it again"]
    assert "died" not in out, "a worker was started again"
    left_no_trace(run_dir, tables, generations=[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["before the workers have connected", "while a checkpoint is saved"])
def test_a_controller_that_is_killed(moment, begin, wait_for, finished, left_no_trace):
    process, run_dir, tables = begin()
    if moment.startswith("before"):
        wait_for(lambda: len(processes_of(run_dir)) == 2, "the workers' processes")
    else:
        saved = run_dir / "checkpoints"
        deadline = time.monotonic() + 120.0
        while not list(saved.glob(".*.partial")):
            assert time.monotonic() < deadline, "no checkpoint was seen while it was written"
    kill_controller(run_dir)
    finished(process)
    left_no_trace(run_dir, tables, generations=[1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kills", "policies"), [(20, 1), (10, 2)])
def test_random_kills_leave_no_trace(kills, policies, begin, wait_for, finished, left_no_trace):
    chance, steps = random.Random(kills), 3 * kills + 8
    process, run_dir, tables = begin(run__max_steps=steps, policy__replicas=policies, elastic__restart_controller=kills)
    for kill in range(kills):
        wanted = 1 + 3 * kill
        wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= wanted, f"step {wanted}")  # noqa: B023
        wait_for(lambda: (found := contact(run_dir)) and found["generation"] == kill, "a controller")  # noqa: B023
        time.sleep(chance.uniform(0.0, 0.2))  # the moment is the point of the test
        kill_controller(run_dir)
    finished(process, timeout_s=300)
    left_no_trace(run_dir, tables, generations=list(range(1, kills + 1)))
    print(f"kills of the controller: {kills}, with {policies} policies; samples trained twice or lost: 0")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_that_dies_together_with_the_controller_is_started_again(begin, wait_for, finished, left_no_trace):
    process, run_dir, tables = begin()
    wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= 5, "step 5")
    [rollout] = processes_of(run_dir, name="rollout-0")
    kill_controller(run_dir)
    os.kill(rollout, signal.SIGKILL)
    out, _ = finished(process)
    assert "rollout-0 died (signal SIGKILL); starting it again" in out
    left_no_trace(run_dir, tables, generations=[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_was_interrupted_ends_though_its_controller_is_killed(begin, wait_for):
    process, run_dir, _ = begin(run__max_steps=4000)
    wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= 5, "step 5")
    os.kill(contact(run_dir)["pid"], signal.SIGSTOP)  # it will not get to what the signal asks for
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # the command passes it on
    kill_controller(run_dir)
    process.communicate(timeout=120)
    assert process.returncode == 130
    steps = num_lines(run_dir / "metrics.jsonl")
    assert read_state(run_dir / f"checkpoints/step_{steps}").step == steps


@pytest.mark.timeout(600)
def test_a_killed_command_takes_its_controller_and_its_workers_with_it(begin, wait_for, finished, start, tmp_path):
    process, run_dir, _ = begin(run__max_steps=4000)
    wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= 5, "step 5")
    controller = contact(run_dir)["pid"]
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not is_alive(controller) and not processes_of(run_dir), "the end of all processes")
    step = num_lines(run_dir / "metrics.jsonl") + 3
    finished(start("run", tmp_path / "run.toml", f"run.max_steps={step}", "--resume", "auto"))
    assert read_state(run_dir / f"checkpoints/step_{step}").step == step


@pytest.mark.timeout(600)
def test_a_run_whose_controller_hangs_is_stopped_with_all_its_processes(begin, wait_for, monkeypatch, capsys):
    """A process that is stopped neither sees the end of its parent nor gets a SIGTERM."""
    process, run_dir, _ = begin(run__max_steps=4000)
    wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= 2, "step 2")
    [rollout], controller = processes_of(run_dir, name="rollout-0"), contact(run_dir)["pid"]
    for pid in (controller, rollout):
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr("cosmos_rl_core.ops.clusters.operator.CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["stop", str(run_dir), "--now"])
    assert capsys.readouterr().out.endswith("gets SIGKILL, and all that it has started\nthe run has ended\n")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL and "starting it again" not in errors
    wait_for(lambda: not is_alive(controller) and not processes_of(run_dir), "the end of all processes")
    assert lock_holder(run_dir) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("before", "error", "code", "said"),
    [
        ("crashed.touch()", 'RuntimeError("a bug")', 0, "the controller crashed; starting it again"),
        ("pass", 'RuntimeError("a bug")', 1, "RuntimeError: a bug"),
        ("pass", 'UserError("mend this")', 2, "error: mend this"),
    ],
)
def test_a_controller_that_crashes(before, error, code, said, begin, finished, tmp_path, monkeypatch, left_no_trace):
    (tmp_path / "crashing.py").write_text(CRASHING.format(before=before, error=error))
    process, run_dir, tables = begin(run__domain="crashing:DOMAIN", elastic__restart_controller=2)
    _, errors = finished(process, code)
    assert said in errors
    restarts = {0: 1, 1: 2, 2: 0}[code]
    assert errors.count("starting it again") == restarts
    if code == 0:
        monkeypatch.syspath_prepend(tmp_path)
        left_no_trace(run_dir, tables, generations=[1])
    assert not processes_of(run_dir)
