"""The run's directory: one live run at a time, and nothing of the user's is lost."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import ProcessName
from cosmos_rl_core.workers.directory import CONTENTS, Removals, RunDirectory, explain_no_room

WRITTEN = ("resolved.toml", "metrics.jsonl", "eval.jsonl", "timeline.json", "status.json", "token")
"""Files a run leaves beside its folders."""


def open_directory(path, *, resume=False, overwrite=False):
    return RunDirectory.open(path, resume=resume, overwrite=overwrite)


@pytest.fixture
def earlier(tmp_path):
    """The directory of a finished run."""
    open_directory(tmp_path).close()
    for name in WRITTEN:
        (tmp_path / name).write_text("earlier")
    for name in (*CONTENTS, "tensorboard"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "earlier").write_text("earlier")
    return tmp_path


def test_a_new_directory_has_the_folders_of_a_run(tmp_path):
    path = tmp_path / "runs" / "demo"
    directory = open_directory(path)
    assert all((path / name).is_dir() for name in CONTENTS)
    assert ProcessName.parse((path / "run.lock").read_text()) == ProcessName.of_this_process()
    directory.close()


HOLD = """
import sys
from pathlib import Path
from cosmos_rl_core.workers.directory import RunDirectory

directory = RunDirectory.open(Path(sys.argv[1]), resume=False, overwrite=False)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_a_live_process_holds_is_refused_with_its_pid(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for keys in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(UserError, match=rf"in use by a live run \(process {holder.pid}\)"):
                open_directory(tmp_path, **keys)
        holder.kill()
    open_directory(tmp_path).close()  # a killed run holds nothing


def test_the_worker_of_a_killed_run_is_waited_for(tmp_path):
    directory = open_directory(tmp_path)
    worker = subprocess.Popen(["sleep", "0.5"], pass_fds=[directory.lock])
    (tmp_path / "run.lock").write_text(f"{dead_pid()}\n")
    directory.close()  # as the kernel does for a killed controller
    assert worker.poll() is None
    open_directory(tmp_path).close()
    assert worker.wait(timeout=0) == 0


def dead_pid():
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_a_run_holds_it_until_it_is_closed(tmp_path):
    first = open_directory(tmp_path)
    with pytest.raises(UserError, match=rf"process {os.getpid()}\)"):
        open_directory(tmp_path)
    first.close()
    open_directory(tmp_path).close()


def test_an_earlier_run_is_neither_gone_on_with_nor_written_over_unasked(earlier):
    with pytest.raises(
        UserError, match=r"contains an earlier run. Continue .* --resume auto, .* --overwrite"
    ) as refused:
        open_directory(earlier)
    assert all((earlier / name).read_text() == "earlier" for name in WRITTEN)
    assert all((earlier / name / "earlier").exists() for name in CONTENTS)
    open_directory(earlier, overwrite=True).close()  # the refusal, alive in `refused`, holds no lock
    assert refused.value.args


def test_overwriting_clears_what_a_run_writes_and_nothing_else(earlier):
    (earlier / "notes.txt").write_text("mine")
    (earlier / "data").mkdir()
    (earlier / "data" / "train.jsonl").write_text("mine")
    open_directory(earlier, overwrite=True).close()
    left = {path.relative_to(earlier).as_posix() for path in earlier.rglob("*") if path.is_file()}
    assert left == {"run.lock", "notes.txt", "data/train.jsonl"}
    assert all((earlier / name).is_dir() for name in CONTENTS)


def test_resuming_keeps_all_but_the_journal_and_token_of_the_earlier_life(earlier):
    open_directory(earlier, resume=True).close()
    assert {name for name in WRITTEN if (earlier / name).exists()} == {*WRITTEN} - {"token"}
    assert {name for name in CONTENTS if (earlier / name / "earlier").exists()} == {*CONTENTS} - {"journal"}


def test_a_folder_with_files_of_the_users_alone_is_no_earlier_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    open_directory(tmp_path).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_path_that_cannot_be_a_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot use .*file/run as \[run\] output_dir: Not a directory"):
        open_directory(tmp_path / "file" / "run")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_explained_with_the_file_and_the_remedy(number):
    told = explain_no_room(OSError(number, "told by the system", "metrics.jsonl"), "runs/demo")
    assert "for metrics.jsonl; what was written so far is kept" in str(told)
    assert "--resume auto" in str(told)
    assert "for runs/demo;" in str(explain_no_room(OSError(number, "told by the system"), "runs/demo"))


def test_any_other_error_is_not_explained_away():
    assert explain_no_room(PermissionError(errno.EACCES, "Permission denied"), "runs/demo") is None


def test_a_new_directory_is_its_owners_alone_and_one_that_is_there_keeps_its_mode(tmp_path):
    open_directory(tmp_path / "runs" / "new").close()
    assert (tmp_path / "runs" / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "runs").stat().st_mode & 0o777 != 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    open_directory(tmp_path / "shared").close()
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o775


@pytest.mark.parametrize("name", ["rollouts", "logs"])
def test_a_file_in_the_place_of_a_folder_is_a_users_error(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=rf"cannot use .* as \[run\] output_dir: .*{name}: File exists"):
        open_directory(tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    (tmp_path / name).unlink()
    open_directory(tmp_path).close()  # the refusal holds no lock


def test_resuming_tells_of_damaged_logs(earlier):
    for name in ("metrics.jsonl", "eval.jsonl"):
        (earlier / name).write_text('{"step": 0}\nbroken\n')
    (earlier / "monitor.jsonl").mkdir()
    directory = open_directory(earlier, resume=True)
    directory.close()
    assert [note.partition(" was damaged")[0].rpartition("/")[2] for note in directory.notes] == [
        "metrics.jsonl",
        "eval.jsonl",
        "monitor.jsonl",
    ]
    assert (earlier / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_each_removal_is_told_once(tmp_path):
    directory = open_directory(tmp_path)
    (tmp_path / "journal" / "0.log").write_text("records")
    (tmp_path / "metrics.jsonl").write_text("")
    removals = Removals(tmp_path, lock=directory.lock)
    assert removals.check() == []
    (tmp_path / "journal" / "0.log").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    assert [text.partition(" was removed")[0] for text in removals.check()] == [
        str(tmp_path / "journal"),
        str(tmp_path / "metrics.jsonl"),
    ]
    assert (removals.check(), removals.lost) == ([], False)
    directory.close()


@pytest.mark.parametrize("made_again", [False, True])
def test_a_lost_directory_is_told_once_even_where_another_is_in_its_place(tmp_path, made_again):
    directory = open_directory(tmp_path / "run")
    removals = Removals(tmp_path / "run", lock=directory.lock)
    shutil.rmtree(tmp_path / "run")
    if made_again:
        open_directory(tmp_path / "run").close()
    assert "was removed or renamed during the run" in removals.check()[0]
    assert (removals.check(), removals.lost) == ([], True)
    assert "continue from there with --resume auto" in removals.explain(step=3, checkpoint="step_3")
    assert "no weights are left" in removals.explain(step=3, checkpoint="")
    directory.close()
