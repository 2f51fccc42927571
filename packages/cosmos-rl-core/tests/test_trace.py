"""Timelines: spans in files while they happen, and one trace of all processes."""

import json
import threading

import pytest

from cosmos_rl_core.observe.trace import FILE_BYTES, FLUSH_S, Timeline, merge, read_spans, row


class Clock:
    """A settable time."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(path):
    """(process, track, name, start s, duration s) of each span of a merged file, in order of start."""
    rows = json.loads(path.read_text())["traceEvents"]
    labels = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in rows if e["ph"] == "M"}
    return sorted(
        (
            labels["process_name", e["pid"], 0],
            labels["thread_name", e["pid"], e["tid"]],
            e["name"],
            e["ts"] / 1e6,
            e["dur"] / 1e6,
        )
        for e in rows
        if e["ph"] == "X"
    )


def test_a_finished_span_is_a_line_with_its_time_and_values(tmp_path):
    clock = Clock(2.0)
    timeline = Timeline("policy-0", clock=clock, wall=clock)
    with timeline.span("optim_step", step=3) as span:
        clock.now = 2.5
        span.add(skipped=1)
    timeline.stream(tmp_path / "p.jsonl")
    timeline.close()
    assert lines(tmp_path / "p.jsonl") == [
        {"name": "optim_step", "at": 2.0, "dur": 0.5, "track": "MainThread", "args": {"step": 3, "skipped": 1}}
    ]


def test_processes_that_were_interrupted_between_two_readings_of_their_clocks_agree(tmp_path):
    """The clocks of a process that waits for a processor are read some milliseconds apart."""
    clock = Clock(2.0)
    pauses = iter([0.5, 0.0, 0.25])

    def wall():
        clock.now += next(pauses, 0.125)
        return clock.now + 1000.0

    timeline = Timeline("policy-0", clock=clock, wall=wall)
    clock.now = 4.0
    with timeline.span("optim_step"):
        pass
    timeline.stream(tmp_path / "p.jsonl")
    timeline.close()
    assert lines(tmp_path / "p.jsonl")[0]["at"] == 1004.0


def test_a_span_that_fails_is_recorded_with_its_error(tmp_path):
    timeline = Timeline("policy-0", clock=Clock(), wall=Clock())
    timeline.stream(tmp_path / "p.jsonl")
    with pytest.raises(KeyError), timeline.span("forward_backward"):
        raise KeyError("x")
    timeline.close()
    assert lines(tmp_path / "p.jsonl")[0]["args"] == {"error": "KeyError"}


def test_a_span_is_in_the_file_while_it_runs_and_once_when_it_has_ended(tmp_path):
    """The file of a process that hangs has the span in which it hangs."""
    timeline = Timeline("policy-0")
    written = threading.Event()

    def wait_for_line():
        while not (tmp_path / "p.jsonl").exists():
            threading.Event().wait(FLUSH_S / 20)
        written.set()

    waiting = threading.Thread(target=wait_for_line, daemon=True)
    timeline.stream(tmp_path / "p.jsonl")
    with timeline.span("wait for batch"):
        waiting.start()
        assert written.wait(60)
        (open_one,) = read_spans((tmp_path / "p.jsonl").read_bytes().splitlines())
        assert (open_one.name, open_one.open) == ("wait for batch", True)
    timeline.close()
    (ended,) = read_spans((tmp_path / "p.jsonl").read_bytes().splitlines())
    assert not ended.open
    assert ended.dur > 0


def test_threads_record_at_once_and_each_has_its_row(tmp_path):
    timeline = Timeline("policy-0")
    timeline.stream(tmp_path / "p.jsonl")

    def work():
        for _ in range(500):
            with timeline.span("work"):
                pass

    threads = [threading.Thread(target=work, name=f"worker-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    tracks = [line["track"] for line in lines(tmp_path / "p.jsonl")]
    assert {track: tracks.count(track) for track in tracks} == {f"worker-{i}": 500 for i in range(4)}


def test_the_spans_of_a_task_are_in_its_row(tmp_path):
    timeline = Timeline("rollout-0")
    token = row.set("group 003")
    with timeline.span("rollout"), timeline.span("generate"), timeline.span("pull", track="weights"):
        pass
    row.reset(token)
    timeline.stream(tmp_path / "r.jsonl")
    timeline.close()
    assert [line["track"] for line in lines(tmp_path / "r.jsonl")] == ["weights", "group 003", "group 003"]


def test_a_file_that_is_full_makes_room_for_a_new_one(tmp_path):
    (tmp_path / "p.jsonl").write_text("x" * (FILE_BYTES + 1) + "\n")
    timeline = Timeline("p")
    with timeline.span("new"):
        pass
    timeline.stream(tmp_path / "p.jsonl")
    timeline.close()
    assert (tmp_path / "p.earlier.jsonl").stat().st_size == FILE_BYTES + 2
    assert [line["name"] for line in lines(tmp_path / "p.jsonl")] == ["new"]


def test_a_file_torn_by_a_kill_is_continued_and_read(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"name":"first","at":1.0,"dur":1.0}\n{"name":"torn","at":2')
    timeline = Timeline("p")
    with timeline.span("second"):
        pass
    timeline.stream(path)
    timeline.close()
    assert [span.name for span in read_spans(path.read_bytes().splitlines())] == ["first", "second"]


def test_merged_processes_stand_on_one_clock_that_starts_at_zero(tmp_path):
    # policy's clock reads 10 s and rollout's 500 s at the same time of day
    policy_clock, rollout_clock = Clock(10.0), Clock(500.0)
    policy = Timeline("policy-0", clock=policy_clock, wall=Clock(1000.0))
    rollout = Timeline("rollout-0", clock=rollout_clock, wall=Clock(1000.0))
    with policy.span("optim_step"):
        policy_clock.now = 12.0
    rollout_clock.now = 501.0
    with rollout.span("generate"):
        rollout_clock.now = 504.0
    for timeline in (policy, rollout):
        timeline.stream(tmp_path / f"{timeline.process}.jsonl")
        timeline.close()
    paths = [tmp_path / f"{name}.jsonl" for name in ("policy-0", "killed", "rollout-0")]
    merge(paths, tmp_path / "timeline.json")
    assert events(tmp_path / "timeline.json") == [
        ("policy-0", "MainThread", "optim_step", 0.0, 2.0),
        ("rollout-0", "MainThread", "generate", 1.0, 3.0),
    ]


def test_a_process_that_was_killed_is_merged_with_its_open_span(tmp_path):
    (tmp_path / "policy-0.jsonl").write_text('{"name":"forward_backward","at":5.0,"open":true}\n')
    merge([tmp_path / "policy-0.jsonl"], tmp_path / "timeline.json")
    (event,) = (e for e in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if e["ph"] == "X")
    assert event["args"] == {"open": True}


def recorded(intervals):
    """A timeline with the spans (name, start, end)."""
    clock = Clock()
    timeline = Timeline("p", clock=clock, wall=clock)
    for name, start, end in intervals:
        clock.now = start
        with timeline.span(name):
            clock.now = end
    return timeline


def test_a_span_that_is_still_running_counts():
    clock = Clock()
    timeline = Timeline("p", clock=clock, wall=clock)
    clock.now = 6.0
    with timeline.span("a"):
        clock.now = 10.0
        assert timeline.total("a") == pytest.approx(4.0)


def test_totals_add_up_by_name():
    timeline = recorded([("a", 0.0, 4.0), ("b", 4.0, 5.0), ("a", 5.0, 6.0)])
    assert timeline.total("a") == pytest.approx(5.0)
    assert timeline.total("a", "b", "c") == pytest.approx(6.0)
