"""What the first hour performs: which versions end it, what a machine lacks, and what fits into the minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gpu_hour import visible_gpu
from gpu_software import Package, Software, Variable, ours, read_software, use_checkout
from gpu_steps import BY_NUMBER, STEPS

from cosmos_rl_core.gpus import Nvml
from doubles.fake_nvml import FakeNvml

HERE = Path(__file__).parent
sys.path.append(str(HERE))

from first_hour import Limit, page, performed_in_order  # noqa: E402  a script

H100 = Software(
    driver="580.159.04",
    driver_cuda=(13, 0),
    cards=("NVIDIA H100 80GB HBM3",),
    torch_cuda="13.0",
    torch_gpus=1,
    nccl="2.29.7",
    vllm_platform="cuda",
    packages={each.name: "9" for each in ours("llm", "vla", "wfm")}
    | {"torch": "2.13.0+cu130", "vllm": "0.32.0", "transformers": "5.19.0", "mujoco": "3.3.0"}
    | {"pytest": "9", "pytest-timeout": "2", "hypothesis": "6"},
)
"""A machine on which all steps of one GPU can be performed."""


def without(*names):
    return {name: version for name, version in H100.packages.items() if name not in names}


def test_the_versions_come_first():
    lines = H100.describe().splitlines()
    assert lines[:5] == [
        "driver: 580.159.04, runs CUDA 13.0",
        "GPUs: NVIDIA H100 80GB HBM3",
        "NCCL: 2.29.7",
        "torch: 2.13.0+cu130, CUDA 13.0, sees 1 GPUs",
        "vLLM: vllm 0.32.0, platform cuda",
    ]
    assert page([], H100).index("NCCL: 2.29.7") < page([], H100).index("| step |")


@pytest.mark.parametrize(
    ("machine", "variables", "texts"),
    [
        (FakeNvml(None), {}, ()),  # no GPU: each step is skipped
        (FakeNvml({"GPU-a": ()}), {}, ("is built for the CPU", "the installed vLLM is the build for the CPU")),
        (FakeNvml({"GPU-a": ()}), {"CUDA_VISIBLE_DEVICES": ""}, ("`unset CUDA_VISIBLE_DEVICES`",)),
        (FakeNvml(None), {"ROCR_VISIBLE_DEVICES": "0"}, ("AMD's GPUs are not supported",)),
    ],
)
def test_versions_that_cannot_work_together(machine, variables, texts):
    if torch.version.cuda or not find_spec("vllm"):
        pytest.skip("for the torch and the vLLM of a machine without a GPU")
    software = read_software(variables, nvml=Nvml.open(machine))
    assert len(software.problems) == len(texts)
    for problem, text in zip(software.problems, texts, strict=True):
        assert text in problem
    if machine.nvmlSystemGetDriverVersion() and software.cards:
        assert software.describe().startswith("driver: 580.65.06, runs CUDA 13.1\nGPUs: NVIDIA H100 80GB HBM3\n")


def test_the_runner_ends_with_the_remedy_before_any_step(tmp_path):
    """A driver that offers a GPU, beside the torch of these tests, which sees none."""
    if torch.version.cuda:
        pytest.skip("for a torch without CUDA")
    stand_in = HERE.parent / "shared/pretend_gpus"
    path = os.pathsep.join(filter(None, [str(stand_in), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PRETEND_GPUS": "GPU-a"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, str(HERE / "first_hour.py"), "--steps", "2", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "\nGPUs: NVIDIA H100 80GB HBM3\n" in done.stdout
    assert "is built for the CPU; `" in done.stdout and "pip install --force-reinstall torch==" in done.stdout
    assert "== 2" not in done.stdout and not (tmp_path / "out").exists()


def test_an_older_torch_and_no_vllm_skip_by_name():
    software = replace(H100, packages=without("vllm", "mujoco") | {"torch": "2.11.0+cu130"}, vllm_platform="")
    reasons = {step.number: reason for step in STEPS if (reason := step.missing(software))}
    varlen = "torch 2.11.0+cu130 lacks enable_gqa of torch.nn.attention.varlen.varlen_attn, which 2.12 has"
    assert reasons[3] == varlen
    assert reasons[4] == f"{varlen}; torch 2.11.0+cu130 lacks DeviceMesh.size(-1) of one dimension, which 2.13 has"
    assert reasons[18].startswith("torch 2.11.0+cu130 lacks torch._C._accelerator_getAllocatorSettings")
    assert reasons[5] == reasons[17] == reasons[20] == "vLLM is not installed"
    assert reasons[16] == "mujoco is not installed"
    assert not reasons.keys() & {0, 2, 8, 9, 10, 12, 19}


def test_a_machine_without_our_requirements_measures_itself():
    software = replace(H100, packages={"torch": "2.11.0+cu130"})
    assert [step.number for step in STEPS if not step.missing(software)] == [0]
    assert BY_NUMBER[8].missing(software).startswith("fsspec, msgspec, numpy, ")
    assert BY_NUMBER[8].missing(software).endswith(", numba, xxhash are not installed")


def test_what_is_no_package():
    software = replace(H100, torch_gpus=8)
    assert BY_NUMBER[7].missing(H100) == "needs 8 GPUs, and 1 are visible"
    assert BY_NUMBER[7].missing(software) == "COSMOS_RL_GPU_MODEL is not set to a folder with Qwen2.5-7B-Instruct"
    assert BY_NUMBER[11].missing(software).startswith("COSMOS_RL_GPU_SECOND_NODE is not set")
    variables = {"COSMOS_RL_GPU_MODEL": "/models/qwen", "COSMOS_RL_GPU_SECOND_NODE": "ssh node2"}
    assert not any(step.missing(replace(software, variables=variables)) for step in STEPS)
    assert not any(step.missing(Software(packages=without("vllm", "mujoco")), rehearsal=True) for step in STEPS[:13])


@pytest.mark.parametrize(
    ("need", "text"),
    [
        (Package("torch", "2.13", of="x"), ""),
        (Package("torch", "2.13.1", of="x"), "torch 2.13.0+cu130 lacks x, which 2.13.1 has"),
        (Package("torch", "2.9", of="x"), ""),
        (Package("absent"), "absent is not installed"),
        (Variable("X", "a folder"), "X is not set to a folder"),
    ],
)
def test_needs(need, text):
    assert H100.lacks(need) == text


@pytest.mark.parametrize(
    ("listed", "names"),
    [(None, ["0", "1"]), ("", ["0", "1"]), ("3,5", ["3", "5"]), ("GPU-b,GPU-a", ["GPU-b", "GPU-a"])],
)
def test_a_step_takes_its_gpus_from_those_that_it_was_given(listed, names):
    variables = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [visible_gpu(place, variables) for place in range(2)] == names


class Clock:
    """Seconds, which each step moves on by its minutes, times `pace`."""

    def __init__(self, pace=1.0):
        self.now, self.pace, self.limits = 0.0, pace, {}

    def __call__(self):
        return self.now

    def run(self, step, *, rehearse, timeout_s):
        self.limits[step.number] = timeout_s
        self.now += 60 * step.minutes * self.pace
        return {"outcome": "passed", "numbers": [], "notes": [], "seconds": 60.0 * step.minutes}


def hour_of(minutes, clock, software=H100):
    limit = Limit(minutes=minutes, clock=clock)
    return list(performed_in_order(STEPS, software, limit=limit, rehearse=False, run=clock.run))


def passed(results):
    return [result["step"] for result in results if result["outcome"] == "passed"]


def test_45_minutes_of_one_gpu_have_what_proves_most_and_name_what_is_cut():
    results = hour_of(45, Clock())
    assert passed(results) == [0, 3, 8, 4, 17, 5, 18, 2, 19, 12, 20, 9, 10, 16]
    reasons = {result["step"]: result["reason"] for result in results if result["outcome"] == "skipped"}
    assert reasons[1] == "no time left: it takes about 15 min, and 0.0 of 45 are left"
    assert reasons[6] == "needs 2 GPUs, and 1 are visible"


def test_steps_that_take_longer_cut_those_at_the_end():
    results = hour_of(45, clock := Clock(pace=1.5))
    assert passed(results) == [0, 3, 8, 4, 17, 5, 18, 2, 19]
    assert clock.limits[19] == pytest.approx(60 * 4.5)  # it may take what is left, and no more
    assert clock.limits[3] == BY_NUMBER[3].timeout_s


def test_without_minutes_nothing_is_cut():
    clock = Clock()
    assert passed(hour_of(None, clock)) == [step.number for step in STEPS if not step.missing(H100)]
    assert all(clock.limits[number] == BY_NUMBER[number].timeout_s for number in clock.limits)


def test_a_checkout_has_the_entry_points_of_an_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    use_checkout(tmp_path)
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path) and sys.path[-6] == str(tmp_path)
    assert os.environ["PYTHONPATH"].endswith("before")
    (made,) = metadata.distributions(path=[str(tmp_path)], name="cosmos-rl-llm")
    installed = metadata.distribution("cosmos-rl-llm")
    assert made.version == installed.version
    assert {(e.group, e.name, e.value) for e in made.entry_points} == {
        (e.group, e.name, e.value) for e in installed.entry_points
    }
