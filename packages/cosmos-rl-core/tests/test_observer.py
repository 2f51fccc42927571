"""The observer of a run and its result: the files have the metrics, the process keeps none."""

import json
import math
import tracemalloc

import pytest

from cosmos_rl_core.launch.observer import RunObserver, Watch
from cosmos_rl_core.monitor.monitor import History
from cosmos_rl_core.recipe.load import load_config

RECIPE = {
    "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 10_000},
    "model": {},
    "data": {},
    "reward": {"functions": [{"name": "hits"}]},
    "rollout": {"group_size": 2, "sampling": {"max_tokens": 3}},
    "eval": {"data": {"rows": 2}, "loss_data": {"rows": 2}, "every_steps": 1},
    "logging": {"sinks": []},
}
SUPERVISED = {name: RECIPE[name] for name in ("run", "model", "data", "logging")} | {
    "algorithm": {"name": "sft"},
    "eval": {"data": {"rows": 2}, "every_steps": 1},
}


def opened(directory, recipe=RECIPE, *, first_step=0):
    config = load_config(recipe)
    return RunObserver(config, directory, first_step=first_step, first_evaluated=first_step, max_steps=10_000)


def finish(observer, *, trained):
    return observer.finish(
        steps=trained, trained=trained, checkpoint="", counts={}, reasons={}, wall_s=1.0, interrupted=False
    )


@pytest.mark.parametrize("recipe", [RECIPE, SUPERVISED], ids=["rewards", "supervised"])
def test_a_process_keeps_no_metrics_of_past_steps_and_evaluations(tmp_path, recipe):
    with opened(tmp_path / "run", recipe) as observer:
        history = History(tmp_path, first_step=0)
        watch = Watch(observer, load_config(recipe), history=history, stop=lambda reason: None)

        def steps(begin, end):
            for step in range(begin, end):
                watch.step(step, {f"metric_{number}": float(step) for number in range(20)} | {"grad_norm": 1.0})
                rewards = {} if recipe is SUPERVISED else {"eval/reward_mean": 0.5}
                watch.evaluated(step, {"eval/loss": float(step), **rewards}, [])

        steps(0, 20)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        steps(20, 420)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert after - before < 100_000  # 400 steps of 20 metrics alone are 500 kB


def test_the_result_reads_metrics_and_evaluations_of_its_own_steps(tmp_path):
    with opened(tmp_path / "run") as observer:
        for step in range(3):
            observer.step(step, {"loss": float(step)})
        observer.evaluated(0, {"eval/loss": 9.0}, [])
    with opened(tmp_path / "run", first_step=2) as observer:
        observer.step(2, {"loss": 2.5})
        observer.step(3, {"loss": math.nan})
        observer.evaluated(4, {"eval/reward_mean": 0.25}, [])
        observer.evaluated(4, {"eval/loss": 1.0}, [])
        result = finish(observer, trained=4)
    assert [line["step"] for line in result.metrics] == [2, 3]
    assert result.metrics[0]["loss"] == 2.5 and math.isnan(result.metrics[1]["loss"])
    assert result.evaluations == {4: {"eval/reward_mean": 0.25, "eval/loss": 1.0}}


def test_steps_that_were_rolled_back_are_not_in_the_result(tmp_path):
    with opened(tmp_path / "run") as observer:
        for step in range(3):
            observer.step(step, {"loss": 0.0})
            observer.evaluated(step + 1, {"eval/loss": 0.0}, [])
        observer.rolled_back(1)
        observer.step(1, {"loss": 7.0})
        result = finish(observer, trained=2)
    assert [line["loss"] for line in result.metrics] == [0.0, 7.0]
    assert sorted(result.evaluations) == [1]


def test_a_run_with_no_sink_has_metrics_in_its_directory(tmp_path):
    with opened(tmp_path / "run") as observer:
        observer.step(0, {"loss": 1.0})
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == 1.0
