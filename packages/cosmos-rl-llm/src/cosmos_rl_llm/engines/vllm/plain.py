"""Live weights on CPU. vLLM imports this module through `plugin`.

After loading, vLLM packs the matrices of linear layers for its CPU kernels and frees the originals, into which new
weights would be written. These methods skip the packing and multiply with the plain matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from cosmos_rl_llm.engines.vllm.options import PLAIN_WEIGHTS


class PlainLinear(UnquantizedLinearMethod):
    """A linear layer whose weight stays as it was loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Multiply with the weight itself."""
        layer.cpu_linear = F.linear  # what vLLM's unquantised product calls on CPU


class PlainEmbedding(UnquantizedEmbeddingMethod):
    """An embedding, or an output layer, whose weight stays as it was loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Multiply with the weight itself."""
        layer.cpu_linear = F.linear


class PlainWeights(QuantizationConfig):
    """The quantization method of an engine that receives weights on CPU: neither quantised nor packed."""

    def get_name(self) -> Any:
        return PLAIN_WEIGHTS

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlainWeights:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer; None leaves it to vLLM, experts among them."""
        if isinstance(layer, LinearBase):
            return PlainLinear()
        return PlainEmbedding() if isinstance(layer, VocabParallelEmbedding) else None
