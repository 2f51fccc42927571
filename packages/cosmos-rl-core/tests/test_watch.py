"""What the monitor is fed with in a run, and what follows from what it says."""

import json

import pytest

from cosmos_rl_core import run
from cosmos_rl_core.config.base import ConfigError
from cosmos_rl_core.config.load import load_config
from cosmos_rl_core.launch.watch import Watch

RECIPE = {
    "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "name": "watched", "placement": "inline", "max_steps": 6},
    "data": {"rows": 4},
    "rollout": {"engine": "tiny", "group_size": 4, "sampling": {"max_terms": 3}},
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


def watch(**changes):
    told, stops = Told(), []
    config = load_config({**RECIPE, **changes})
    return Watch(told, config, stop=stops.append), told, stops


def evaluation(reward, judge):
    return {"eval/reward_mean": reward, "eval/reward/judge": judge}


def test_a_judge_that_falls_while_the_reward_rises_ends_the_run_with_a_sentence():
    watched, told, stops = watch()
    watched.evaluated(0, evaluation(0.1, 0.4), [])
    watched.evaluated(1, evaluation(0.5, 0.35), [])
    assert stops == []
    watched.evaluated(2, evaluation(0.9, 0.1), [])
    (reason,) = stops
    assert "judge" in reason
    assert any(note.startswith("monitor: ") for note in told.notes)
    assert told.versions == [0, 1, 2]


def test_a_reward_that_rises_with_its_judge_is_left_alone():
    watched, told, stops = watch()
    for version in range(5):
        watched.evaluated(version, evaluation(version / 5, 0.4 + version / 10), [])
    assert (told.notes, stops) == ([], [])


def test_the_loss_on_real_data_is_waited_for_where_it_is_measured():
    watched, told, stops = watch(eval={"data": {"rows": 2}, "loss_data": {"rows": 2}})
    for version, loss in enumerate((0.2, 0.3, 9.0)):
        watched.evaluated(version, evaluation(0.1, 0.4), [])
        assert len(stops) == 0
        watched.evaluated(version, {"eval/loss": loss}, [])
    assert len(stops) == 1
    assert told.versions == [0, 0, 1, 1, 2, 2]


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
