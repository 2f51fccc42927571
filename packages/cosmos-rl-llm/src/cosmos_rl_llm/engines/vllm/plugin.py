"""The plug-in that vLLM loads in each of its processes, through the entry point `vllm.general_plugins`.

It registers a weight transfer engine and a quantization method that keeps weights unpacked on CPU; only our engine
selects them. A process that our engine started is ended with the engine's process: vLLM's processes outlive a killed
parent, with all their memory.
"""

from __future__ import annotations

import os

from cosmos_rl_core.processes import end_after
from cosmos_rl_llm.engines.vllm import towers
from cosmos_rl_llm.engines.vllm.options import PLAIN_WEIGHTS

WEIGHT_BACKEND = "cosmos_rl_transfer"
"""Name of the weight transfer engine."""
REFUSED = "new weights cannot reach this model in vLLM: "
"""Prefix of the line with a worker's reason, which the engine's process finds in vLLM's error."""
ADAPTER_ID = 1
"""vLLM's number of the policy's adapter."""
OWNER = "COSMOS_RL_VLLM_OWNER"
"""Environment variable with the id of the process that started vLLM, set for its children alone."""


def register() -> None:
    """Register both names with vLLM and watch the owner process; vLLM calls this once a process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.layers.quantization import register_quantization_config

    from cosmos_rl_llm.engines.vllm.plain import PlainWeights

    register_quantization_config(PLAIN_WEIGHTS)(PlainWeights)
    WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, "cosmos_rl_llm.engines.vllm.weights", "TransferWeights")
    owner = int(os.environ.get(OWNER, "0"))
    if owner:
        towers.register()
    if owner not in (0, os.getpid()):
        end_after(owner)
