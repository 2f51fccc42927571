"""What vLLM loads from this package in each of its processes, through the entry point `vllm.general_plugins`.

It makes two names known there: a way to receive weights, and a way to keep them unpacked on CPU. Neither is used
unless an engine asks for it.
"""

from __future__ import annotations

WEIGHT_BACKEND = "cosmos_rl_transfer"
"""Name of the weight transfer engine."""
PLAIN_WEIGHTS = "cosmos_rl_plain"
"""Name of the quantization method that quantises nothing and keeps weights as they were loaded."""


def register() -> None:
    """Tell vLLM the two names; it calls this once a process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.layers.quantization import register_quantization_config

    from cosmos_rl_llm.engines.vllm_plain import PlainWeights

    register_quantization_config(PLAIN_WEIGHTS)(PlainWeights)
    WeightTransferEngineFactory.register_engine(
        WEIGHT_BACKEND, "cosmos_rl_llm.engines.vllm_weights", "TransferWeights"
    )
