"""For all tests: what ranks are forked from imports models once, the longest go first, examples never vary."""

import pytest
from hypothesis import settings

from cosmos_rl_core.testing import ranks

settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("suite")


def pytest_configure() -> None:
    models = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt_oss")
    ranks.preload(*(f"transformers.models.{name}.modeling_{name}" for name in models))
    ranks.preload("cosmos_rl_llm.policy.policy", "peft", "torch._dynamo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the recipes, the longest tests: none of them is left for one worker alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_cookbook.py")
