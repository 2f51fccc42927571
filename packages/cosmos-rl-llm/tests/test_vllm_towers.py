"""The stand-in for torchvision while vLLM's files are imported, and the models that it is for."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

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


def test_stacked_experts_are_turned_to_the_published_layout_whichever_way_they_come():
    config = AutoConfig.for_model("qwen3_vl_moe").get_text_config()
    config.hidden_size, config.moe_intermediate_size = 4, 3
    published = {"gate_up_proj": torch.rand(2, 4, 6), "down_proj": torch.rand(2, 3, 4)}
    given = [(f"layers.0.mlp.experts.{name}", tensor) for name, tensor in published.items()]
    turned = [(name, tensor.transpose(1, 2)) for name, tensor in given]
    beside = [("layers.0.mlp.gate.weight", torch.rand(6, 4)), ("lm_head.weight", torch.rand(3, 4))]
    for weights in (given, turned):
        for (name, found), (_, wanted) in zip(
            towers.as_published([*weights, *beside], config), [*given, *beside], strict=True
        ):
            assert torch.equal(found, wanted), name
    config.moe_intermediate_size = 2  # gate and up together are as wide as the model
    with pytest.raises(
        ValueError, match=r"experts.gate_up_proj of \[2, 4, 4\]: \[in, out\] and \[out, in\] have equal"
    ):
        [*towers.as_published([("layers.0.mlp.experts.gate_up_proj", torch.rand(2, 4, 4))], config)]
