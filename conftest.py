"""For all tests: the server that ranks are forked from imports the models too, once; the longest come first."""

import pytest

from cosmos_rl_core.testing import ranks


def pytest_configure() -> None:
    models = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt_oss")
    ranks.preload(*(f"transformers.models.{name}.modeling_{name}" for name in models))
    ranks.preload("cosmos_rl_llm.policy", "peft", "torch._dynamo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the recipes, the longest tests: none of them is left for one worker alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_cookbook.py")
