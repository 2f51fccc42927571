"""For all tests: the server that forks ranks imports models once, the longest tests go first, and Hypothesis profiles.

The time of an example is not limited: it says more about the machine's load than about the code.
"""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from doubles import ranks

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", UNTIMED, derandomize=True)
settings.register_profile("search", UNTIMED, print_blob=True)
settings.load_profile("suite")


def pytest_configure() -> None:
    models = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt_oss", "qwen2_5_vl", "qwen3_vl")
    ranks.preload(*(f"transformers.models.{name}.modeling_{name}" for name in models))
    ranks.preload("cosmos_rl_llm.policy.policy", "peft", "torch._dynamo")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of the pretend GPU where torch sees a real one, whose kernels and memory it would use."""
    if item.get_closest_marker("cuda_dry") is not None and real_gpu():
        pytest.skip("this machine has a GPU: the pretend one is for machines without")


def real_gpu() -> bool:
    """Whether torch is built for GPUs and sees one."""
    import torch  # not before the options are parsed

    return torch.version.cuda is not None and torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the recipes, the longest tests: none of them is left for one worker alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_cookbook.py")


def pytest_collection_finish() -> None:
    """Leave modules and tests out of all later garbage collections, which took a third of the time of some tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensor work of this process on one thread, as in a worker with `threads = 1`."""
    import torch  # not before the options are parsed

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
