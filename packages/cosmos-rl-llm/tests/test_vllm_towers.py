"""The stand-in for torchvision while vLLM's files are imported, and the models that it is for."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from cosmos_rl_llm.engines.vllm import towers

pytest.importorskip("vllm", reason="the extra cosmos-rl-llm[vllm] is not installed")


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_torchvision_is_there_for_imports_alone():
    with towers.stand_in():
        from torchvision.transforms.v2 import functional

        with pytest.raises(AttributeError, match=r"torchvision\.transforms\.v2\.functional\.resize is needed, and"):
            functional.resize  # noqa: B018
        with pytest.raises(ImportError):
            import_module("torchvision.io")
    assert not any(name.startswith("torchvision") for name in sys.modules)
    assert find_spec("torchvision") is None


def test_the_files_and_classes_exist():
    root = Path(find_spec("vllm").origin).parent / "model_executor/models"
    registry = (root / "registry.py").read_text()
    for architecture, (file, name) in towers.MODELS.items():
        assert f"class {name}(" in (root / f"{file}.py").read_text()
        assert f'"{architecture}"' in registry


def test_another_name_is_refused():
    with pytest.raises(AttributeError, match="has no attribute Gemma"):
        towers.Gemma  # noqa: B018
