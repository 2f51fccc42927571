"""GPUs of a vLLM engine, by its options."""

import pytest

from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_llm.domain import LLM


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 4}, 4),
        ({"tensor_parallel_size": 2, "extra": {"pipeline_parallel_size": 2, "data_parallel_size": 2}}, 8),
    ],
)
def test_an_engine_has_one_gpu_per_worker_process(options, gpus):
    assert LLM.gpus_per_engine("vllm", options) == gpus


def test_the_torch_engine_has_one_gpu():
    assert LLM.gpus_per_engine("torch", {"max_sequences": 4}) == 1


def test_wrong_options_are_an_error_before_the_run():
    with pytest.raises(ConfigError, match="tensor_paralel_size"):
        LLM.gpus_per_engine("vllm", {"tensor_paralel_size": 2})


def test_a_shared_gpu_divides_the_memory_of_vllm_alone():
    shared = LLM.share_gpu("vllm", {"gpu_memory_utilization": 0.8, "max_sequences": 8}, processes=2)
    assert shared == {"gpu_memory_utilization": 0.4, "max_sequences": 8}
    assert LLM.share_gpu("vllm", {}, processes=3)["gpu_memory_utilization"] == pytest.approx(0.3)
    assert LLM.share_gpu("torch", {"max_sequences": 8}, processes=2) == {"max_sequences": 8}
