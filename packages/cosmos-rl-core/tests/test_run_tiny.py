"""Whole runs of the tiny domain: real processes, real sockets, a bandit that learns in seconds."""

import json

import pytest

from cosmos_rl_core import run


def recipe(tmp_path, **changes):
    tables = {
        "run": {
            "domain": "cosmos_rl_core.testing.tiny:TINY",
            "name": "tiny",
            "output_dir": str(tmp_path / "run"),
            "max_steps": 30,
        },
        "model": {},
        "data": {},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 10, "threads": 1, "optimizer": {"learning_rate": 0.1}},
        "rollout": {"group_size": 8, "threads": 1, "sampling": {"max_tokens": 3}},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
        "eval": {"data": {}},
        "logging": {"sinks": ["jsonl"]},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tables[section][name] = value
    return tables


@pytest.mark.parametrize("placement", ["inline", "local"])
def test_the_bandit_learns(tmp_path, placement):
    result = run(recipe(tmp_path, run__placement=placement))
    assert result.steps == 30
    assert result.evaluations[0]["eval/reward_mean"] < 0.5
    assert result.evaluations[30]["eval/reward_mean"] > 0.9
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(30))
    assert max(line["staleness_max"] for line in lines) <= 1
    assert result.samples["issued"] == sum(n for state, n in result.samples.items() if state != "issued")
