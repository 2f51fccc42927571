"""The first hour on GPUs as tests, and its rehearsal without one: at tiny sizes, on a pretend GPU or on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_hour import ROOT, Hour, Skipped
from gpu_runs import seven, sums, tiny_robot, tiny_world_model
from gpu_software import read_software
from gpu_steps import STEPS, perform

from cosmos_rl_core.recipe.load import load_config

GPU = torch.device("cuda", 0)
HERE = Path(__file__).parent


software = cache(read_software)


def name_of(step):
    return step.title.replace(" ", "_")


@pytest.mark.gpu
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("step", STEPS, ids=name_of)
def test_on_gpus(step, tmp_path):
    if reason := step.missing(software()):
        pytest.skip(reason)
    hour = Hour(device=GPU, directory=tmp_path)
    try:
        perform(step, hour)
    except Skipped as skipped:
        pytest.skip(str(skipped))
    assert not hour.missed(), step.expects


@pytest.mark.cuda_dry
@pytest.mark.parametrize("step", [step for step in STEPS if not step.on_cpu], ids=name_of)
def test_a_rehearsal_on_a_pretend_gpu(step, tmp_path):
    hour = Hour(device=GPU, directory=tmp_path, rehearsal=True)
    perform(step, hour)
    assert not hour.missed()
    assert hour.numbers


@pytest.mark.ci
@pytest.mark.parametrize("step", [step for step in STEPS if step.on_cpu], ids=name_of)
def test_a_rehearsal_with_processes_on_the_cpu(step, tmp_path):
    if reason := step.missing(read_software(vllm=False), rehearsal=True):
        pytest.skip(reason)
    hour = Hour(device=GPU, directory=tmp_path, rehearsal=True)
    try:
        perform(step, hour)
    except Skipped as skipped:
        pytest.skip(str(skipped))
    assert not hour.missed()
    assert hour.numbers


def test_the_recipes_of_the_steps_are_valid(tmp_path):
    recipes = [tiny_world_model(tmp_path), tiny_robot(tmp_path)]
    recipes += [sums(tmp_path, algorithm=algorithm, steps=2) for algorithm in ("grpo", "sft")]
    recipes[-1]["data"]["response_column"] = "response"
    recipes.append(seven(tmp_path, str(tmp_path / "base"), train=recipes[-1]["data"]["path"]))
    for tables in recipes:
        load_config(tables)


def test_each_step_describes_its_failure():
    assert sorted(step.number for step in STEPS) == list(range(len(STEPS)))
    assert all("Expect" in step.expects and "Failing:" in step.expects for step in STEPS)


@pytest.mark.cuda_dry
def test_the_runner_writes_numbers_and_a_page(tmp_path):
    command = [sys.executable, str(HERE / "first_hour.py"), "--rehearse", "--steps", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "gpu.json").read_text())
    assert (result["step"], result["outcome"]) == (0, "passed"), result
    assert {number["metric"] for number in result["numbers"]} >= {"GPUs", "bfloat16 matrix products"}
    assert "| 0 machine | passed |" in (tmp_path / "gpu.md").read_text()


def test_the_runner_skips_with_the_reason_where_there_is_no_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, str(HERE / "first_hour.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert [result["outcome"] for result in results] == ["skipped"] * len(STEPS)
    assert [result["step"] for result in results] == [step.number for step in STEPS]
    (eight,) = [result for result in results if result["step"] == 7]
    assert "needs 8 GPUs" in eight["reason"] or "without CUDA" in eight["reason"]


@pytest.mark.parametrize(("gpu", "skips"), [(True, True), (False, False)])
def test_tests_of_the_pretend_gpu_are_skipped_beside_a_real_one(monkeypatch, pytestconfig, gpu, skips):
    hooks = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    monkeypatch.setattr(hooks, "real_gpu", lambda: gpu)
    marked = SimpleNamespace(get_closest_marker=lambda name: name == "cuda_dry" or None)
    with pytest.raises(pytest.skip.Exception) if skips else nullcontext():
        hooks.pytest_runtest_setup(marked)
    hooks.pytest_runtest_setup(SimpleNamespace(get_closest_marker=lambda name: None))
