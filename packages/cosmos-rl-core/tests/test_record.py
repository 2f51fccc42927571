"""run.json, outcome.json, events.jsonl and status.jsonl."""

import asyncio
import json
import threading

import pytest

from cosmos_rl_core.control.status import MemberStatus
from cosmos_rl_core.errors import TakenOver, UserError, WorkerFailed
from cosmos_rl_core.observe.record import (
    Events,
    RecordedOutcome,
    failure,
    read_outcome,
    read_start,
    record_outcome,
    record_start,
    resume_command,
)
from cosmos_rl_core.observe.reporting import (
    HISTORY_S,
    MOST_BYTES,
    MOST_LINES,
    Ending,
    Reporter,
    StatusLog,
    phase_changes,
    status_interval,
    worker_changes,
)
from cosmos_rl_core.observe.slices import SLICE, at_once, in_turns, slices
from cosmos_rl_core.observe.startup import Phases, describe, entering, phase


def start(run_dir, *, command=("/bin/cosmos-rl", "run", "a.toml"), monkeypatch, parent=""):
    monkeypatch.setattr("sys.argv", list(command))
    return record_start(run_dir, recipe="[run]\n", parent=parent, takes_over=False)


def test_each_start_is_kept_and_removes_the_earlier_outcome(tmp_path, monkeypatch):
    start(tmp_path, monkeypatch=monkeypatch)
    record_outcome(tmp_path, RecordedOutcome(state="interrupted"))
    start(tmp_path, monkeypatch=monkeypatch, parent="checkpoints/step_5")
    start(tmp_path, monkeypatch=monkeypatch, parent="checkpoints/step_9")
    found = read_start(tmp_path)
    assert [each.parent for each in (*found.earlier, found)] == ["", "checkpoints/step_5", "checkpoints/step_9"]
    assert found.versions["cosmos-rl-core"]
    assert read_outcome(tmp_path) is None
    texts = [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert texts == [
        "/bin/cosmos-rl run a.toml",
        "continues from checkpoints/step_5",
        "continues from checkpoints/step_9",
    ]


def test_a_run_of_an_earlier_version_and_a_damaged_file_have_no_record(tmp_path):
    assert read_start(tmp_path) is None
    (tmp_path / "outcome.json").write_text('{"state": "do')
    assert read_outcome(tmp_path) is None


@pytest.mark.parametrize(
    ("command", "checkpoint", "line"),
    [
        (("cosmos-rl", "run", "a.toml", "run.seed=1"), "c", "cosmos-rl run a.toml run.seed=1 --resume auto"),
        (("/x/cosmos-rl", "run", "a.toml", "--overwrite"), "c", "cosmos-rl run a.toml --resume auto"),
        (("cosmos-rl", "run", "--resume", "old/step_2", "a.toml"), "c", "cosmos-rl run a.toml --resume auto"),
        (("cosmos-rl", "run", "a b.toml"), "", "cosmos-rl run 'a b.toml' --overwrite"),
        (("train.py",), "c", "cosmos-rl run {run_dir}/resolved.toml --resume auto"),
    ],
    ids=["overrides", "overwrite", "resumed", "no-checkpoint", "python"],
)
def test_the_command_that_continues_a_run(tmp_path, monkeypatch, command, checkpoint, line):
    start(tmp_path, monkeypatch=monkeypatch, command=command)
    assert resume_command(tmp_path, checkpoint=checkpoint) == line.format(run_dir=tmp_path)


@pytest.mark.parametrize("checkpoint", ["c", ""])
def test_a_launched_run_is_continued_by_launch(tmp_path, monkeypatch, checkpoint):
    monkeypatch.setenv("COSMOS_RL_LAUNCH", "cosmos-rl launch 'a b.toml' --on slurm")
    start(tmp_path, monkeypatch=monkeypatch, command=("/x/cosmos-rl", "controller", "a b.toml", "--resume", "auto"))
    monkeypatch.delenv("COSMOS_RL_LAUNCH")  # `status` runs elsewhere
    assert resume_command(tmp_path, checkpoint=checkpoint) == "cosmos-rl launch 'a b.toml' --on slurm --resume"


def test_a_users_error_has_no_traceback_and_an_unexpected_one_has(tmp_path):
    assert failure(UserError("no such file"), tmp_path) == RecordedOutcome(
        state="failed", message="no such file", exit_code=2
    )
    try:
        raise KeyError("x")
    except KeyError as error:
        found = failure(error, tmp_path)
    assert (found.message, found.exit_code) == ("KeyError: 'x'", 1)
    assert 'raise KeyError("x")' in found.traceback


def test_the_traceback_of_a_worker_is_the_last_of_its_log(tmp_path):
    (tmp_path / "logs").mkdir()
    before = "Traceback (most recent call last)\n  old\n"
    last = "Traceback (most recent call last)\n  new\nRuntimeError: no\n"
    (tmp_path / "logs" / "policy-0.log").write_text(f"ready\n{before}more\n{last}")
    found = failure(WorkerFailed("policy-0: RuntimeError: no"), tmp_path, worker="policy-0")
    assert (found.worker, found.traceback) == ("policy-0", last)


def test_a_second_interrupt_is_an_interrupt(tmp_path):
    assert failure(KeyboardInterrupt("stopped at once"), tmp_path).state == "interrupted"


def test_a_run_whose_last_controller_was_killed_names_its_newest_whole_checkpoint(tmp_path, monkeypatch):
    start(tmp_path, monkeypatch=monkeypatch)
    for step in (9, 10, 11):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    for step in (9, 10):  # that of step 11 is not whole
        (tmp_path / "checkpoints" / f"step_{step}" / "manifest.json").write_text("{}")
    Ending(tmp_path).killed("the controller died (signal SIGKILL)")
    found = read_outcome(tmp_path)
    assert (found.state, found.message) == ("failed", "the controller died (signal SIGKILL)")
    assert (found.step, found.checkpoint) == (10, f"{tmp_path}/checkpoints/step_10")
    assert found.resume.endswith("--resume auto")


def test_events_after_a_torn_line_are_on_lines_of_their_own(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"time": 1')
    events = Events(tmp_path)
    events.step = 7
    events.add("note", "lost rollout-0")
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[1])["step"] == 7


def test_events_of_a_removed_directory_are_dropped(tmp_path):
    Events(tmp_path / "gone").add("note", "x")
    assert not (tmp_path / "gone").exists()


def status(*, phase="training", **states):
    members = [MemberStatus(name=name, role="rollout", state=state, age_s=0.0) for name, state in states.items()]
    return {"phase": phase, "generation": 0, "members": members}


def reported(phase):
    yield  # after a slice of the workers
    return status(phase=phase)


def test_a_status_is_logged_every_few_seconds_and_at_each_change(tmp_path):
    times = iter((0.0, 0.0, 1.0, 2.0, 2.0, 3.0, 2.0 + HISTORY_S, 2.0 + HISTORY_S))
    log = StatusLog(tmp_path / "status.jsonl", clock=lambda: next(times))
    for state in ("joining", "joining", "ready", "ready", "ready"):
        log.add(status(r0=state), {"r0": state})
    lines = (tmp_path / "status.jsonl").read_text().splitlines()
    assert [json.loads(line)["members"][0]["state"] for line in lines] == ["joining", "ready", "ready"]


def test_the_log_of_a_long_run_is_thinned(tmp_path):
    path, now = tmp_path / "status.jsonl", 0.0
    log = StatusLog(path, clock=lambda: now)
    sizes = set()
    for second in range(4 * MOST_LINES):
        now = float(second * HISTORY_S)
        log.add(status() | {"time": now}, {})
        sizes.add(log._log._lines)
    assert max(sizes) <= MOST_LINES
    times = [json.loads(line)["time"] for line in path.read_text().splitlines()]
    assert times[0] == 0.0 and times[-1] > 3.9 * MOST_LINES * HISTORY_S


def test_the_log_of_a_large_run_is_thinned_by_its_size(tmp_path):
    path, now = tmp_path / "status.jsonl", 0.0
    log, large = StatusLog(path, clock=lambda: now), "x" * (MOST_BYTES // 10)
    for line in range(25):
        now = HISTORY_S * line * line
        log.add(status() | {"step": line, "waits": [large]}, {})
        assert path.stat().st_size < 1.2 * MOST_BYTES
    StatusLog(path, clock=lambda: 1e6).add(status() | {"step": 99}, {})  # of the next controller
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps[0] == 0 and steps[-2] in (23, 24) and steps[-1] == 99


def test_workers_that_come_change_and_go():
    assert worker_changes({"p": "ready", "r": "ready"}, {"p": "ready", "r": "suspect", "s": "joining"}) == [
        "r: ready -> suspect",
        "s: new -> joining",
    ]
    assert worker_changes({"r": "suspect"}, {}) == ["r: suspect -> gone"]


def starting(phase="", **started):
    return MemberStatus(name="r0", role="rollout", state="joining", age_s=0.0, phase=phase, started=started)


def test_the_phases_of_a_start_are_events():
    assert phase_changes({}, [starting("importing")]) == ["r0: importing"]
    assert phase_changes({"r0": "importing"}, [starting("importing")]) == []
    then = {"importing": 3.0, "reading weights": 0.1}
    assert phase_changes({"r0": "importing"}, [starting("waiting for weights", **then)]) == [
        "r0: waiting for weights, after 3.1 s: importing 3.0 s"
    ]
    assert phase_changes({"r0": "waiting for weights"}, [starting(**then)]) == ["r0: started in 3.1 s: importing 3.0 s"]
    assert phase_changes({}, [starting()]) == []


def test_phases_add_up_and_one_that_returns_goes_on():
    phases = Phases()
    for name, now in (("importing", 10.0), ("reading weights", 13.0), ("importing", 14.0)):
        phases.enter(name, now=now)
    assert phases.so_far(14.5) == {"importing": 3.5, "reading weights": 1.0}
    phases.enter("", now=15.0)
    assert (phases.current, phases.so_far(99.0)) == ("", {"importing": 4.0, "reading weights": 1.0})
    assert describe(phases.seconds) == "5.0 s: importing 4.0 s, reading weights 1.0 s"


def test_a_phase_reaches_the_worker_that_its_thread_builds_and_no_other():
    seen = []
    phase("importing")
    with entering(seen.append):
        phase("reading weights")
        thread = threading.Thread(target=phase, args=("starting simulators",))
        thread.start()
        thread.join()
    phase("importing")
    assert seen == ["reading weights"]


def test_an_error_in_a_report_is_shown_once_and_ends_neither_the_reports_nor_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr("cosmos_rl_core.observe.reporting.STATUS_S", 0.01)
    states = iter((ValueError("no such phase"), ValueError("no such phase"), "training"))
    checks, notes, written = [], [], asyncio.Event()

    def phase():
        state = next(states)
        if isinstance(state, Exception):
            raise state
        written.set()
        return state

    async def run():
        reporter = Reporter(
            tmp_path,
            status=reported,
            phase=phase,
            events=Events(tmp_path),
            checks=(lambda: checks.append(None),),
            is_taken_over=lambda: False,
            note=notes.append,
            starting=lambda workers: None,
        )
        task = asyncio.create_task(reporter.run())
        await asyncio.wait_for(written.wait(), 60)
        await asyncio.sleep(0)  # for the slices
        task.cancel()

    asyncio.run(run())
    assert len(checks) == 3
    [note] = notes
    assert "the run continues" in note and note.endswith("ValueError: no such phase")
    assert json.loads((tmp_path / "status.json").read_text())["phase"] == "training"


def test_a_controller_that_was_replaced_reports_nothing(tmp_path):
    async def run():
        def replaced():
            raise TakenOver("another controller has taken over")

        reporter = Reporter(
            tmp_path,
            status=reported,
            phase=lambda: "training",
            events=Events(tmp_path),
            checks=(replaced,),
            is_taken_over=lambda: True,
            note=replaced,
            starting=lambda workers: None,
        )
        await asyncio.wait_for(reporter.run(), 60)
        reporter.report("failed")

    asyncio.run(run())
    with pytest.raises(TakenOver), Ending(tmp_path).recorded(0.0):
        raise TakenOver("another controller has taken over")
    assert list(tmp_path.iterdir()) == []


def test_the_status_of_thousands_of_workers_takes_a_hundredth_of_a_processor():
    assert [status_interval(cpu_s) for cpu_s in (0.0, 0.01, 0.03, 1.0)] == [1.0, 1.0, 3.0, 5.0]


def test_a_full_disk_leaves_no_part_of_a_status(tmp_path):
    reporter = Reporter(
        tmp_path,
        status=reported,
        phase=lambda: "training",
        events=Events(tmp_path),
        checks=(),
        is_taken_over=lambda: False,
        note=lambda text: None,
        starting=lambda workers: None,
    )
    (tmp_path / "status.json").mkdir()  # so that the new one cannot take its place
    reporter.report("training")
    assert not (tmp_path / "status.tmp").exists()


def test_messages_are_handled_between_the_slices_of_a_status():
    def work():
        for some in slices(range(2 * SLICE + 1)):
            handled.append(len(some))
            yield
        return "done"

    async def go():
        loop, spent = asyncio.get_running_loop(), []
        loop.call_soon(handled.append, "a message")
        found = await in_turns(work(), spent.append)
        return found, len(spent)

    handled = []
    assert asyncio.run(go()) == ("done", 4)
    assert handled == [SLICE, "a message", SLICE, 1]
    assert at_once(work()) == "done"
