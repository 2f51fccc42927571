"""The log of choices that depend on the hardware: a line for each, once a process."""

from __future__ import annotations

import os
import sys
from functools import cache


@cache
def log_choice(text: str) -> None:
    """Write a choice that depends on the hardware, such as "float8: emulated", to rank 0's log, once a process."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)  # noqa: T201  a worker's stderr is its log
