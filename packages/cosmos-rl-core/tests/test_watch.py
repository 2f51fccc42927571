"""What the monitor is fed with in a run, and what follows from what it says."""

import json

import numpy as np
import pytest

from cosmos_rl_core import run
from cosmos_rl_core.checkpoint.export import export
from cosmos_rl_core.checkpoint.manifest import list_steps, write_manifest
from cosmos_rl_core.checkpoint.resume import roll_back
from cosmos_rl_core.checkpoint.retention import surplus
from cosmos_rl_core.launch.observer import Watch
from cosmos_rl_core.monitor.monitor import History, read_healthy
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_core.storage.folder import Folder
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup

RECIPE = {
    "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "name": "watched", "placement": "inline", "max_steps": 6},
    "data": {"rows": 4},
    "rollout": {"engine": "tiny", "group_size": 4, "sampling": {"max_tokens": 3}},
    "reward": {"functions": [{"name": "hits"}, {"name": "hits", "label": "judge", "weight": 0.0}]},
    "monitor": {"judges": ["judge"]},
    "policy": {"prompts_per_step": 2},
    "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
    "eval": {"every_steps": 1, "data": {"rows": 2}},
    "logging": {"sinks": ["jsonl"]},
}


class Told:
    """An observer that remembers notes."""

    def __init__(self):
        self.notes, self.versions = [], []

    def phase(self, text):
        self.notes.append(text)

    note = phase

    def step(self, step, metrics):
        pass

    def evaluated(self, version, metrics, groups):
        self.versions.append(version)
        self.metrics = dict(metrics)


@pytest.fixture
def watch(tmp_path):
    def make(**changes):
        told, stops = Told(), []
        config = load_config({**RECIPE, **changes})
        return Watch(told, config, history=History(tmp_path, first_step=0), stop=stops.append), told, stops

    return make


def evaluation(reward, judge):
    return {"eval/reward_mean": reward, "eval/reward/judge": judge}


def group(*rewards):
    rollouts = tuple(
        Rollout(
            arrays={},
            rollout_logprobs=np.zeros(0, np.float32),
            versions=np.zeros(0, np.int32),
            loss_mask=np.zeros(0, bool),
            reward=reward,
        )
        for reward in rewards
    )
    return RolloutGroup(prompt=Prompt(sample_id=0, row={}), rollouts=rollouts)


def test_a_judge_that_falls_while_the_reward_rises_ends_the_run_with_a_sentence(watch):
    watched, told, stops = watch()
    watched.evaluated(0, evaluation(0.1, 0.4), [])
    watched.evaluated(1, evaluation(0.5, 0.35), [])
    assert stops == []
    watched.evaluated(2, evaluation(0.9, 0.1), [])
    (reason,) = stops
    assert "judge" in reason
    assert any(note.startswith("monitor: ") for note in told.notes)
    assert told.versions == [0, 1, 2]


def test_a_reward_that_rises_with_its_judge_is_left_alone(watch):
    watched, told, stops = watch()
    for version in range(5):
        watched.evaluated(version, evaluation(version / 5, 0.4 + version / 10), [])
    assert (told.notes, stops) == ([], [])


def test_the_loss_on_real_data_is_waited_for_where_it_is_measured(watch):
    watched, told, stops = watch(eval={"data": {"rows": 2}, "loss_data": {"rows": 2}})
    for version, loss in enumerate((0.2, 0.3, 9.0)):
        watched.evaluated(version, evaluation(0.1, 0.4), [])
        assert len(stops) == 0
        watched.evaluated(version, {"eval/loss": loss}, [])
    assert len(stops) == 1
    assert told.versions == [0, 0, 1, 1, 2, 2]


def test_diversity_comes_from_training_and_is_compared_with_that_of_the_first_step(watch):
    watched, _, stops = watch(monitor={"rules": [{"watch": "diversity", "below": 0.5, "action": "stop"}]})
    watched.evaluated(0, {"eval/reward_mean": 0.1}, [])
    watched.step(0, {"reward/diversity": 0.4})
    watched.step(1, {"reward/diversity": 0.1})
    watched.evaluated(2, {"eval/reward_mean": 0.2}, [])
    assert stops == ["the monitor ends the run: step 2: diversity 0.4 -> 0.1; the run stops"]


def test_rewards_beyond_the_bound_of_the_recipe_are_counted_and_warned_about(watch):
    watched, told, _ = watch(monitor={"best_of_data": 0.5})
    watched.evaluated(0, {"eval/reward_mean": 0.4}, [group(0.3), group(0.5)])
    assert told.metrics["eval/beyond"] == 0.0
    watched.evaluated(1, {"eval/reward_mean": 0.7}, [group(0.4), group(0.9), group(0.8)])
    assert told.metrics["eval/beyond"] == pytest.approx(2 / 3)
    assert told.notes == ["monitor: step 1: 67% of the rewards are above the best of the data"]


def test_the_best_of_real_rows_is_the_bound_once_it_is_known(watch):
    watched, told, _ = watch(monitor={"data_rows": 8}, eval={"data": {"rows": 2}, "loss_data": {"rows": 8}})
    watched.evaluated(0, {"data/reward_mean": 0.1, "data/reward_max": 0.5, "data/rows": 8.0}, [])
    assert (told.versions, told.notes) == ([], ["monitor: the best of 8 real rows has reward 0.5"])
    watched.evaluated(1, {"eval/reward_mean": 0.7}, [group(0.4), group(0.9)])
    assert told.metrics["eval/beyond"] == 0.5


def test_a_resumed_run_remembers_its_start_and_its_last_healthy_step(tmp_path, watch):
    watched, told, stops = watch()
    for version, (reward, judge) in enumerate([(0.1, 0.4), (0.2, 0.4), (0.9, 0.25)]):
        watched.evaluated(version, evaluation(reward, judge), [])
    assert read_healthy(tmp_path) == 1
    history = History(tmp_path, first_step=2)
    assert history.state.start == {"reward": 0.1, "judge/judge": 0.4}
    resumed = Watch(told, load_config(RECIPE), history=history, stop=stops.append)
    resumed.evaluated(2, evaluation(0.9, 0.1), [])
    assert "fell from 0.4 to 0.1" in stops[0]
    lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert [(line["step"], line["action"]) for line in lines] == [(0, None), (1, None), (2, "stop")]


@pytest.mark.parametrize("wrong", [{"ratio_mean": 0.9, "mismatch_kl": 0.03}, {"ratio_mean": 1.0, "mismatch_kl": 0.2}])
def test_an_engine_that_disagrees_with_the_policy_is_named_at_the_first_step_on_its_weights(watch, wrong):
    """As with top_p, by which an engine renormalises and a policy does not."""
    watched, seen, _ = watch()
    watched.step(0, {"staleness_max": 1.0, **wrong})
    assert not seen.notes, "older weights explain it"
    watched.step(1, {"staleness_max": 0.0, **wrong})
    watched.step(2, {"staleness_max": 0.0, **wrong})
    (note,) = seen.notes
    assert "engine and policy disagree on rollouts of the same weights: ratio_mean is " in note
    assert "[rollout.sampling]" in note and "dtype" in note and "docs/families.md" in note


@pytest.mark.parametrize("policy", [{}, {"minibatches": 2}, {"epochs": 2}], ids=["one update", "minibatches", "epochs"])
def test_rounding_and_several_updates_a_step_are_no_disagreement(watch, policy):
    watched, seen, _ = watch(policy={"prompts_per_step": 2, **policy})
    ratio = 0.7 if policy else 1.02
    watched.step(0, {"staleness_max": 0.0, "ratio_mean": ratio, "mismatch_kl": 0.01})
    assert not seen.notes


def test_a_judge_has_to_be_a_reward_of_weight_zero():
    with pytest.raises(ConfigError, match=r"monitor.judges.*weight = 0"):
        load_config({**RECIPE, "monitor": {"judges": ["hits"]}})


def test_a_run_measures_the_loss_on_real_data_beside_its_rewards(tmp_path):
    recipe = {**RECIPE, "eval": {"every_steps": 3, "data": {"rows": 2}, "loss_data": {"rows": 3}}}
    run(recipe, [f"run.output_dir={tmp_path / 'run'}"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    versions = {name: [line["policy_version"] for line in lines if name in line] for name in lines[0] | lines[1]}
    assert versions["eval/loss"] == versions["eval/reward_mean"] == [0, 3, 6]


def test_a_run_that_games_its_reward_is_ended_and_saved(tmp_path):
    recipe = {**RECIPE, "monitor": {"rules": [{"watch": "reward", "above": -1.0, "of_start": False, "action": "stop"}]}}
    result = run(recipe, [f"run.output_dir={tmp_path / 'run'}"])
    assert result.steps < 6
    assert result.checkpoint is not None


# Going back.

ROLLBACK = {
    **RECIPE,
    "run": {**RECIPE["run"], "max_steps": 10},
    "policy": {"prompts_per_step": 2, "optimizer": {"learning_rate": 0.02}},
    "sync": {**RECIPE["sync"], "max_staleness": 0},
    "eval": {"every_steps": 2, "data": {"rows": 2}},
    "monitor": {"rules": [{"watch": "reward", "above": 0.2, "of_start": False, "patience": 2, "action": "rollback"}]},
    "checkpoint": {"every_steps": 3, "keep": 1},
}
"""Its reward is above 0.2 from version 6 on: it is taken back at 8, to what is saved of 4 or before, and that is 3."""


def weights(checkpoint, directory):
    [file] = export(str(checkpoint), directory).directory.glob("*.safetensors")
    return file.read_bytes()


def test_a_run_that_is_taken_back_ends_with_exactly_the_weights_of_the_healthy_step(tmp_path):
    result = run(ROLLBACK, [f"run.output_dir={tmp_path / 'run'}"])
    unwatched = run(
        ROLLBACK, [f"run.output_dir={tmp_path / 'free'}", "monitor.rules=[]", "checkpoint.keep=9", "eval.data.rows=2"]
    )
    assert (result.steps, result.trained, unwatched.steps) == (3, 8, 10)
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step_3"
    exported = weights(tmp_path / "run", tmp_path / "exported")
    assert exported == weights(tmp_path / "free" / "checkpoints" / "step_3", tmp_path / "third")
    assert exported != weights(unwatched.checkpoint, tmp_path / "last")


def test_the_newest_checkpoint_up_to_the_healthy_step_is_never_surplus():
    assert surplus([3, 6, 9, 12], newest=12, keep=1, healthy=8) == [3, 9]
    assert surplus([3, 6, 9, 12], newest=12, keep=1, healthy=2) == [3, 6, 9]
    assert surplus([3, 6, 9, 12], newest=12, keep=1, healthy=20) == [3, 6, 9]


def test_without_a_checkpoint_to_go_back_to_nothing_is_set_aside(tmp_path):
    for step in (6, 9):
        (tmp_path / f"step_{step}").mkdir()
        write_manifest(tmp_path / f"step_{step}", {})
    assert roll_back(Folder.at(tmp_path), to=5, reason="") is None
    assert list_steps(tmp_path) == [6, 9]
    assert roll_back(Folder.at(tmp_path), to=8, reason="hacked") == 6
    assert list_steps(tmp_path) == [6]


def test_what_was_trained_after_the_healthy_step_is_kept_and_says_why_it_does_not_count(tmp_path):
    root = run(ROLLBACK, [f"run.output_dir={tmp_path / 'run'}"]).checkpoint.parent
    assert list_steps(root) == [3]
    assert list_steps(root, rolled_back=True) == [3, 8]
    mark = json.loads((root / "step_8" / "rolled_back.json").read_text())
    assert mark["to"] == 3
    assert mark["reason"].endswith("the run stops and goes back to step 4")
    assert weights(root / "step_8", tmp_path / "by_name")


def test_a_run_that_was_taken_back_goes_on_from_the_healthy_step_and_trains_the_rest_again(tmp_path):
    overrides = [f"run.output_dir={tmp_path / 'run'}"]
    run(ROLLBACK, overrides)
    again = run(ROLLBACK, [*overrides, "monitor.rules=[]"], resume="auto")
    assert (again.metrics[0]["step"], again.steps) == (3, 10)
    assert list_steps(tmp_path / "run" / "checkpoints") == [10]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "monitor.jsonl").read_text().splitlines()]
    assert steps == [0, 2, 4, 6, 8, 10]


def test_a_run_that_goes_wrong_at_once_goes_back_to_what_it_started_from(tmp_path):
    changes = [
        "checkpoint.every_steps=5",
        'monitor.rules=[{watch="reward", above=0.2, of_start=false, action="rollback"}]',
    ]
    result = run(ROLLBACK, [f"run.output_dir={tmp_path / 'run'}", *changes])
    assert (result.steps, result.trained) == (0, 6)
    again = run(ROLLBACK, [f"run.output_dir={tmp_path / 'run'}", "monitor.rules=[]"], resume="auto")
    assert (again.metrics[0]["step"], again.steps) == (0, 10)


def test_the_closing_table_is_about_the_weights_that_are_left(tmp_path, capsys):
    run(ROLLBACK, [f"run.output_dir={tmp_path / 'run'}", 'logging.sinks=["console"]'])
    told = " ".join(capsys.readouterr().out.split())
    assert "rolled back the weights are those of step 3; later checkpoints are set aside" in told
    assert "held-out reward_mean 0.167 -> 0.167" in told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": {}}, "checkpoint.every_steps.*checkpoint to roll back to"),
        ({"monitor": {"data_rows": 4}, "eval": {"data": {"rows": 2}}}, r"monitor.data_rows.*\[eval.loss_data\]"),
        (
            {
                "reward": {"functions": [{"name": "hits"}, {"name": "hits", "label": "diversity", "weight": 0.0}]},
                "monitor": {"judges": ["diversity"]},
            },
            "monitor.judges.*uses the value from training",
        ),
    ],
)
def test_a_monitor_that_lacks_what_it_needs_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        load_config({**ROLLBACK, **changes})


@pytest.mark.parametrize(
    "line",
    ["7", "{}", '{"step": 3, "state": 1}', '{"step": 3, "state": {"standing": []', "[" * 5000, "no"],
    ids=lambda value: str(value)[:40],
)
def test_a_damaged_line_of_the_monitor_is_passed_over(tmp_path, line):
    good = {"step": 2, "state": {"start": {}, "crossed": {}, "standing": [], "last_good": 2}}
    (tmp_path / "monitor.jsonl").write_text(json.dumps(good) + "\n" + line)
    assert read_healthy(tmp_path) == 2
