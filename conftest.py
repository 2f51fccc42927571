"""For all tests: the server that ranks are forked from imports the models too, once."""

from cosmos_rl_core.testing import ranks


def pytest_configure() -> None:
    models = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt_oss")
    ranks.preload(*(f"transformers.models.{name}.modeling_{name}" for name in models))
    ranks.preload("cosmos_rl_llm.policy", "peft", "torch._dynamo")
