"""What a worker builds itself from: its identity, its recipe, and the conditions under which it builds."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.interfaces import Domain
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.recipe.run import RunConfig

if TYPE_CHECKING:
    from cosmos_rl_core.workers.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker process has before it knows its recipe."""

    name: str
    token: bytes
    timeline: Timeline
    threads: int | None
    """CPU threads of the tensor work; None leaves torch's own choice."""
    address: str = ""
    """Of this machine, as others of the run reach it; empty on the controller's, where [run] bind is."""
    shares_process: bool = False
    """Whether other roles live in this process, whose random state is then nobody's to set."""
    ranks: Ranks | None = None
    """Those of its replica; None where the replica is one process."""
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Functions by label that a program gave, in the process of its run."""
    build_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a role builds its parts; the roles of one process share it. transformers and diffusers replace their
    own modules while they are imported, and models are built under settings of the whole process (default dtype,
    device, random state): two threads must not do either at once."""

    @property
    def leads(self) -> bool:
        """Whether this process speaks for its replica: it writes the files that there is one of."""
        return self.ranks is None or self.ranks.rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What every role builds itself from."""

    context: WorkerContext
    config: RunConfig
    domain: Domain
    compute: ThreadPoolExecutor
    """One thread for all tensor work."""
    run_dir: Path
    resume_from: str
    """Folder or URL of the checkpoint to load; empty for a fresh start."""
    last_step: int | None
    """Version the run ends with, where it is known."""
    kept: tuple[str, ...]
    """Files of an earlier process of this replica that its spool has to keep."""

    @contextmanager
    def building(self) -> Iterator[None]:
        """Build parts inside, in the compute thread: alone in this process, timed, without garbage collection."""
        context = self.context
        with context.build_lock, context.timeline.span("build"), collector_paused():
            yield

    def prepare_torch(self) -> None:
        """Fix GPU, threads and seed; called in the compute thread, the GPU being each thread's own, before all else."""
        import torch

        from cosmos_rl_core.parallel.device import own_device

        if (device := own_device()).type == "cuda":
            torch.cuda.set_device(device)
        if self.context.threads is not None:
            torch.set_num_threads(self.context.threads)
        if not self.context.shares_process:
            torch.manual_seed(self.config.run.seed)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage inside. What was made counts as old afterwards, and is looked through with the old."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # to the oldest generation: the youngest, looked through first, would hold all of it
        if running:
            gc.enable()
