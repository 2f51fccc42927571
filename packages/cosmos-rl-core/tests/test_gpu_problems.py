"""What is said of GPUs that torch cannot use, that other processes fill, or that are of different kinds."""

import pytest
import torch

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpus import Nvml
from cosmos_rl_core.launch.gpus import assign_gpus
from cosmos_rl_core.launch.preflight.gpus import gpu_problems
from cosmos_rl_core.parallel.device import chosen_device, own_device, require_gpus, torch_problem
from cosmos_rl_core.recipe.load import load_config
from doubles.fake_nvml import H100, FakeNvml

GPUS = {"GPU-a": (), "GPU-b": (), "GPU-c": ()}
L40 = "NVIDIA L40S"


@pytest.fixture
def cuda(monkeypatch):
    """A torch for CUDA 13.0, which finds a usable GPU or not."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return lambda usable: monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)


def nvml(**machine):
    return Nvml.open(FakeNvml(GPUS, **machine))


def recipe(tmp_path, *, ranks=1, rollouts=1, **run):
    return load_config({
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "max_steps": 1, "output_dir": str(tmp_path), **run},
        "model": {},
        "data": {},
        "policy": {"parallel": {"dp_shard": ranks}},
        "rollout": {"engine": "tiny", "replicas": rollouts},
        "reward": {"functions": [{"name": "hits"}]},
        "sync": {"backend": "cosmos_rl_core.testing.file_sync:FileSync"},
    })  # fmt: skip


def test_a_driver_older_than_the_wheels_is_named_with_both_versions(cuda):
    cuda(usable=False)
    with pytest.raises(UserError) as refused:
        require_gpus({}, nvml=nvml(driver="535.104.05", cuda=12020))
    text = str(refused.value)
    assert "built for CUDA 13.0, and the driver 535.104.05 runs CUDA 12.2 at most" in text
    assert "install a driver for CUDA 13.0" in text and "torch for CUDA 12.2" in text


def test_a_driver_runs_newer_minor_versions_of_its_cuda(cuda):
    cuda(usable=False)
    observed, _ = torch_problem(["GPU-a"], nvml(cuda=13000)) or ("", "")
    assert "says: " in observed and "driver" not in observed.split("says: ")[0]


def test_a_list_of_gpus_that_are_not_here_is_named(cuda):
    cuda(usable=False)
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES names 5, and this machine has GPU-a,GPU-b,GPU-c"):
        require_gpus({"CUDA_VISIBLE_DEVICES": "5"}, nvml=nvml())


def test_gpus_that_torch_uses_and_an_empty_list_are_fine(cuda, monkeypatch):
    cuda(usable=True)
    require_gpus({}, nvml=nvml())
    cuda(usable=False)
    require_gpus({"CUDA_VISIBLE_DEVICES": ""}, nvml=nvml())
    require_gpus({}, nvml=Nvml(None))


def test_inside_a_choice_of_the_cpu_no_gpu_is_used(cuda, monkeypatch):
    cuda(usable=True)
    machine = Nvml(FakeNvml(GPUS))
    monkeypatch.setattr(Nvml, "open", lambda: machine)
    assert own_device().type == "cuda"
    with chosen_device("cpu"):
        assert own_device().type == "cpu"
    with chosen_device("auto"):
        assert own_device().type == "cuda"


def test_gpus_of_two_kinds_in_one_worker_are_an_error_with_a_list_to_set(cuda, tmp_path):
    cuda(usable=True)
    names = {"GPU-a": L40}
    (problem,) = gpu_problems(recipe(tmp_path, ranks=2), nvml=nvml(names=names))
    assert problem.wrong == f"policy-0 would have GPUs of different kinds: 1 x {L40}, 1 x {H100}"
    assert "CUDA_VISIBLE_DEVICES=GPU-b,GPU-c,GPU-a" in problem.suggestion and not problem.is_note
    assert not list(gpu_problems(recipe(tmp_path, rollouts=2), nvml=nvml(names=names))), "each worker has one kind"


def test_a_card_that_another_process_fills_is_an_error_unless_the_run_shares_or_continues(cuda, tmp_path):
    cuda(usable=True)
    machine = nvml(used={"GPU-b": 79})
    (problem,) = gpu_problems(recipe(tmp_path), nvml=machine)
    assert problem.wrong == f"GPU-b ({H100}) has 1.0 of 80.0 GiB free: other processes fill it"
    assert "set CUDA_VISIBLE_DEVICES=GPU-a,GPU-c" in problem.suggestion and not problem.is_note
    assert not list(gpu_problems(recipe(tmp_path, share_gpus=True), nvml=machine))
    assert not list(gpu_problems(recipe(tmp_path), nvml=nvml(used={"GPU-c": 79}))), "nobody needs the third one"
    (tmp_path / "resolved.toml").touch()
    (note,) = gpu_problems(recipe(tmp_path), nvml=machine)
    assert note.is_note, "workers of the run before may be ending"


def test_gpus_that_a_run_does_not_use_are_a_note(cuda, tmp_path, monkeypatch):
    (note,) = gpu_problems(recipe(tmp_path, device="cpu"), nvml=nvml())
    assert (note.wrong, note.is_note) == ('the run uses the CPU: [run] device = "cpu" (GPU-a,GPU-b,GPU-c)', True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (note,) = gpu_problems(recipe(tmp_path), nvml=nvml())
    assert "CUDA_VISIBLE_DEVICES names none of them" in note.wrong
    assert not list(gpu_problems(recipe(tmp_path), nvml=Nvml(None)))


def test_ranks_on_slices_of_a_gpu_are_refused(tmp_path):
    slices = ["MIG-1", "MIG-2", "MIG-3"]
    with pytest.raises(UserError, match=r"MIG-1,MIG-2,MIG-3 are slices of a GPU \(MIG\)"):
        assign_gpus(recipe(tmp_path, ranks=2), 2, gpus=slices)
    assert str(assign_gpus(recipe(tmp_path, rollouts=2), 1, gpus=slices)) == (
        "policy-0 on MIG-1, rollout-0 on MIG-2, rollout-1 on MIG-3"
    )
