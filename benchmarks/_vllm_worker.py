"""The extension of a vLLM worker by transfer_vllm.py: loads whole tensors by the model's own `load_weights`."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open


class TakesWholeTensors:
    """vLLM mixes this into its worker (`worker_extension_cls`)."""

    model_runner: Any

    def take_whole_tensors(self, path: str) -> None:
        """Load the tensors gathered in a file in shared memory into the live model."""
        model = self.model_runner.get_model()
        with torch.no_grad(), safe_open(path, framework="pt") as gathered:
            model.load_weights((name, gathered.get_tensor(name)) for name in gathered.keys())  # noqa: SIM118
