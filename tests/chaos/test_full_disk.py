"""Row 21 of the failure matrix: a disk is full while the journal or a checkpoint is written. A small disk of its own
holds the one or the other; mounting it takes the rights of an administrator."""

import contextlib
import signal
import subprocess

import pytest
from lives import must_have_trained_once, num_lines

from cosmos_rl_core.checkpoint.manifest import list_steps, read_state

pytestmark = [pytest.mark.ci, pytest.mark.timeout(400)]

PROMPTS = 4
CHANGES = {"run__max_steps": 100_000, "sync__max_staleness": 0, "rollout__options": {"delay_s": 0.02}}


class Disk:
    def __init__(self, folder):
        self.folder = folder

    def fill(self):
        with (self.folder / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free(self):
        (self.folder / "filler").unlink()


@pytest.fixture
def disk_at():
    """Mount a disk of so many bytes at a new folder."""
    mounted = []

    def mount(folder, *, num_bytes):
        folder.mkdir(parents=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return Disk(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def begun(tmp_path, bandit, write_recipe, start):
    def begin(*arguments, **changes):
        tables = bandit(tmp_path / "run", logging__sinks=["console", "jsonl"], **{**CHANGES, **changes})
        return start("run", write_recipe(tmp_path / "run.toml", tables), *arguments)

    return begin


def test_a_run_whose_journal_has_no_room_ends_with_the_folder_and_goes_on_when_there_is_some(
    tmp_path, disk_at, begun, wait_for, finished, rows_of
):
    run_dir = tmp_path / "run"
    disk = disk_at(run_dir / "journal", num_bytes=2**20)
    process = begun(checkpoint__every_steps=4)
    wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= 6, "six steps")
    disk.fill()
    _, errors = finished(process, 2)
    assert f"no space left for the journal in {disk.folder}; acknowledged records are safe" in errors
    assert "Traceback" not in errors and "starting it again" not in errors
    disk.free()
    steps = max(list_steps(run_dir / "checkpoints")) + 5
    finished(begun("--resume", "auto", f"run.max_steps={steps}"))
    assert must_have_trained_once(run_dir, prompts=PROMPTS) == steps


def test_a_checkpoint_without_room_is_given_up_and_a_later_one_saved(
    tmp_path, disk_at, begun, wait_for, finished, rows_of
):
    run_dir = tmp_path / "run"
    disk = disk_at(run_dir / "checkpoints", num_bytes=2**20)
    process = begun(checkpoint__every_steps=2, checkpoint__max_failures=0)
    wait_for(lambda: list_steps(disk.folder), "a checkpoint")

    def failures():
        return sum("could not be saved" in row["text"] for row in rows_of(run_dir / "events.jsonl"))

    disk.fill()
    wait_for(lambda: failures() >= 2, "the failures of two checkpoints")
    before = list_steps(disk.folder)
    assert before and read_state(disk.folder / f"step_{before[-1]}").step == before[-1]
    disk.free()
    wait_for(lambda: list_steps(disk.folder)[-1] > before[-1], "another checkpoint")
    process.send_signal(signal.SIGINT)
    finished(process, 130)
    must_have_trained_once(run_dir, prompts=PROMPTS)


def test_a_run_whose_last_checkpoint_has_no_room_says_so_and_goes_on_from_the_one_before(
    tmp_path, disk_at, begun, wait_for, finished, rows_of
):
    run_dir = tmp_path / "run"
    disk = disk_at(run_dir / "checkpoints", num_bytes=2**20)
    process = begun(checkpoint__every_steps=4, checkpoint__max_failures=0)
    wait_for(lambda: list_steps(disk.folder), "a checkpoint")
    disk.fill()
    wait_for(lambda: num_lines(run_dir / "metrics.jsonl") > list_steps(disk.folder)[-1], "a step that is not saved")
    process.send_signal(signal.SIGINT)
    _, errors = finished(process, 2)
    assert "o space left" in errors and str(disk.folder) in errors and "Traceback" not in errors
    disk.free()
    steps = max(list_steps(disk.folder)) + 5
    finished(begun("--resume", "auto", f"run.max_steps={steps}"))
    assert must_have_trained_once(run_dir, prompts=PROMPTS) == steps
