"""A process's device, a log of what depends on it, and use of torch's global RNG by one thread at a time.

Placed inline, policy and engine are built in threads of one process, and initialise their weights from that RNG.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def own_device() -> torch.device:
    """Return this process's GPU, by its rank on the machine (LOCAL_RANK); the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def use_device(device: torch.device | None = None) -> torch.device:
    """Make a GPU (default: `own_device`) the current one of this thread; each thread starts with GPU 0."""
    device = own_device() if device is None else device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@cache
def log_choice(text: str) -> None:
    """Write a choice that depends on the hardware, such as "float8: emulated", to rank 0's log, once a process."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)  # noqa: T201  a worker's stderr is its log


_TURN = threading.Lock()


@contextmanager
def forked_rng(*, seed: int = 0) -> Iterator[None]:
    """Seed torch's global RNG with `seed` inside, for one thread at a time; restore its state afterwards."""
    with _TURN, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
