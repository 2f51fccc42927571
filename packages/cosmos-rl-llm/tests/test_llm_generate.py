"""What `cosmos-rl generate` asks of the language-model domain: prompts as people write them, engines over GPUs."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_llm.config import LLMDataConfig
from cosmos_rl_llm.domain import LLM


def row(given, **keys):
    return LLM.prompt_row(LLMDataConfig(path="x.jsonl", **keys), given, where="rows:1", folder=Path())


def test_a_text_is_a_users_message_after_the_system_prompt():
    assert row("2 + 2?", system_prompt="Be brief.", prompt_template="{question}")["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
    ]
    assert row("2 + 2?", chat_template="none")["prompt"] == "2 + 2?"


def test_columns_are_those_of_the_data_and_no_answer_is_asked_for():
    found = row({"question": "2 + 2?", "id": 7}, prompt_column="question", answer_column="answer", chat_template="none")
    assert found == {"question": "2 + 2?", "id": 7, "prompt": "2 + 2?"}
    with pytest.raises(UserError, match=r"rows:1: .*question"):
        row({"text": "2 + 2?"}, prompt_column="question")


def test_vllm_is_spread_over_gpus():
    assert LLM.spread_engine("vllm", {"max_sequences": 8}, tp=4, pp=None) == {
        "max_sequences": 8,
        "tensor_parallel_size": 4,
    }
    stages = LLM.spread_engine("vllm", {"extra": {"kv_cache_dtype": "fp8"}}, tp=2, pp=3)
    assert stages["extra"] == {"kv_cache_dtype": "fp8", "pipeline_parallel_size": 3}
    assert LLM.gpus_per_engine("vllm", stages) == 6
    with pytest.raises(UserError, match="tensor_parallel_size = 2, which is another size; remove one"):
        LLM.spread_engine("vllm", {"tensor_parallel_size": 2}, tp=1, pp=None)
    with pytest.raises(UserError, match=r"extra.pipeline_parallel_size = 2, which is another size"):
        LLM.spread_engine("vllm", {"extra": {"pipeline_parallel_size": 2}}, tp=None, pp=4)
    with pytest.raises(ConfigError, match="extra"):
        LLM.spread_engine("vllm", {"extra": 3}, tp=None, pp=4)


def test_the_torch_engine_is_not():
    assert LLM.spread_engine("torch", {}, tp=1, pp=None) == {}
    with pytest.raises(UserError, match="runs the model on one GPU; set rollout"):
        LLM.spread_engine("torch", {}, tp=2, pp=None)
