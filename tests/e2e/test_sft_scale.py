"""Supervised fine-tuning beyond one pass in one process: held-out loss, epochs, resuming, several ranks."""

import pytest
from safetensors.numpy import load_file

from cosmos_rl_core import run

pytestmark = pytest.mark.ci


@pytest.fixture
def supervised(bandit):
    """The bandit's recipe without what only reinforcement learning has."""

    def recipe(directory, **changes):
        tables = bandit(directory, algorithm__name="sft", run__placement="inline", **changes)
        del tables["rollout"], tables["reward"]
        return tables

    return recipe


def test_the_loss_on_held_out_rows_falls_and_is_written(tmp_path, supervised, rows_of):
    changes = {"run__max_steps": 25, "eval__every_steps": 10, "policy__prompts_per_step": 10}
    result = run(supervised(tmp_path / "run", **changes, eval__data={"rows": 7}))
    lines = rows_of(tmp_path / "run" / "eval.jsonl")
    assert [line["policy_version"] for line in lines] == [0, 10, 20, 25]
    losses = [line["eval/loss"] for line in lines]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 1.4  # of five actions, nearly equally likely
    assert losses[-1] < 0.5
    assert {line["eval/rows"] for line in lines} == {7}
    assert result.evaluations[25]["eval/perplexity"] < result.evaluations[0]["eval/perplexity"]


def test_a_run_over_epochs_that_was_stopped_goes_on_to_the_same_bits(tmp_path, supervised, rows_of):
    """Three passes over 10 rows, 4 a step: the stop lies in the first epoch, and batches reach into the next."""
    changes = {"prompts__epochs": 3, "policy__prompts_per_step": 4, "eval__every_steps": 2, "eval__data": {"rows": 3}}
    whole = supervised(tmp_path / "whole", **changes)
    stopped = supervised(tmp_path / "stopped", **changes, checkpoint__every_steps=1)
    for tables in (whole, stopped):
        del tables["run"]["max_steps"]
    run(whole)
    run(stopped, ["run.max_steps=2"])
    result = run(stopped, resume="auto")
    assert result.steps == 7
    for name in ("metrics.jsonl", "eval.jsonl"):
        metrics = [
            [(line["step"], line.get("loss"), line.get("eval/loss")) for line in rows_of(tmp_path / part / name)]
            for part in ("whole", "stopped")
        ]
        assert metrics[0] == metrics[1]
    weights = [
        load_file(tmp_path / part / "checkpoints" / "step_7" / "policy" / "model.safetensors")
        for part in ("whole", "stopped")
    ]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_two_ranks_measure_and_train_what_one_does(tmp_path, supervised, rows_of):
    changes = {"run__max_steps": 3, "policy__prompts_per_step": 7, "eval__data": {"rows": 5}}
    run(supervised(tmp_path / "one", **changes))
    both = supervised(tmp_path / "two", **changes, policy__parallel__dp_shard=2)
    both["run"]["placement"] = "local"
    run(both)
    for name, key in (("metrics.jsonl", "loss"), ("eval.jsonl", "eval/loss")):
        one, two = ([line[key] for line in rows_of(tmp_path / part / name)] for part in ("one", "two"))
        assert two == pytest.approx(one, abs=1e-5)
