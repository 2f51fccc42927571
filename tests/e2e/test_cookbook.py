"""What the cookbook promises: each example runs as its README says, and something is learned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rl_core import Request, evaluate
from cosmos_rl_core.observe.metrics import metric
from cosmos_rl_llm.sandbox.sandbox import checks

COOKBOOK = Path(__file__).parents[2] / "cookbook"
pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]  # seconds each on an idle core; the machine may be a busy one


def python(script, *arguments):
    """Run a script of the cookbook as a user does, on one thread; return what it printed."""
    command = [sys.executable, str(COOKBOOK / script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def before_and_after(run_dir, *, metric="eval/reward_mean"):
    """A metric on the held-out rows before the first step and after the last."""
    evaluations = lines(run_dir / "eval.jsonl")
    return evaluations[0][metric], evaluations[-1][metric]


def all_are_described(*run_dirs):
    """Whether docs/metrics.md has every metric of these runs."""
    written = [line for run_dir in run_dirs for line in lines(run_dir / "metrics.jsonl")]
    written += [
        line for run_dir in run_dirs if (run_dir / "eval.jsonl").exists() for line in lines(run_dir / "eval.jsonl")
    ]
    return {name for line in written for name in line if metric(name) is None} == set()


def test_one_file_grpo():
    printed = python("one_file_grpo.py", "--quick")
    found = re.search(r"held-out sums: ([\d.]+) -> ([\d.]+)", printed)
    assert found, printed
    assert float(found[2]) > float(found[1]) + 0.1


def test_notebook(tmp_path):
    python("notebook_grpo.py", tmp_path)
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert metrics[-1]["reward/closeness"] > metrics[0]["reward/closeness"] + 0.1
    assert (tmp_path / "run/reward.png").read_bytes().startswith(b"\x89PNG")


def test_custom_reward(tmp_path):
    python("custom_reward/recipe.py", "--dir", tmp_path, "run.max_steps=30", "run.placement=inline")
    before, after = before_and_after(tmp_path / "grpo")
    assert after > before + 0.5
    last = lines(tmp_path / "grpo/metrics.jsonl")[-1]
    assert {"reward/only_digits", "reward/Closeness", "reward/finished"} <= last.keys()
    assert last["reward_mean"] == pytest.approx(0.5 * last["reward/only_digits"] + last["reward/Closeness"])


def test_custom_algorithm(tmp_path):
    python("custom_algorithm/recipe.py", "--dir", tmp_path, "run.placement=inline")
    before, after = before_and_after(tmp_path / "rl")
    assert after > before + 0.15
    assert all(line["weight_mean"] <= 1.5 for line in lines(tmp_path / "rl/metrics.jsonl"))


def test_llm_quickstart_shortened(tmp_path):
    """Its two runs, cut to seconds; so early nearly nothing is exact, so within a tenth counts here."""
    reward = ["reward.functions.0.name=numeric", "reward.functions.0.options.tolerance=0.1"]
    short = ["run.max_steps=40", "policy.prompts_per_step=16", "eval.every_steps=0"]
    python("llm_quickstart/recipe.py", "--dir", tmp_path, "--warm-up-steps", 40, *short, *reward)
    losses = [line["loss"] for line in lines(tmp_path / "sft/metrics.jsonl")]
    assert losses[-1] < 0.7 * losses[0]
    before, after = before_and_after(tmp_path / "grpo")
    assert after > before + 0.1
    assert all_are_described(tmp_path / "sft", tmp_path / "grpo")


def test_agent_code_shortened(tmp_path):
    """A warm-up and a few steps: the programs run in the sandbox, and some of them pass tests."""
    if not_protected := [line for line in checks() if line.level == "note" and line.name != "sandbox: mounts"]:
        pytest.skip(f"the sandbox lacks layers here: {not_protected}")
    short = ["run.max_steps=6", "run.placement=inline", "eval.limit=16", "policy.prompts_per_step=4"]
    python("agent_code/recipe.py", "--dir", tmp_path, "--warm-up-steps", 40, *short)
    metrics = lines(tmp_path / "grpo/metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(6))
    assert 0 < sum(line["reward/code"] for line in metrics) < 6
    assert lines(tmp_path / "grpo/eval.jsonl")[-1]["eval/failed"] == 0
    assert all_are_described(tmp_path / "sft", tmp_path / "grpo")


@pytest.mark.parametrize("seed", range(3))
def test_agent_guess_game(seed, tmp_path):
    """The whole recipe, in one process: the greedy model wins, whatever the secret is."""
    python("agent_guess_game/recipe.py", "--dir", tmp_path, "--seed", seed, "run.placement=inline")
    before, after = before_and_after(tmp_path / "run")
    assert before < 0.5 and after >= 0.95
    assert all_are_described(tmp_path / "run")
    measured = evaluate(
        tmp_path / "run/resolved.toml",
        request=Request(checkpoint=str(tmp_path / "run")),
        python_path=[str(COOKBOOK / "agent_guess_game")],
    )
    assert measured.metrics["reward/environment"].mean == after


def test_agent_calculator_shortened(tmp_path):
    """A third of its steps: the model calls the calculator, and without it multiplies nothing."""
    python("agent_calculator/recipe.py", "--dir", tmp_path, "run.max_steps=20")
    before, after = before_and_after(tmp_path / "with_tool")
    assert before < after > 0.8
    assert before_and_after(tmp_path / "without_tool")[1] < 0.2
    calls = [line["environment/calls"] for line in lines(tmp_path / "with_tool/metrics.jsonl")]
    assert calls[-1] > calls[0]
    assert all_are_described(tmp_path / "with_tool", tmp_path / "without_tool")


def test_a_stop_in_the_warm_up_ends_the_script(tmp_path, wait_for, rows_of, finished):
    command = [sys.executable, str(COOKBOOK / "llm_quickstart/recipe.py"), "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        wait_for(lambda: rows_of(tmp_path / "sft/metrics.jsonl"), "the first step of the warm-up")
        process.terminate()
        finished(process, 130)
    assert not (tmp_path / "grpo").exists()


@pytest.mark.slow
def test_llm_distill_shortened(tmp_path):
    """Too short to learn: every run trains, and the table has a line for each."""
    printed = python("llm_distill/recipe.py", "--dir", tmp_path, "--short", "run.placement=inline")
    assert len(re.findall(r"^.{40} +[\d.]+ +\d+ s$", printed, re.MULTILINE)) == 7
    names = ("reverse_KL_over_the_vocabulary", "advantage_of_sampled_tokens")
    assert all("teacher_kl" in line for name in names for line in lines(tmp_path / name / "metrics.jsonl"))


@pytest.mark.slow
def test_elastic_llm(tmp_path):
    printed = python("elastic_llm/recipe.py", "--dir", tmp_path, "policy.prompts_per_step=8")
    assert printed.count("was killed; two steps were done within") == 3
    assert "the controller was killed and started again; two steps were done within" in printed
    assert "ready: 1 policy, 1 rollout" in printed
    found = re.search(r"(\d+) steps, of (\d+) samples; (\d+) different ones", printed)
    assert found, printed
    assert int(found[2]) == int(found[3]) == 8 * int(found[1])


def test_sft_on_chats(tmp_path):
    python("llm_sft_chat/recipe.py", "--dir", tmp_path, "run.max_steps=60", "run.placement=inline")
    before, after = before_and_after(tmp_path / "sft", metric="eval/loss")
    assert before > 2.5
    assert after < 1.2
    assert {line["rows_dropped"] for line in lines(tmp_path / "sft/metrics.jsonl")} == {0.0}
    assert all_are_described(tmp_path / "sft")


@pytest.mark.slow
def test_sft_on_chats_with_pictures(tmp_path):
    python("vlm_sft_chat/recipe.py", "--dir", tmp_path, "--chats", 600, "run.max_steps=20", "run.placement=inline")
    before, after = before_and_after(tmp_path / "sft", metric="eval/loss")
    assert before > 2.5
    assert after < 1.2
    assert {line["rows_dropped"] for line in lines(tmp_path / "sft/metrics.jsonl")} == {0.0}


def test_vla_quickstart_shortened(tmp_path):
    """All its ways in seconds: so few steps teach it nothing, but the loss falls and every metric is there."""
    short = ["--sft-steps", 40, "--rl-steps", 2, "--episodes", 6, "--inits", 3]
    python("vla_quickstart/recipe.py", "--dir", tmp_path / "run", *short)
    losses = [line["loss"] for line in lines(tmp_path / "run/sft/metrics.jsonl")]
    assert losses[-1] < losses[0]
    trained = lines(tmp_path / "run/ppo/metrics.jsonl")
    assert [line["step"] for line in trained] == [0, 1]
    assert abs(trained[0]["ratio_mean"] - 1) < 1e-3
    assert all_are_described(tmp_path / "run/sft", tmp_path / "run/ppo")
    for evaluated in ("before", "after"):
        metrics = json.loads((tmp_path / "run" / evaluated / "eval.json").read_text())["metrics"]
        assert metrics["reward/success perturb=grey_images"]["count"] == 6


@pytest.mark.slow
def test_vlm_quickstart_shortened(tmp_path):
    """All its ways; so few steps teach it nothing, but the losses fall and every metric is there."""
    short = ["--sft-steps", 25, "--rl-steps", 6, "--boards", 400, "--held-out", 12]
    printed = python("vlm_quickstart/recipe.py", "--dir", tmp_path / "run", *short)
    evaluated = [line["eval/loss"] for line in lines(tmp_path / "run/sft/eval.jsonl")]
    assert len(evaluated) == 6
    assert evaluated[-1] < 0.5 * evaluated[0]
    assert "on from step_25" in printed
    assert [line["step"] for line in lines(tmp_path / "run/grpo/metrics.jsonl")] == list(range(6))
    for folder in ("before", "after"):
        metrics = json.loads((tmp_path / "run" / folder / "eval.json").read_text())["metrics"]
        for asked in ("as it is", "with a grey picture", "with another question"):
            assert metrics[f"reward/exact asked={asked}"]["count"] == 12


@pytest.mark.xdist_group("vllm")
def test_llm_lora_vllm_shortened(tmp_path):
    """A short warm-up and three steps: vLLM answers with the adapters of each version, and gets nothing else."""
    pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")
    short = ["--warm-up-steps", 20, "run.max_steps=3", "policy.prompts_per_step=8", "eval.every_steps=0"]
    short += ["policy.schedule.warmup_steps=0"]
    python("llm_lora_vllm/recipe.py", "--dir", tmp_path, *short)
    metrics = lines(tmp_path / "grpo/metrics.jsonl")
    assert [line["mismatch_kl"] for line in metrics] == [pytest.approx(0.0, abs=1e-6)] * 3
    saved = tmp_path / "grpo/checkpoints/step_3/policy/adapter_model.safetensors"
    assert 0 < metrics[-1]["sync_bytes"] <= 1.05 * saved.stat().st_size
    assert all_are_described(tmp_path / "grpo")


def test_llm_reward_model(tmp_path):
    python("llm_reward_model/recipe.py", "--dir", tmp_path, "run.max_steps=20")
    assert before_and_after(tmp_path / "reward_model", metric="eval/reward_accuracy")[1] > 0.9
    before, after = before_and_after(tmp_path / "rl", metric="eval/reward/reward_model")
    assert after > before + 3
    assert before_and_after(tmp_path / "rl", metric="eval/reward/true_reward")[1] < after - 1
    assert any(line["action"] == "warn" for line in lines(tmp_path / "rl/monitor.jsonl"))
    assert all_are_described(tmp_path / "reward_model", tmp_path / "rl")
