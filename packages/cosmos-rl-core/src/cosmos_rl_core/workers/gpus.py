"""Which GPUs of this machine each worker sees. No torch: the controller starts the workers.

The ranks of the policy come first, one GPU each, then the rollout replicas; where there are fewer GPUs than processes
the count begins again, so that on one GPU all roles share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import VISIBLE_GPUS


def machine_gpus(environment: Mapping[str, str], *, devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; none on a machine without."""
    if VISIBLE_GPUS in environment:
        return [name.strip() for name in environment[VISIBLE_GPUS].split(",") if name.strip()]
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return sorted((number for number in numbers if number.isdecimal()), key=int)


def allot(gpus: Sequence[str], wanted: Sequence[int]) -> list[list[str]]:
    """Give each worker as many GPUs as it has processes, in turn; empty lists where there are none.

    Raises UserError where one worker wants more than there are: ranks that share a GPU cannot talk by nccl.
    """
    if not gpus:
        return [[] for _ in wanted]
    if (most := max(wanted)) > len(gpus):
        raise UserError(
            f"a replica wants {most} GPUs of this machine, one a rank, and sees {len(gpus)} ({', '.join(gpus)}); lower "
            f"[policy] ranks_per_node or [policy.parallel], or set {VISIBLE_GPUS} to nothing to train on the CPU"
        )
    supply = cycle(gpus)
    return [list(islice(supply, number)) for number in wanted]
