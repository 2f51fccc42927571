"""Timelines."""

import json
import threading

import pytest

from cosmos_rl_core.observe.trace import Timeline, merge


class Clock:
    """Time that passes when told."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def spans(path):
    """(process, track, name, start s, duration s) of each span in a written file, in order of start."""
    events = json.loads(path.read_text())["traceEvents"]
    labels = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    return sorted(
        (
            labels["process_name", e["pid"], 0],
            labels["thread_name", e["pid"], e["tid"]],
            e["name"],
            e["ts"] / 1e6,
            e["dur"] / 1e6,
        )
        for e in events
        if e["ph"] == "X"
    )


def test_a_written_span_says_what_when_how_long_and_why(tmp_path):
    clock = Clock(2.0)
    timeline = Timeline("policy-0", clock=clock, wall=clock)
    with timeline.span("optim_step", step=3):
        clock.now = 2.5
    timeline.write(tmp_path / "t.json")
    assert spans(tmp_path / "t.json") == [("policy-0", "MainThread", "optim_step", 2.0, 0.5)]
    (event,) = (e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X")
    assert event["args"] == {"step": 3}


def test_a_span_that_fails_is_recorded_with_its_error(tmp_path):
    timeline = Timeline("policy-0", clock=Clock(), wall=Clock())
    with pytest.raises(KeyError), timeline.span("forward_backward"):
        raise KeyError("x")
    timeline.write(tmp_path / "t.json")
    (event,) = (e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X")
    assert event["args"] == {"error": "KeyError"}


def test_threads_record_at_once_and_each_has_its_row(tmp_path):
    timeline = Timeline("policy-0")

    def work():
        for _ in range(500):
            with timeline.span("work"):
                pass

    threads = [threading.Thread(target=work, name=f"worker-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.write(tmp_path / "t.json")
    tracks = [track for _, track, *_ in spans(tmp_path / "t.json")]
    assert {track: tracks.count(track) for track in tracks} == {f"worker-{i}": 500 for i in range(4)}


def test_the_newest_events_are_kept(tmp_path):
    clock = Clock()
    timeline = Timeline("p", clock=clock, wall=clock, max_events=2)
    for second in range(5):
        clock.now = float(second)
        with timeline.span("work"):
            pass
    timeline.write(tmp_path / "t.json")
    assert [start for *_, start, _ in spans(tmp_path / "t.json")] == [3.0, 4.0]


def test_writing_leaves_one_file_and_replaces_the_old_one(tmp_path):
    timeline = Timeline("p", clock=Clock(), wall=Clock())
    timeline.write(tmp_path / "t.json")
    with timeline.span("work"):
        pass
    timeline.write(tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert len(spans(tmp_path / "t.json")) == 1


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
    policy.write(tmp_path / "a.json")
    rollout.write(tmp_path / "b.json")
    merge([tmp_path / "a.json", tmp_path / "killed.json", tmp_path / "b.json"], tmp_path / "timeline.json")
    assert spans(tmp_path / "timeline.json") == [
        ("policy-0", "MainThread", "optim_step", 0.0, 2.0),
        ("rollout-0", "MainThread", "generate", 1.0, 3.0),
    ]


def test_merging_a_file_that_is_no_timeline_names_it(tmp_path):
    (tmp_path / "bad.json").write_text('{"traceEvents": [')
    with pytest.raises(ValueError, match=r"bad\.json is not a timeline"):
        merge([tmp_path / "bad.json"], tmp_path / "timeline.json")


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
