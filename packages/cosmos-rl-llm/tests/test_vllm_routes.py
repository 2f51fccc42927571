"""vLLM's own recording of experts, run on a CPU by Triton's interpreter: recorded, replayed, over switches."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from routed_rollouts import CONFIG

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.problems import engine_options
from cosmos_rl_core.types import Sampling
from cosmos_rl_llm.engines.vllm.choice import refusals
from cosmos_rl_llm.engines.vllm.engine import VllmSequence
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm.start import engine_arguments, start
from cosmos_rl_llm.model.causal_lm import make_model

SUPPORT = Path(__file__).parent / "support"
TRITON = Path(__file__).parents[3] / "tests/shared/pretend_triton"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")
    folder = tmp_path_factory.mktemp("routes")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (TRITON, SUPPORT))),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    command = [sys.executable, str(SUPPORT / "routed_rollouts.py"), str(folder), "float32", "0"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (folder / "rollouts.json").is_file(), process.stderr[-4000:]
    return json.loads((folder / "rollouts.json").read_text())


def with_vllm(test):
    for mark in (pytest.mark.slow, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(900)):
        test = mark(test)
    return test


def sequence_of(routes):
    sequence = VllmSequence(prompt_tokens=np.array([1, 2], np.int32), tokens=[3, 4], routes=routes)
    return sequence.routed()


def test_experts_are_those_of_the_inputs_and_of_a_type_that_is_sent():
    """Two tokens of the prompt and the first that was sampled were read; vLLM has sampled two more."""
    routes = np.arange(5 * 2 * 2).reshape(5, 2, 2)
    for theirs, ours in ((np.uint8, np.uint8), (np.uint16, np.int16)):
        sent = sequence_of(routes.astype(theirs))["routes"]
        assert sent.dtype == ours
        assert np.array_equal(sent, routes[:3])


@pytest.mark.parametrize(
    ("routes", "given"), [(None, "no experts"), (np.zeros((2, 2, 2), np.uint8), "experts of 2 tokens")]
)
def test_experts_that_are_missing_end_the_run(routes, given):
    with pytest.raises(UserError, match=f"record_routes: vLLM returned {given} for a rollout of 3"):
        sequence_of(routes)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"prefix_caching": False}, "prefix_caching = true"),
        ({"extra": {"pipeline_parallel_size": 2}}, "use tp instead of pp"),
    ],
)
def test_options_with_which_vllm_records_nothing_are_refused(options, wrong):
    with pytest.raises(UserError, match=wrong):
        engine_options(VllmEngineOptions, {"record_routes": True, **options})


@pytest.mark.parametrize(("experts", "given"), [({}, 1), ({"num_experts": 4}, 0)])
def test_a_dense_model_is_refused_before_the_start(tmp_path, experts, given):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **experts}))
    rollout = SimpleNamespace(sampling=Sampling(max_terms=1), options={"record_routes": True})
    config = SimpleNamespace(rollout=rollout, model=SimpleNamespace(max_length=None, lora=None))
    problems = [str(problem) for problem in refusals(config, tmp_path)]
    assert len(problems) == given
    assert all("record_routes = true: records the experts of a mixture" in problem for problem in problems)


def test_vllm_is_asked_to_record():
    keys = {"dtype": "float32", "max_length": None, "on_gpu": True}
    arguments = engine_arguments("nowhere", options=VllmEngineOptions(record_routes=True), **keys)
    assert arguments["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in engine_arguments("nowhere", options=VllmEngineOptions(), **keys)


@pytest.mark.ci
@pytest.mark.xdist_group("vllm")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # vLLM's own
def test_a_vllm_without_triton_is_an_error_of_the_key(tmp_path):
    pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        pytest.skip("this vLLM has Triton")
    make_model(CONFIG, dtype=torch.float32, seed=0).save_pretrained(tmp_path)
    options = VllmEngineOptions(record_routes=True, cache_bytes=1 << 24)
    with pytest.raises(UserError, match=r"rollout.options.record_routes: .*requires Model Runner V2"):
        start(str(tmp_path), options=options, dtype="float32", max_length=64)


@with_vllm
def test_every_input_of_a_rollout_has_the_experts_that_the_model_chooses(found):
    """Of the second group the shared beginning comes from the prefix cache."""
    [measured] = found["seeds"]
    assert measured["dtypes"] == ["uint8"]
    assert measured["shapes"] == [[length, 4, 2] for length in measured["lengths"]]
    assert min(measured["agreement"]) > 0.99
    assert measured["replayed"] < 1e-6


@with_vllm
def test_a_rollout_that_ends_at_a_stop_string_has_the_experts_of_its_own_tokens(found):
    assert any(reason == "stop" for _, _, reason in found["stopped"])
    assert all(length == routed for length, routed, _ in found["stopped"])


@with_vllm
@pytest.mark.parametrize("kind", ["switched", "recomputed"])
def test_over_a_switch_each_token_has_the_experts_of_the_weights_that_read_it(found, kind):
    for rollout in found[kind]:
        assert len(rollout["versions"]) == 2
        assert rollout["length"] == rollout["routed"]
        assert rollout["old"] > 0.99
        assert rollout["new"] > 0.99


@with_vllm
def test_episodes_are_refused_by_name(found):
    assert "rollout.options.record_routes: the experts of episodes are not recorded" in found["refused"]
