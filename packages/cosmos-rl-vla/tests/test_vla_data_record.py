"""Demonstrations of scripted experts."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.config import VLADataConfig
from cosmos_rl_vla.data.demos import Demonstrations, demonstrated_rows
from cosmos_rl_vla.data.recording.expert import ScriptedExpert
from cosmos_rl_vla.data.recording.record import LOOKS, Manner, Series, record
from cosmos_rl_vla.sims.reach import Reach

TASKS = ("red", "blue")


def recorded(path, **keys):
    return record(path, **{"simulator": "reach", "tasks": TASKS, "episodes_per_task": 3, "slots": 2, **keys})


def everything(path, **keys):
    data = VLADataConfig(demos=str(path), aux_columns=("privileged",))
    rows = demonstrated_rows(data)
    return rows, Demonstrations.open(data).read(rows, **{"horizon": 1, **keys})


def test_the_expert_is_shown_behind_the_state():
    expert, alone = ScriptedExpert(simulator="reach", options={}), Reach()
    for simulator in (expert, alone):
        simulator.reset("blue", 3)
    shown, seen = expert.split(expert.observe().state), alone.observe()
    assert np.array_equal(shown.states, seen.state)
    assert np.array_equal(shown.actions, alone.expert_action())
    assert np.array_equal(shown.privileged, alone.privileged())
    assert (expert.spec.state_dim, expert.inner.state_dim) == (2 + 2 + 6, 2)


def test_an_episode_played_again_from_the_record_succeeds(tmp_path):
    result = recorded(tmp_path / "demos")
    assert (result.episodes, result.attempts) == (6, {"red": 3, "blue": 3})
    rows, samples = everything(tmp_path / "demos")
    simulator = Reach()
    for episode in range(6):
        simulator.reset(TASKS[episode // 3], episode % 3)
        steps = []
        for place in [place for place, row in enumerate(rows) if row["episode"] == episode]:
            assert np.array_equal(samples.images[place, 0], simulator.observe().images["board"])
            steps.append(simulator.step(samples.actions[place, 0]).success)
        assert steps[-1] and not any(steps[:-1])
        assert rows[place]["task"] == f"reach the {TASKS[episode // 3]} square"


def test_what_is_recorded_does_not_depend_on_the_number_of_processes(tmp_path):
    keys = {"manner": Manner(speed=0.5, noise=0.8), "options": {"max_steps": 16}, "looks_per_task": 2}
    one = recorded(tmp_path / "one", processes=1, **keys)
    two = recorded(tmp_path / "two", processes=2, **keys)
    assert one == two
    assert sum(one.attempts.values()) > 6  # some failed, and others took their places
    (rows, samples), (others, again) = everything(tmp_path / "one"), everything(tmp_path / "two")
    assert list(rows) == list(others)
    for name in ("images", "states", "actions", "action_mask", "aux"):
        assert np.array_equal(getattr(samples, name), getattr(again, name))


def test_looks_show_other_beginnings_without_an_action(tmp_path):
    recorded(tmp_path / "demos", looks_per_task=2)
    rows, samples = everything(tmp_path / "demos")
    places = [place for place, row in enumerate(rows) if row["episode"] >= 6]
    assert len(places) == 4
    assert not samples.action_mask[places].any() and samples.action_mask[: places[0]].all()
    simulator = Reach()
    simulator.reset("red", LOOKS + 1)
    assert np.array_equal(samples.images[places[1], 0], simulator.observe().images["board"])


def test_a_slow_demonstrator_wants_less_of_each_dimension(tmp_path):
    recorded(tmp_path / "demos", manner=Manner(speed=(0.5, 0.25)), options={"max_steps": 200})
    _, samples = everything(tmp_path / "demos")
    simulator = Reach()
    simulator.reset("red", 0)
    np.testing.assert_allclose(samples.actions[0, 0], simulator.expert_action() * [0.5, 0.25], rtol=1e-6)


def test_noise_is_executed_but_not_imitated(tmp_path):
    recorded(tmp_path / "demos", manner=Manner(noise=0.3), options={"max_steps": 200})
    _, samples = everything(tmp_path / "demos")
    simulator = Reach()
    simulator.reset("red", 0)
    assert np.array_equal(samples.actions[0, 0], simulator.expert_action())
    simulator.step(samples.actions[0, 0])
    assert not np.allclose(samples.states[1], simulator.observe().state)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tasks": ("mauve",)}, r"simulator reach has no task 'mauve'"),
        ({"options": {"colour": 2}}, r"simulator 'reach': .*unexpected keyword argument 'colour'"),
        (
            {"simulator": "vla_faulty:Faulty"},
            r"has no expert: it needs expert_action\(\) and privileged",
        ),
        ({"options": {"max_steps": 2}}, r"the expert failed in \d+ of 15 episodes of '\w+': give it more time"),
        ({"manner": Manner(speed=(1, 1, 1))}, r"3 speeds for 2 dimensions of an action"),
    ],
)
def test_what_cannot_be_recorded_is_named_and_leaves_no_dataset(tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        recorded(tmp_path / "demos", **keys)
    assert not (tmp_path / "demos").exists()


@given(
    outcomes=st.lists(st.booleans(), min_size=40, max_size=40).filter(lambda seen: sum(seen[:20]) >= 4),
    order=st.randoms(use_true_random=False),
    at_a_time=st.integers(1, 9),
)
def test_a_series_keeps_the_first_successes_in_whatever_order_they_end(outcomes, order, at_a_time):
    series, running, kept = Series("go", num_successes=4, first_init=100), [], []
    while not series.done:
        while len(running) < at_a_time and (take := series.next()) is not None:
            running.append(take)
        take = running.pop(order.randrange(len(running)))
        take.success = outcomes[take.init - 100]
        series.end(take)
        kept += [each.init for each in series.successes()]
    assert kept == [100 + init for init, success in enumerate(outcomes) if success][:4]
    assert not running and series.attempts == kept[-1] - 99


def test_progress_is_told_for_each_task_about_ten_times(tmp_path):
    lines = []
    recorded(tmp_path / "demos", tasks=("red",), episodes_per_task=20, looks_per_task=3, progress=lines.append)
    assert [line.split(",")[0] for line in lines[:10]] == [f"red: {n} of 20 episodes" for n in range(2, 21, 2)]
    assert lines[10:] == [f"red: {n} of 3 initial observations" for n in (1, 2, 3)]


def test_the_command_records(tmp_path):
    import typer.testing

    from cosmos_rl_vla.data.recording.record import main

    app = typer.Typer()
    app.command()(main)
    given = ["--simulator", "reach", "--tasks", "red", "--episodes", "2", "--out", str(tmp_path / "demos")]
    result = typer.testing.CliRunner().invoke(app, [*given, "--option", "image_size=16", "--processes", "1"])
    assert result.exit_code == 0 and "red: the expert succeeded in 2 of 2" in result.output
    assert "red: 2 of 2 episodes, 2 begun" in result.output
    info = json.loads((tmp_path / "demos/meta/info.json").read_text())
    assert info["features"]["observation.images.board"]["shape"] == [16, 16, 3]
    again = typer.testing.CliRunner().invoke(app, given)
    assert again.exit_code == 2 and "exists: name another directory" in again.output
