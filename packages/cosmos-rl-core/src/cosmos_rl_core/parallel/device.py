"""Where a process holds its tensors."""

from __future__ import annotations

import os

import torch


def own_device() -> torch.device:
    """Return this process's GPU, by its place among the ranks of the machine; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
