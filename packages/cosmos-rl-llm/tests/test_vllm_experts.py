"""vLLM's kernel for experts: one whose weights stay as loaded, so that new ones are written in place."""

import json
from types import SimpleNamespace

import pytest

from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions
from cosmos_rl_llm.engines.vllm.start import engine_arguments


@pytest.mark.parametrize(
    ("config", "options", "on_gpu", "backend"),
    [
        ({}, {}, True, "triton"),
        ({}, {}, False, None),
        ({}, {"extra": {"moe_backend": "auto"}}, True, "auto"),
        ({}, {"quantization": "fp8"}, True, None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, {}, True, None),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, {}, True, None),
    ],
)
def test_experts_on_a_gpu_keep_the_layout_that_new_weights_are_written_in(tmp_path, config, options, on_gpu, backend):
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = VllmEngineOptions(**options)
    arguments = engine_arguments(str(tmp_path), options=options, dtype="bfloat16", max_length=None, on_gpu=on_gpu)
    assert arguments.get("moe_backend") == backend


class Blackwell:
    """vLLM's platform on a B200, as far as the choice of a kernel for experts reads it."""

    is_rocm = is_xpu = is_cpu = staticmethod(lambda: False)
    is_cuda = is_cuda_alike = staticmethod(lambda: True)
    is_device_capability_family = staticmethod(lambda family: family == 100)


@pytest.mark.xdist_group("vllm")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # vLLM's own
def test_vllm_would_rearrange_experts_on_blackwell_and_does_not_with_our_argument(monkeypatch):
    pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    from cosmos_rl_llm.engines.vllm.weight_map.landing import _KEPT_EXPERTS

    monkeypatch.setattr(unquantized, "current_platform", Blackwell)
    layer = SimpleNamespace(moe_parallel_config=SimpleNamespace(dp_size=1), activation=None)
    assert unquantized._get_priority_backends(layer)[0].name not in _KEPT_EXPERTS
    arguments = engine_arguments("model", options=VllmEngineOptions(), dtype="bfloat16", max_length=None, on_gpu=True)
    assert AsyncEngineArgs(**arguments).moe_backend == arguments["moe_backend"]
    assert unquantized.map_unquantized_backend(arguments["moe_backend"]).name in _KEPT_EXPERTS
