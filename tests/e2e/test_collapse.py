"""Runs whose policy collapses do not end as a success does."""

import json

import pytest
import tomli_w

pytestmark = pytest.mark.ci


def recipe(bandit, tmp_path, **changes):
    path = tmp_path / "recipe.toml"
    changes = {"logging__sinks": ["jsonl", "console"], "policy__optimizer__learning_rate": 1e9, **changes}
    path.write_text(tomli_w.dumps(bandit(tmp_path / "run", **changes)))
    return path


def test_a_run_with_a_learning_rate_of_1e9_ends_with_alarms(bandit, tmp_path, start):
    process = start("run", recipe(bandit, tmp_path, run__max_steps=22))
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "bandit: done, with alarms" in printed + errors
    assert "entropy below 0.1 of start" in printed + errors


def test_a_run_that_the_monitor_stops_says_so_and_exits_with_3(bandit, tmp_path, start):
    rule = {"watch": "entropy", "below": 0.1, "action": "stop"}
    process = start("run", recipe(bandit, tmp_path, run__max_steps=500, monitor={"rules": [rule], "every_steps": 5}))
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 3, errors
    assert "bandit: stopped by the monitor" in printed + errors
    outcome = json.loads((tmp_path / "run/outcome.json").read_text())
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", 3)
    assert outcome["message"] and f"stopped  {' ' * 6}{outcome['message']}" in printed + errors
    assert outcome["resume"].endswith("--resume auto")
