"""The hack monitor, look by look; the metrics of the first tests are those of cookbook/wfm_quickstart."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cosmos_rl_core.control.reports import ProgressObserver
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.observer import Watch, _alarms, _Totals
from cosmos_rl_core.monitor.config import MonitorConfig, Rule
from cosmos_rl_core.monitor.monitor import CheckMetrics, HackMonitor, History, State, TrainingSteps, beyond
from cosmos_rl_core.recipe.load import load_config

BASE = CheckMetrics(step=0, reward=0.080, judges={"prompt_ok": 0.67}, held_out_loss=0.08)


def watch(*looks: CheckMetrics, config: MonitorConfig | None = None) -> list:
    monitor = HackMonitor(config or MonitorConfig())
    return [monitor.observe(metrics) for metrics in looks]


def one_rule(**rule) -> MonitorConfig:
    return MonitorConfig(rules=(Rule(**rule),))


def losses(*values: float, **rule) -> list:
    looks = [CheckMetrics(step=step, reward=0.0, held_out_loss=value) for step, value in enumerate(values)]
    return watch(*looks, config=one_rule(watch="held_out_loss", **rule))


# What happened to 60 steps of each method.


def test_unregularised_flow_grpo_is_stopped_with_a_sentence_that_says_why():
    hacked = CheckMetrics(step=60, reward=0.679, judges={"prompt_ok": 0.05}, held_out_loss=1.73, beyond=1.0)
    first, last = watch(BASE, hacked)
    assert first.action is None
    assert last.action == "stop"
    assert last.text == (
        "step 60: the reward rose from 0.08 to 0.679 while judge 'prompt_ok' fell from 0.67 to 0.05: the model "
        "games the reward; held-out loss 0.08 -> 1.73; 100% of the rewards are above the best of the data; "
        "the run stops"
    )


@pytest.mark.parametrize(("reward", "judge", "loss"), [(0.097, 0.71, 0.08), (0.086, 0.71, 0.08)])
def test_ddrl_and_its_control_raise_no_alarm(reward, judge, loss):
    after = CheckMetrics(step=60, reward=reward, judges={"prompt_ok": judge}, held_out_loss=loss)
    verdicts = watch(BASE, after)
    assert [(verdict.action, verdict.standing) for verdict in verdicts] == [(None, 0), (None, 0)]


def test_a_reward_that_is_earned_raises_no_alarm():
    base = CheckMetrics(step=0, reward=0.424, judges={"prompt_ok": 0.67}, held_out_loss=0.08)
    _, after = watch(base, CheckMetrics(step=60, reward=0.880, judges={"prompt_ok": 0.62}, held_out_loss=0.11))
    assert after.action is None


def test_a_data_term_that_is_too_weak_is_found_out_by_the_judge():
    _, after = watch(BASE, CheckMetrics(step=60, reward=0.177, judges={"prompt_ok": 0.39}, held_out_loss=0.09))
    assert after.action == "warn"
    assert "while judge 'prompt_ok' fell from 0.67 to 0.39" in after.text


def test_the_loss_alone_stops_a_run_without_judges():
    _, after = watch(
        CheckMetrics(step=0, reward=0.080, held_out_loss=0.08), CheckMetrics(step=60, reward=0.679, held_out_loss=1.73)
    )
    assert (after.action, after.text) == ("stop", "step 60: held-out loss 0.08 -> 1.73; the run stops")


# One rule at a time.


def test_a_judge_that_falls_with_the_reward_is_no_hack():
    _, after = watch(BASE, CheckMetrics(step=9, reward=0.05, judges={"prompt_ok": 0.08}))
    assert after.action is None


def test_several_judges_are_watched_one_by_one():
    _, after = watch(
        CheckMetrics(step=0, reward=0.1, judges={"a": 0.5, "b": 0.5}),
        CheckMetrics(step=1, reward=0.2, judges={"a": 0.6, "b": 0.1}),
    )
    assert {alarm.metric for alarm in after.alarms} == {"judge/b"}


def test_a_bound_is_exclusive_and_a_multiple_of_the_first_value():
    assert [v.action for v in losses(0.5, 1.0, 1.0001, above=2.0)] == [None, None, "warn"]


def test_an_absolute_bound_does_not_look_at_the_start():
    assert [v.action for v in losses(0.9, 1.1, above=1.0, of_start=False)] == [None, "warn"]


def test_patience_wants_looks_in_a_row():
    verdicts = losses(1.0, 3.0, 1.0, 3.0, 3.0, 3.0, above=2.0, patience=2)
    assert [v.action for v in verdicts] == [None, None, None, None, "warn", None]


def test_an_alarm_stands_until_the_figure_is_well_inside():
    verdicts = losses(1.0, 2.1, 1.9, 2.1, 1.7, 2.1, above=2.0, release=0.1)
    assert [v.action for v in verdicts] == [None, "warn", None, None, None, "warn"]
    assert [v.standing for v in verdicts] == [0, 1, 1, 1, 0, 1]
    assert verdicts[4].over == ("held_out_loss above 2 of start: warn",)


def test_a_lower_bound_releases_upwards():
    looks = [CheckMetrics(step=step, reward=0.0, diversity=value) for step, value in enumerate([1.0, 0.4, 0.52, 0.56])]
    verdicts = watch(*looks, config=one_rule(watch="diversity", below=0.5))
    assert [v.standing for v in verdicts] == [0, 1, 1, 0]
    assert verdicts[1].text == "step 1: diversity 1 -> 0.4"


def test_an_alarm_about_a_judge_is_over_when_the_reward_is_back_at_its_start():
    fallen = {"prompt_ok": 0.4}
    verdicts = watch(
        BASE, CheckMetrics(step=1, reward=0.15, judges=fallen), CheckMetrics(step=2, reward=0.08, judges=fallen)
    )
    assert [v.standing for v in verdicts] == [0, 1, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bound", [{"above": 2.0}, {"below": 0.5}])
def test_what_is_no_number_is_outside_every_bound_and_never_releases(value, bound):
    verdicts = losses(1.0, value, value, **bound)
    assert [v.standing for v in verdicts] == [0, 1, 1]


def test_a_start_that_is_no_number_is_not_taken_for_one():
    verdicts = losses(float("nan"), 1.0, 1.5, 3.0, above=2.0)
    assert [v.action for v in verdicts] == ["warn", None, None, "warn"]


def test_a_start_of_zero_has_no_multiples():
    looks = [
        CheckMetrics(step=step, reward=0.1 * step, judges={"ocr": value}) for step, value in enumerate([0.0, -1.0])
    ]
    assert [v.action for v in watch(*looks)] == [None, None]


def test_a_figure_that_is_not_measured_keeps_its_alarm_and_its_count():
    looks = [
        CheckMetrics(step=step, reward=0.0, held_out_loss=value)
        for step, value in enumerate([1.0, 3.0, None, 3.0, None])
    ]
    verdicts = watch(*looks, config=one_rule(watch="held_out_loss", above=2.0, patience=2))
    assert [v.action for v in verdicts] == [None, None, None, "warn", None]
    assert verdicts[-1].standing == 1


def test_the_strongest_of_several_actions_is_taken():
    rules = tuple(
        Rule(watch="held_out_loss", above=x, action=a) for x, a in ((2, "warn"), (3, "stop"), (4, "rollback"))
    )
    looks = (CheckMetrics(step=0, reward=0, held_out_loss=1.0), CheckMetrics(step=5, reward=0, held_out_loss=9.0))
    assert watch(*looks, config=MonitorConfig(rules=rules))[1].action == "rollback"
    assert watch(*looks, config=MonitorConfig(rules=rules[:2]))[1].action == "stop"


# Going back.


def test_a_rollback_names_the_last_step_at_which_all_was_well():
    verdicts = losses(1.0, 1.5, 2.5, 2.6, above=2.0, action="rollback", patience=2)
    assert [v.rollback_to for v in verdicts] == [None, None, None, 1]
    assert verdicts[3].text == "step 3: held-out loss 1 -> 2.6; the run stops and goes back to step 1"


def test_a_look_at_which_a_warning_is_due_is_no_good_one():
    rules = (Rule(watch="held_out_loss", above=2.0), Rule(watch="held_out_loss", above=4.0, action="rollback"))
    looks = [CheckMetrics(step=i, reward=0, held_out_loss=value) for i, value in enumerate([1.0, 1.5, 3.0, 5.0])]
    assert watch(*looks, config=MonitorConfig(rules=rules))[-1].rollback_to == 1


def test_with_no_good_step_to_go_back_to_the_run_stops():
    (verdict,) = losses(3.0, above=2.0, of_start=False, action="rollback")
    assert (verdict.action, verdict.rollback_to) == ("stop", None)


# State and recipes.


def test_a_monitor_goes_on_from_its_journaled_state():
    looks = [CheckMetrics(step=i, reward=i / 10, judges={"j": j}) for i, j in enumerate([0.5, 0.3, 0.3, 0.2, 0.5, 0.1])]
    whole = HackMonitor(MonitorConfig())
    state = State()
    for metrics in looks:
        resumed = HackMonitor(MonitorConfig(), state=State.from_json(json.loads(json.dumps(state.as_json()))))
        assert resumed.observe(metrics) == whole.observe(metrics)
        state = resumed.state
    assert state == whole.state


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=12))
def test_alarms_raised_less_those_over_are_those_that_stand(looks):
    verdicts = watch(*(CheckMetrics(step=i, reward=r, judges={"j": j}) for i, (r, j) in enumerate(looks)))
    standing = 0
    for verdict in verdicts:
        standing += len(verdict.alarms) - len(verdict.over)
        assert verdict.standing == standing
        assert bool(verdict.text) == (verdict.action is not None) == bool(verdict.alarms)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"watch": "loss", "above": 2}, "is not a metric; known: reward, held_out_loss"),
        ({"watch": "beyond"}, "one of above and below"),
        ({"watch": "beyond", "above": 1, "below": 0}, "one of above and below"),
        ({"watch": "reward", "below": -1}, "of_start = false"),
        ({"watch": "beyond", "above": 1, "patience": 0}, "patience"),
        ({"watch": "beyond", "above": 1, "then": "stop"}, "Extra inputs"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(rule, message):
    with pytest.raises(ValidationError, match=message):
        Rule(**rule)


def test_the_same_rule_twice_is_refused():
    rule = Rule(watch="beyond", above=0.5, of_start=False)
    with pytest.raises(ValidationError, match=r"same rule more than once: beyond above 0\.5: warn"):
        MonitorConfig(rules=(rule, rule))


def test_a_rule_for_an_absent_judge_names_those_there_are():
    with pytest.raises(UserError, match="watches judge/shape, which is not measured; measured judges: prompt_ok"):
        watch(BASE, config=one_rule(watch="judge/shape", below=0.5))


# Metrics.


def test_a_first_value_may_be_measured_before_the_first_look():
    monitor = HackMonitor(one_rule(watch="diversity", below=0.5))
    monitor.begin(diversity=0.8)
    monitor.begin(diversity=0.3)
    assert monitor.observe(CheckMetrics(step=20, reward=0.0, diversity=0.35)).action == "warn"


def test_beyond_is_the_share_above_the_best():
    assert beyond([0.1, 0.2, 0.3, 0.4], 0.2) == 0.5
    with pytest.raises(ValueError, match="no rewards"):
        beyond([], 0.2)


@pytest.mark.parametrize(
    ("first", "later", "said"),
    [
        ({"reward": 0.75}, {"reward": 0.0}, "held-out reward 0.75 -> 0"),
        ({"reward": -1.0}, {"reward": -50.0}, "held-out reward -1 -> -50"),
        ({"reward": 0.0}, {"reward": -0.6}, "held-out reward 0 -> -0.6"),
        ({"entropy": 1.5}, {"entropy": 0.1}, "entropy 1.5 -> 0.1"),
        ({"response_length": 200.0}, {"response_length": 20.0}, "response length 200 -> 20"),
        ({"response_length": 200.0}, {"response_length": 1100.0}, "response length 200 -> 1.1e+03"),
        ({"skipped_steps": 0.0}, {"skipped_steps": 0.5}, "fraction of skipped steps 0 -> 0.5"),
        ({"mismatch": 0.001}, {"mismatch": 0.3}, "mismatch of engine and policy 0.001 -> 0.3"),
    ],
)
def test_a_collapse_is_a_warning_of_the_default_rules(first, later, said):
    def metrics(step, values):
        training = {name: value for name, value in values.items() if name != "reward"}
        return CheckMetrics(step=step, reward=values.get("reward", 0.5), training=training)

    quiet, verdict = watch(metrics(1, first), metrics(2, later))
    assert quiet.action is None
    assert (verdict.action, verdict.text) == ("warn", f"step 2: {said}")


def rewards(*values, **changes):
    return watch(*(CheckMetrics(step=step, reward=value, **changes) for step, value in enumerate(values)))


def test_a_reward_that_rose_and_fell_back_to_its_start_is_an_alarm():
    verdicts = rewards(0.1, 0.5, 0.9, 0.5, 0.1)
    assert [v.action for v in verdicts] == [None, None, None, None, "warn"]
    assert verdicts[-1].text == "step 4: held-out reward 0.9 -> 0.1"


@pytest.mark.parametrize("values", [(-10.0, -5.0, -6.0, -2.0, -2.5), (0.0, 0.0, -0.2, 0.3, 0.2), (0.1, 0.4, 0.3, 0.5)])
def test_a_reward_that_falls_a_little_is_no_alarm(values):
    assert {v.action for v in rewards(*values)} == {None}


def test_the_best_value_is_in_the_journaled_state():
    monitor = HackMonitor(MonitorConfig())
    for step, value in enumerate([0.1, 0.9]):
        monitor.observe(CheckMetrics(step=step, reward=value))
    resumed = HackMonitor(MonitorConfig(), state=State.from_json(json.loads(json.dumps(monitor.state.as_json()))))
    assert resumed.observe(CheckMetrics(step=2, reward=0.1)).action == "warn"


def test_a_gradient_norm_that_explodes_is_an_alarm_at_the_second_check():
    looks = [
        CheckMetrics(step=step, reward=0.5, training={"grad_norm": norm}) for step, norm in enumerate([1.0, 30.0, 30.0])
    ]
    verdicts = watch(*looks)
    assert [v.action for v in verdicts] == [None, None, "warn"]
    assert verdicts[-1].text == "step 2: gradient norm 1 -> 30"


def test_a_check_of_training_metrics_alone_keeps_what_evaluations_have_found():
    fallen = CheckMetrics(step=1, reward=0.2, judges={"prompt_ok": 0.4}, held_out_loss=0.08)
    verdicts = watch(BASE, fallen, CheckMetrics(step=2, reward=None, training={"entropy": 1.0}))
    assert [v.standing for v in verdicts] == [0, 1, 1]
    monitor = HackMonitor(MonitorConfig())
    for metrics in (BASE, CheckMetrics(step=7, reward=None, training={"entropy": 1.0})):
        monitor.observe(metrics)
    assert monitor.state.last_good == 0


class Noted(ProgressObserver):
    """Remembers the notes."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def watched(tmp_path, config, **changes):
    """A `Watch` of a run without evaluations, its observer and the reasons to stop."""
    observer, reasons = Noted(), []
    watch = Watch(observer, config(**changes), history=History(tmp_path, first_step=0), stop=reasons.append)
    return watch, observer, reasons


@pytest.fixture
def config():
    """`config(monitor__every_steps=3)`: a recipe of the tiny domain without evaluations."""

    def make(**monitor):
        recipe = {
            "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 100},
            "reward": {"functions": [{"name": "hits"}]},
            "monitor": monitor,
        }
        return load_config(recipe)

    return make


def test_training_metrics_are_checked_between_evaluations_and_without_any(tmp_path, config):
    watch, observer, reasons = watched(tmp_path, config, every_steps=3)
    for step in range(9):
        watch.step(step, {"reward_mean": 0.9 if step < 3 else 0.1, "grad_norm": 1.0})
    assert observer.notes == ["monitor: step 9: reward 0.9 -> 0.1"]
    assert reasons == []
    lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert [(line["step"], line["training_reward"]) for line in lines] == [
        (3, pytest.approx(0.9)),
        (6, pytest.approx(0.1)),
        (9, pytest.approx(0.1)),
    ]


def test_no_check_of_training_metrics_if_the_recipe_says_so(tmp_path, config):
    watch, _, _ = watched(tmp_path, config, every_steps=0)
    for step in range(30):
        watch.step(step, {"reward_mean": 0.0})
    assert not (tmp_path / "monitor.jsonl").exists()


def test_a_stop_says_why(tmp_path, config):
    rule = {"watch": "training_reward", "below": 0.5, "of_best": True, "action": "stop"}
    watch, _, reasons = watched(tmp_path, config, every_steps=1, rules=[rule])
    watch.step(0, {"reward_mean": 0.9})
    watch.step(1, {"reward_mean": 0.1})
    assert watch.stopped == "step 2: reward 0.9 -> 0.1; the run stops"
    assert reasons == [f"the monitor ends the run: {watch.stopped}"]


def test_the_closing_table_has_alarms_skipped_steps_and_the_reason_of_a_stop(tmp_path):
    monitor, history = HackMonitor(MonitorConfig()), History(tmp_path, first_step=0)
    for step, value in enumerate([0.9, 0.1]):
        metrics = CheckMetrics(step=step, reward=value)
        history.add(metrics, monitor.observe(metrics), monitor.state)
    result = SimpleNamespace(run_dir=tmp_path, stopped="why")
    assert _alarms(result, _Totals(steps=2, skipped=1)) == {
        "stopped": "why",
        "alarms": "reward below 0.5 of best",
        "skipped steps": "1 of 2, as their gradients were not finite",
    }


def test_training_metrics_are_means_between_checks_without_the_steps_that_were_skipped():
    steps = TrainingSteps()
    steps.add({"entropy": 1.0, "grad_norm": 2.0, "loss": 5.0})
    steps.add({"entropy": float("nan"), "grad_norm": float("inf")})
    assert steps.metrics() == {"entropy": 1.0, "grad_norm": 2.0, "skipped_steps": 0.5}
    assert steps.metrics() == {}
