"""Assignment of this machine's GPUs to workers. No torch: the controller starts the workers.

The ranks of the policy come first, one GPU each, then the rollout replicas. With fewer GPUs than processes the
assignment wraps around, so that all roles share a single GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import VISIBLE_GPUS


def machine_gpus(environment: Mapping[str, str], *, devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs visible to this process, as in CUDA_VISIBLE_DEVICES; empty on a machine without GPUs."""
    if VISIBLE_GPUS in environment:
        return [name.strip() for name in environment[VISIBLE_GPUS].split(",") if name.strip()]
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return sorted((number for number in numbers if number.isdecimal()), key=int)


def allot(gpus: Sequence[str], wanted: Sequence[int]) -> list[list[str]]:
    """Return the GPUs of each worker, one per process, round-robin; empty lists without GPUs.

    Raises UserError if one worker needs more GPUs than there are: nccl does not allow ranks to share a GPU.
    """
    if not gpus:
        return [[] for _ in wanted]
    if (most := max(wanted)) > len(gpus):
        raise UserError(
            f"a replica needs {most} GPUs of this machine, one per rank, but sees {len(gpus)} ({', '.join(gpus)}); "
            f"lower [policy] ranks_per_node or [policy.parallel], or set {VISIBLE_GPUS} to nothing to train on the CPU"
        )
    supply = cycle(gpus)
    return [list(islice(supply, number)) for number in wanted]
