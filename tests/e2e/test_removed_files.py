"""Files of a live run that somebody removes: what is lost is told, and what can go on goes on."""

import os
import shutil
import signal

import pytest

pytestmark = pytest.mark.slow
STEPS = 12


@pytest.fixture
def slow_run(tmp_path, bandit, write_recipe, start, wait_for, rows_of):
    """A run of processes that has made two steps, its recipe and its directory."""
    run_dir = tmp_path / "run"
    tables = bandit(
        run_dir,
        run__max_steps=STEPS,
        rollout__options={"delay_s": 0.15},
        checkpoint={"every_steps": 1, "keep": 3},
        logging__sinks=["console", "jsonl"],
    )
    recipe = write_recipe(tmp_path / "run.toml", tables)
    process = start("run", recipe)
    wait_for(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 2, "two steps")
    return process, recipe, run_dir


@pytest.mark.parametrize("how", ["renamed", "rm -rf"])
def test_a_removed_directory_ends_the_run_with_its_weights_saved(how, slow_run, start):
    process, recipe, run_dir = slow_run
    if how == "renamed":
        run_dir.rename(run_dir.with_name("elsewhere"))
    else:
        while run_dir.exists() and process.poll() is None:  # a save in between makes rm fail: once more
            shutil.rmtree(run_dir, ignore_errors=True)
            if not (run_dir / "run.lock").exists():
                break
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 2, (told, errors)
    assert f"{run_dir} was removed or renamed during the run" in told
    assert "continue from there with --resume auto" in errors
    assert "Traceback" not in told + errors
    again = start("run", recipe, "--resume", "auto")
    told, errors = again.communicate(timeout=120)
    assert again.returncode == 0, (told, errors)


def test_a_removed_token_does_not_keep_a_worker_from_being_started_again(slow_run, pid_of):
    process, _, run_dir = slow_run
    (run_dir / "token").unlink()
    os.kill(pid_of(run_dir, "rollout-0"), signal.SIGKILL)
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, (told, errors)
    assert "rollout-0 died (signal SIGKILL); starting it again" in told


def test_a_removed_checkpoint_and_journal_are_told(slow_run, wait_for):
    process, _, run_dir = slow_run
    (run_dir / "journal").rename(run_dir / "elsewhere")
    saved = wait_for(lambda: list((run_dir / "checkpoints").glob("step_*")), "a checkpoint")  # saved after the metrics
    newest = max(saved, key=lambda path: int(path.name.removeprefix("step_")))
    newest.rename(run_dir / "kept by me")
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, (told, errors)
    assert f"{run_dir}/journal was removed during the run" in told
    assert f"somebody has removed {newest.name} from" in told
