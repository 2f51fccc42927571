"""Run a test's function in several ranks of a real gloo group on this machine.

    def losses(rank, world_size, *, tp):                # at the top level of the test's file
        ...
        return {"loss": loss.detach().numpy()}

    first, *others = run_ranks(losses, 4, tp=2)

Ranks are forked from a server that has imported torch once, so that a test of eight ranks starts in a second. A rank
that raises fails the test with its traceback; a rank that hangs is killed at the deadline.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

TIMEOUT_S = 120.0
_PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"]

Results = Mapping[str, np.ndarray | float | int]


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the message has the traceback or exit code of each."""


def preload(*modules: str) -> None:
    """Let the server import further modules; call it before the first `run_ranks` of a process, in conftest.py."""
    _PRELOADED.extend(modules)


def run_ranks(
    function: Callable[..., Results | None],
    num_ranks: int,
    *,
    timeout_s: float = TIMEOUT_S,
    **arguments: Any,
) -> list[dict[str, np.ndarray]]:
    """Call `function(rank, world_size, **arguments)` in `num_ranks` processes and return their results by rank.

    `function` is at the top level of a file; `arguments` are plain values. It is called after the default process
    group is initialised, with one thread per rank, and returns arrays or numbers.
    """
    file = inspect.getsourcefile(function)
    assert file is not None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        target = (file, function.__name__, num_ranks, folder, timeout_s, arguments)
        ranks = [context.Process(target=_run, args=(rank, *target), daemon=True) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        _join(ranks, deadline=monotonic() + timeout_s)
        _raise_failures(ranks, Path(folder))
        return [_load(Path(folder) / f"{rank}.npz") for rank in range(num_ranks)]


def largest_difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest absolute difference of two elements; inf where there is a NaN, which `max` passes over."""
    largest = float(np.abs(found - wanted).max(initial=0.0))
    return math.inf if math.isnan(largest) else largest


def _join(ranks: Sequence[BaseProcess], *, deadline: float) -> None:
    """Wait for all; after the first failure the others get a few seconds, for they wait for the dead one."""
    running = {process.sentinel: process for process in ranks}
    while running and (left := deadline - monotonic()) > 0:
        for sentinel in wait(list(running), timeout=left):
            process = running.pop(int(sentinel))  # type: ignore[arg-type]
            process.join()
            if process.exitcode != 0:
                deadline = min(deadline, monotonic() + 5.0)
    for process in running.values():
        process.kill()
        process.join()


def _raise_failures(ranks: Sequence[BaseProcess], folder: Path) -> None:
    failed = []
    for rank, process in enumerate(ranks):
        if process.exitcode != 0:
            error = folder / f"{rank}.txt"
            cause = error.read_text() if error.exists() else f"killed (exit code {process.exitcode}), maybe waiting"
            failed.append(f"rank {rank}: {cause}")
    if failed:
        raise RankFailed("\n".join(failed))


def _run(
    rank: int, file: str, name: str, num_ranks: int, folder: str, timeout_s: float, arguments: dict[str, Any]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s))
    try:
        metrics = _load_function(file, name)(rank, num_ranks, **arguments) or {}
        np.savez(f"{folder}/{rank}.npz", **{key: np.asarray(value) for key, value in metrics.items()})  # type: ignore[arg-type]
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(f"{folder}/{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # destroying the group may wait for other ranks


def _load_function(file: str, name: str) -> Callable[..., Any]:
    """The function out of a file that may not be importable by name, as tests are not."""
    spec = importlib.util.spec_from_file_location(f"_ranks_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as found:
        return {key: found[key] for key in found.files}
