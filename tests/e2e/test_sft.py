"""Supervised fine-tuning through the command: the loss falls, and the checkpoint is a model."""

import sys

import pytest

from cosmos_rl_core.cli.app import main


def test_the_bandit_learns_the_wanted_actions_in_a_process_of_its_own(tmp_path, bandit, write_recipe, start, rows_of):
    tables = bandit(tmp_path / "run", run__max_steps=60, algorithm__name="sft", policy__prompts_per_step=10)
    del tables["rollout"], tables["reward"]
    process = start("run", write_recipe(tmp_path / "run.toml", tables))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    losses = [line["loss"] for line in rows_of(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 60
    assert losses[0] > 1.0
    assert losses[-1] < 0.2
    assert (tmp_path / "run" / "checkpoints" / "step_60" / "policy" / "model.safetensors").exists()


@pytest.mark.usefixtures("one_thread")
def test_a_qwen_learns_the_answers(tmp_path, sums, write_recipe, rows_of, monkeypatch):
    from torch import float32

    from cosmos_rl_llm.model.causal_lm import load_model

    monkeypatch.setattr(sys, "path", list(sys.path))
    changes = {"run__placement": "inline", "run__max_steps": 40, "algorithm__name": "sft"}
    tables = sums(tmp_path / "run", **changes, policy__prompts_per_step=16, data__response_column="answer")
    del tables["rollout"], tables["reward"]
    main_until_done("run", str(write_recipe(tmp_path / "run.toml", tables)))
    losses = [line["loss"] for line in rows_of(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 40
    assert losses[0] > 2.0
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]
    trained = load_model(tmp_path / "run" / "checkpoints" / "step_40" / "policy", dtype=float32)
    assert trained.config.hidden_size == 32


def main_until_done(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code
