"""An all-reduce of 1 MB between two processes of this machine, as ranks of a policy do it.

Run as a module this file is one of the processes: `collective RANK SIZE BACKEND FILE` prints the milliseconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from cosmos_rl_core.gpus import machine_gpus
from cosmos_rl_core.imports import PYTHON
from cosmos_rl_core.interfaces import Check

MODULE = "cosmos_rl_core.ops.doctor.collective"
LIMIT_S = 60.0
"""Of both processes, with the import of torch."""
JOIN_S = 20.0
NUMBERS = 262_144
"""float32: 1 MB."""
ROUNDS = 5


def all_reduce() -> Iterator[Check]:
    """Yield whether gloo works, and NCCL on a machine with GPUs."""
    yield measured("gloo", size=2)
    if gpus := machine_gpus(os.environ):
        yield measured("nccl", size=min(2, len(gpus)))


def measured(backend: str, *, size: int, limit_s: float = LIMIT_S) -> Check:
    """Run `size` processes and return the line of a backend."""
    with tempfile.TemporaryDirectory(prefix="cosmos-rl-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as ranks of one machine
        ranks = [
            subprocess.Popen(
                [*PYTHON, "-m", MODULE, str(rank), str(size), backend, str(Path(folder, "store"))],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        deadline = time.monotonic() + limit_s
        try:
            outputs = [rank.communicate(timeout=max(0.1, deadline - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            fix = f"{'NCCL_DEBUG=INFO' if backend == 'nccl' else 'GLOO_SOCKET_IFNAME=lo'}, then again"
            return Check("bad", f"{backend} all-reduce", f"{size} ranks did not finish in {limit_s:g} s", fix)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    return _line(backend, size, [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)])


def _line(backend: str, size: int, ended: list[tuple[int, str, str]]) -> Check:
    for rank, (code, _, errors) in enumerate(ended):
        if code:
            last = (errors.strip().splitlines() or [f"exit code {code}"])[-1]
            fix = "NCCL_DEBUG=INFO shows the reason" if backend == "nccl" else "the loopback interface must be up"
            return Check("bad", f"{backend} all-reduce", f"rank {rank} of {size}: {last}", fix)
    return Check("ok", f"{backend} all-reduce", f"1 MB between {size} ranks in {float(ended[0][1]):.1f} ms")


def main(rank: int, size: int, backend: str, store: str) -> None:
    """Join the group, check the sum, and print the milliseconds of the fastest round."""
    import torch
    import torch.distributed as dist

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    timeout, address = timedelta(seconds=JOIN_S), f"file://{store}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=timeout)
    seconds = []
    for _ in range(ROUNDS):
        value = torch.full((NUMBERS,), float(rank + 1), device=device)
        begun = time.perf_counter()
        dist.all_reduce(value)
        total = float(value.sum())  # waits for a GPU
        seconds.append(time.perf_counter() - begun)
        if total != NUMBERS * size * (size + 1) / 2:
            sys.exit(f"the sum is {total}: wrong")
    sys.stdout.write(f"{min(seconds) * 1e3}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
