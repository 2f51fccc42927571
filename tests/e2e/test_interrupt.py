"""Ctrl-C: the first ends the run cleanly, so that it can be resumed; the second ends it at once."""

import os
import shutil
import signal

import pytest

from cosmos_rl_core.checkpoint.manifest import read_state

pytestmark = pytest.mark.ci

STEPS, PROMPTS = 16, 4
STUCK = """
import time
from cosmos_rl_core.testing.tiny import Tiny

class Stuck(Tiny):
    def collate(self, *arguments, **keywords):
        print("stuck in the first step")
        time.sleep(600)

DOMAIN = Stuck()
"""


def press_ctrl_c(process):
    """A terminal sends the signal to every process of its group."""
    os.killpg(process.pid, signal.SIGINT)


def test_a_run_goes_on_where_ctrl_c_ended_it(tmp_path, bandit, write_recipe, start, wait_for, rows_of):
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=STEPS,
        policy__prompts_per_step=PROMPTS,
        rollout__options={"delay_s": 0.05},
        checkpoint__every_steps=2,
    )
    recipe = write_recipe(tmp_path / "run.toml", tables)
    first = start("run", recipe, start_new_session=True)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 3, "three steps")
    press_ctrl_c(first)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 130, errors
    assert errors == ""
    done = len(rows_of(run_dir / "metrics.jsonl"))
    assert 3 <= done < STEPS
    assert read_state(run_dir / "checkpoints" / f"step_{done}").step == done

    second = start("run", recipe, "--resume", "auto")
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert [line["step"] for line in rows_of(run_dir / "metrics.jsonl")] == list(range(STEPS))
    trained = [
        {rollout["sample"] for rollout in rows_of(run_dir / "rollouts" / f"step_{step:06d}.jsonl")}
        for step in range(STEPS)
    ]
    assert [len(samples) for samples in trained] == [PROMPTS] * STEPS
    assert len(set().union(*trained)) == STEPS * PROMPTS, "a sample was trained twice"
    assert read_state(run_dir / "checkpoints" / f"step_{STEPS}").step == STEPS


def test_a_run_that_was_killed_takes_the_steps_after_its_checkpoint_again(tmp_path, bandit, rows_of):
    from cosmos_rl_core import run

    tables = bandit(tmp_path / "run", run__placement="inline", run__max_steps=6, checkpoint__every_steps=4)
    run(tables)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_6")  # as if the run had died in its sixth step
    resumed = run(tables, ["run.max_steps=8"], resume="auto")
    assert [line["step"] for line in resumed.metrics] == [4, 5, 6, 7]
    assert [line["step"] for line in rows_of(tmp_path / "run" / "metrics.jsonl")] == list(range(8))


def test_ctrl_c_while_the_workers_start_ends_the_run_cleanly(tmp_path, bandit, write_recipe, start, wait_for, pid_of):
    run_dir = tmp_path / "run"
    process = start("run", write_recipe(tmp_path / "run.toml", bandit(run_dir)), start_new_session=True)
    wait_for(lambda: pid_of(run_dir, "rollout-0"), "the last worker to be started")
    press_ctrl_c(process)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors == ""
    assert read_state(run_dir / "checkpoints" / "step_0").next_sample == 0


def test_the_second_ctrl_c_stops_at_once(tmp_path, bandit, write_recipe, start, wait_for, pid_of):
    run_dir = tmp_path / "run"
    (tmp_path / "stuck.py").write_text(STUCK)
    tables = bandit(run_dir, run__domain="stuck:DOMAIN", logging__sinks=["console", "jsonl"])
    process = start("run", write_recipe(tmp_path / "run.toml", tables), start_new_session=True)
    log = run_dir / "logs" / "policy-0.log"
    wait_for(lambda: log.exists() and "stuck in the first step" in log.read_text(), "the policy to be stuck")
    press_ctrl_c(process)
    for line in process.stdout:
        if "again to stop at once" in line:
            break
    assert process.poll() is None
    press_ctrl_c(process)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert pid_of(run_dir, "policy-0") is None


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """For the runs in this process."""
