"""The random state that a process has one of, and modules draw their first values from: lent to threads in turns.

Inline, policy and engine are built side by side, in threads. Without turns each would get some of the other's draws.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TURN = threading.Lock()


@contextmanager
def lent_random_state(*, seed: int = 0) -> Iterator[None]:
    """Draw from the global state, begun at `seed`, inside; outside it is as it was."""
    with _TURN, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
