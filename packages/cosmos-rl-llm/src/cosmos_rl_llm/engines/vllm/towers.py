"""Vision-language models of vLLM where torchvision is not installed: their files import it for their processors.

    registry of vLLM -> "cosmos_rl_llm.engines.vllm.towers:Qwen3VLForConditionalGeneration" -> the class of vLLM's file

Our requests have processed pictures (`media`), so that vLLM's processors never run. During the import of such a file
`torchvision` is an empty stand-in, each of whose names raises an error when it is used; afterwards it is gone. A
processor's answer to one question is replaced: the most tokens of a picture, which are those of the context.

With torchvision too, Qwen2-VL and Qwen2.5-VL number positions as transformers does: after a video vLLM counts on from
the largest along time, height and width, and transformers from the largest along height and width. The tower of Llava
gets the names of weights that transformers 5 writes, and stacked experts may come in its layout.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedConfig

MODELS: Mapping[str, tuple[str, str]] = {
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    "SmolVLMForConditionalGeneration": ("smolvlm", "SmolVLMForConditionalGeneration"),
    "InternVLForConditionalGeneration": ("interns1", "InternS1ForConditionalGeneration"),
    "LlavaForConditionalGeneration": ("llava", "LlavaForConditionalGeneration"),
}
"""Architecture -> file and class in vLLM."""

RENUMBERED = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
"""Architectures whose positions after a video are replaced."""
WITHOUT_LEVEL = ("LlavaForConditionalGeneration",)
"""Architectures whose tower in vLLM has a level of modules, `vision_model`, that transformers 5 has not."""
TRANSPOSED = ("Qwen3VLMoeForConditionalGeneration",)
"""Architectures whose stacked experts are [in, out] in published files and in vLLM, and [out, in] in transformers 5."""
_TOWER = re.compile(r"^(model\.)?vision_tower\.(vision_model\.)?")
_ABSENT = "torchvision"
_NAMES = (_ABSENT, *(f"{_ABSENT}.transforms{rest}" for rest in ("", ".functional", ".v2", ".v2.functional")))


def needed() -> bool:
    """Return whether vLLM's own classes cannot be imported."""
    return find_spec(_ABSENT) is None


def register() -> None:
    """Register the models with vLLM whose own class cannot be imported, or is changed."""
    from vllm import ModelRegistry

    for architecture in MODELS if needed() else (*RENUMBERED, *WITHOUT_LEVEL, *TRANSPOSED):
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")


def __getattr__(name: str) -> type:
    """Return the class of an architecture; vLLM asks for it when it loads a model."""
    if name not in MODELS:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return _model(name)


@cache
def _model(architecture: str) -> type:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    file, name = MODELS[architecture]
    with stand_in() if needed() else nullcontext():
        theirs = getattr(import_module(f"vllm.model_executor.models.{file}"), name)
    factory = theirs._processor_factory
    changed: dict[str, Any] = {}
    if architecture in RENUMBERED:
        changed["get_mrope_input_positions"] = _positions
    if architecture in WITHOUT_LEVEL:
        mapper = theirs.hf_to_vllm_mapper
        level = {_TOWER: "vision_tower.vision_model."}
        changed["hf_to_vllm_mapper"] = replace(mapper, orig_to_new_regex={**mapper.orig_to_new_regex, **level})

    def info(ctx: Any) -> Any:
        processing_info = factory.info(ctx)
        if needed():
            processing_info.get_mm_max_tokens_per_item = _whole_context
        return processing_info

    if architecture in TRANSPOSED:
        changed["load_weights"] = lambda self, weights: theirs.load_weights(
            self, as_published(weights, self.config.get_text_config())
        )
    own = type(name, (theirs,), {"__module__": __name__, **changed})
    return MULTIMODAL_REGISTRY.register_processor(factory.processor, info=info, dummy_inputs=factory.dummy_inputs)(own)


def as_published(
    weights: Iterable[tuple[str, torch.Tensor]], config: PreTrainedConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights with stacked experts as [experts, in, out], whichever way they come: by their sizes.

    Raises ValueError for a model in whose sizes the two ways do not differ.
    """
    hidden, width = config.hidden_size, config.moe_intermediate_size
    for name, tensor in weights:
        ways = {"gate_up_proj": (hidden, 2 * width), "down_proj": (width, hidden)}
        way = ways.get(name.rpartition(".experts.")[2]) if tensor.ndim == 3 else None
        if way is not None and way[0] == way[1]:
            raise ValueError(f"{name} of {list(tensor.shape)}: [in, out] and [out, in] have equal sizes")
        yield name, tensor.transpose(1, 2) if way is not None and tuple(tensor.shape[1:]) == way[::-1] else tensor


def _positions(self: Any, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
    """Replaces a model's `get_mrope_input_positions`: return [3, L], and what later tokens' indices are shifted by."""
    blocks, at, start = [], 0, 0
    for first, time, height, width, spacing in self.iter_mm_grid_thw(mm_features):
        block = np.indices((time, height, width)).reshape(3, -1)
        block[0] = (block[0] * spacing).astype(np.int64)
        blocks.append(np.broadcast_to(np.arange(start, start + first - at), (3, first - at)))
        start += first - at
        blocks.append(start + block)
        at, start = first + block.shape[1], start + max(height, width)
    rest = len(input_tokens) - at
    blocks.append(np.broadcast_to(np.arange(start, start + rest), (3, rest)))
    return torch.from_numpy(np.concatenate(blocks, axis=1)), start + rest - len(input_tokens)


def _whole_context(seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
    return dict.fromkeys(mm_counts, seq_len)


class _StandIn(ModuleType):
    """A module without contents."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__name__}.{name} is needed, and torchvision is not installed")


@contextmanager
def stand_in() -> Iterator[None]:
    """Let `import torchvision` succeed within the context, with modules that have no contents."""
    from transformers.utils import is_torchvision_available

    assert not is_torchvision_available()  # it remembers its answer, and so does not take the stand-in for the package
    modules = {name: _StandIn(name) for name in _NAMES}
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
