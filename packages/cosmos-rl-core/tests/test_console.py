"""What a person sees."""

import io
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from cosmos_rl_core.observe.console import Console, duration, sparkline


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


def watched(stream=None, *, max_steps=100):
    stream = io.StringIO() if stream is None else stream
    clock = Clock()
    return Console("demo", max_steps, Path("outputs/demo"), stream, clock=clock), stream, clock


METRICS = {
    "reward_mean": 0.4821,
    "loss": 0.01234,
    "staleness_mean": 0.61,
    "staleness_max": 2.0,
    "terms_per_s": 3412.4,
    "sync_s": 0.214,
    "members": 3.0,
    "grad_norm": 1.0,
}


def test_the_whole_log_of_a_short_run_reads_well():
    console, stream, clock = watched(max_steps=12)
    console.phase("loading the model")
    console.phase("training")
    for step in range(12):
        clock.now += 20.0
        console.step(step, METRICS)
        if step == 1:
            break
    console.note("sample 17 dropped: the prompt has 900 tokens")
    console.summary({"reward": "0.100 -> 0.870", "dropped: prompt too long": 1, "files": "outputs/demo"})
    console.close()
    metrics = "reward 0.482  loss 0.0123  staleness 0.61 (max 2)  terms/s 3,412  sync 0.21 s  members 3"
    assert stream.getvalue().splitlines() == [
        "demo: files in outputs/demo",
        "demo: loading the model",
        "demo: training",
        f"step  1/12  {metrics}",
        f"step  2/12  {metrics}  left 3 min 20 s",
        "sample 17 dropped: the prompt has 900 tokens",
        "",
        "demo: done",
        "  reward                    0.100 -> 0.870",
        "  dropped: prompt too long  1",
        "  files                     outputs/demo",
    ]


def test_without_a_terminal_nothing_is_an_escape_sequence():
    console, stream, clock = watched(max_steps=3)
    for step in range(3):
        clock.now += 2.0
        console.step(step, METRICS)
    console.summary({"files": "outputs/demo"})
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def step_numbers(stream):
    return [int(line[5:].split("/")[0]) for line in stream.getvalue().splitlines() if line.startswith("step ")]


def test_fast_steps_give_one_line_a_second_and_the_last():
    console, stream, clock = watched(max_steps=25)
    for step in range(25):
        clock.now = step / 10
        console.step(step, METRICS)
    assert step_numbers(stream) == [1, 11, 21, 25]


@pytest.mark.parametrize("ending", ["phase", "note", "summary", "close"])
def test_the_last_step_of_a_run_that_stops_early_is_still_written(ending):
    console, stream, clock = watched(max_steps=25)
    for step in range(4):
        clock.now += 0.01
        console.step(step, METRICS)
    {
        "phase": lambda: console.phase("evaluating"),
        "note": lambda: console.note("stopped"),
        "summary": lambda: console.summary({}),
        "close": console.close,
    }[ending]()
    assert step_numbers(stream) == [1, 4]


def test_a_figure_that_is_absent_is_not_shown():
    console, stream, _ = watched()
    console.step(0, {"loss": 2.5})
    assert stream.getvalue().splitlines()[-1] == "step   1/100  loss 2.5000"


def test_workers_that_start_are_shown_after_a_while_and_then_ever_rarer():
    console, stream, clock = watched()
    for second in range(46):
        clock.now = float(second)
        console.starting([("policy-0", "reading weights", second), ("rollout-0", "importing", second)])
    console.starting([])
    clock.now = 1000.0
    console.starting([(f"rollout-{i}", "importing", 0.0) for i in range(6)])
    clock.now = 1011.0
    console.starting([(f"rollout-{i}", "importing", 11.0) for i in range(6)])
    assert stream.getvalue().splitlines()[1:] == [
        "starting: policy-0 reading weights 10 s, rollout-0 importing 10 s",
        "starting: policy-0 reading weights 30 s, rollout-0 importing 30 s",
        "starting: " + ", ".join(f"rollout-{i} importing 11 s" for i in range(4)) + ", 2 more",
    ]


def test_the_panel_shows_workers_that_start_until_they_have_started():
    console, _, _ = watched(Terminal())
    console.starting([("policy-0", "reading weights", 3.0)])
    rich = RichConsole(file=io.StringIO(), width=100)
    rich.print(console._panel())
    assert "starting  policy-0 reading weights 3 s" in rich.file.getvalue()
    console.starting([])
    rich.print(console._panel())
    assert rich.file.getvalue().count("starting  ") == 1
    console.close()


def test_a_phase_that_goes_on_is_told_once():
    console, stream, _ = watched()
    console.phase("training")
    console.phase("training")
    assert stream.getvalue().count("demo: training") == 1


def test_a_terminal_shows_the_panel_with_the_curve_and_keeps_notes():
    console, stream, clock = watched(Terminal(), max_steps=4)
    console.phase("training")
    for step in range(4):
        clock.now += 1.0
        console.step(step, {**METRICS, "reward_mean": step / 3})
    console.note("rollout-1 [gone]")
    console.summary({"reward": "0.000 -> 1.000"})
    console.close()
    shown = stream.getvalue()
    assert "demo: training" in shown
    assert "step 4/4" in shown
    assert "▁▃▆█" in shown
    assert "rollout-1 [gone]" in shown
    assert shown.index("demo: done") < shown.index("0.000 -> 1.000")


def test_a_terminal_that_knows_only_ascii_gets_ascii():
    class Old(Terminal):
        encoding = "ascii"

    console, stream, _ = watched(Old(), max_steps=2)
    console.step(0, METRICS)
    console.step(1, {**METRICS, "reward_mean": 0.9})
    console.summary({"files": "outputs/demo"})
    assert "step 2/2" in stream.getvalue()
    assert stream.getvalue().isascii()


def test_a_reward_that_is_not_a_number_leaves_the_curve_alone():
    console, stream, _ = watched(Terminal(), max_steps=2)
    console.step(0, {"reward_mean": float("nan")})
    console.close()
    assert "nan" in stream.getvalue()


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([3.0], "▁"), ([1.0, 1.0], "▁▁"), ([0.0, 0.5, 1.0], "▁▅█"), ([2.0, -2.0], "█▁")],
)
def test_a_sparkline_spans_its_values(values, bars):
    assert sparkline(values) == bars


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min 00 s"), (250, "4 min 10 s"), (7500, "2 h 05 min")],
)
def test_a_duration_reads_as_it_is_said(seconds, text):
    assert duration(seconds) == text
