"""A process's device, and use of torch's global RNG by one thread at a time.

Placed inline, policy and engine are built in threads of one process, and initialise their weights from that RNG.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def own_device() -> torch.device:
    """Return this process's GPU, by its rank on the machine (LOCAL_RANK); the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


_TURN = threading.Lock()


@contextmanager
def forked_rng(*, seed: int = 0) -> Iterator[None]:
    """Seed torch's global RNG with `seed` inside, for one thread at a time; restore its state afterwards."""
    with _TURN, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
