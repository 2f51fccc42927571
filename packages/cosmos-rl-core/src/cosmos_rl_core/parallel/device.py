"""Torch state that a process has one of: its device, and the random state that modules draw first values from.

Inline, policy and engine are built in threads of one process, which take turns at it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def own_device() -> torch.device:
    """Return this process's GPU, by its place among the ranks of the machine; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


_TURN = threading.Lock()


@contextmanager
def forked_rng(*, seed: int = 0) -> Iterator[None]:
    """Draw from the global state, begun at `seed`, inside; outside it is as it was."""
    with _TURN, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
