"""Which GPUs of this machine each worker sees. No torch: the controller starts the workers.

The ranks of the policy come first, one GPU each, then the rollout replicas; where there are fewer GPUs than processes
the count begins again, so that on one GPU all roles share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def machine_gpus(environment: Mapping[str, str], *, devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; none on a machine without."""
    if VISIBLE in environment:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return sorted((number for number in numbers if number.isdecimal()), key=int)


def allot(gpus: Sequence[str], wanted: Sequence[int]) -> list[list[str]]:
    """Give each worker as many GPUs as it has processes, in turn; empty lists where there are none."""
    if not gpus:
        return [[] for _ in wanted]
    supply = cycle(gpus)
    return [list(islice(supply, number)) for number in wanted]
