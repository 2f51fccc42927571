"""Inputs of a worker's construction: its identity and its recipe; locks and settings during construction."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.address_file import present_address
from cosmos_rl_core.domain_base import DomainBase
from cosmos_rl_core.imports import quiet_torchao
from cosmos_rl_core.observe.record import append_lines
from cosmos_rl_core.observe.startup import entering
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_core.workers.connection import LastingConnection
from cosmos_rl_core.workers.failure import Failure

if TYPE_CHECKING:
    from cosmos_rl_core.workers.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The part of a worker's context that exists before it receives the recipe."""

    name: str
    token: bytes
    tls: Tls | None = None
    """Certificate for connections to the controller; None: they are not encrypted."""
    timeline: Timeline
    threads: int | None
    """CPU threads for tensor work; None: torch decides."""
    controller: str = ""
    """Address of the run's controller when this worker started."""
    processes_per_gpu: int = 1
    """Processes of the run on this worker's GPU."""
    address: str = ""
    """This machine's address for others of the run; empty in the controller's process, which has [run] bind."""
    shares_process: bool = False
    """Whether other roles run in this process; then the global random state is not seeded."""
    ranks: Ranks | None = None
    """The ranks of its replica; None for a replica of one process."""
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Reward functions by label, passed by a program that runs everything in its own process."""
    build_lock: threading.Lock = field(default_factory=threading.Lock)
    """Locked while a role builds its parts; shared by the roles of one process. transformers and diffusers replace
    their modules during their import, and models are built under process-wide settings (default dtype, device, random
    state): two threads must not do either at the same time."""

    log_file: Path | None = None
    """Its log; None: standard error, which is the log of a process of its own."""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first SIGTERM: the worker finishes its work in progress and leaves."""
    saving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by SIGUSR1: the policy saves a checkpoint after the step in work."""

    def log(self, text: str) -> None:
        """Write a line with the time to the replica's log, from rank 0."""
        if not self.leads:
            return
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.replica}: {text}"
        if self.log_file is None:
            print(line, file=sys.stderr, flush=True)  # noqa: T201  a worker's stderr is its log
        else:
            append_lines(self.log_file, [line.encode()])

    def end_removed(self, reason: str) -> None:
        """End this process at once: the run has removed it, and it may hang in a collective."""
        if self.shares_process:
            return  # it ends with its connection
        print(f"{self.name}: {reason}", file=sys.stderr, flush=True)  # noqa: T201  a worker's stderr is its log
        if self.ranks is not None:
            Failure(message=reason, died=True).write(Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
        os._exit(1)

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0 of its replica, which writes the replica's files."""
        return self.ranks is None or self.ranks.rank == 0

    @property
    def replica(self) -> str:
        """Name of the replica; those of its other ranks end in their number."""
        return self.name if self.leads else self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Inputs of a role's construction."""

    context: WorkerContext
    config: RunConfig
    domain: DomainBase
    compute: ThreadPoolExecutor
    """One thread for all tensor work."""
    run_dir: Path
    shares_run_dir: bool
    """Whether `run_dir` is the run's directory; False: a directory of this machine, for logs and spools."""
    welcome: p.Welcome
    """The controller's first message: the state of the run when the worker joined."""
    connection: LastingConnection | None = None
    """To the controller, for the phases of the start; None in a rank that is connected through rank 0."""

    @property
    def last_step(self) -> int | None:
        """Version at which the run ends, if known."""
        return self.welcome.last_step or None

    @property
    def data_tls(self) -> Tls | None:
        """Certificate for weights and large groups; None: they are not encrypted."""
        return self.context.tls if self.config.tls.weights else None

    def present_controller(self) -> str:
        """Return the address of the run's controller, which may have been replaced since this worker started."""
        start = self.context.controller
        return present_address(self.run_dir, start=start) if self.shares_run_dir else start

    def own_gpu(self) -> str:
        """Return the identity of the GPU that this process has for itself; empty on a CPU, and if GPUs are shared."""
        from cosmos_rl_core.parallel.device import gpu_identity

        run = self.config.run
        return "" if run.share_gpus or run.colocate or self.context.shares_process else gpu_identity()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Context for building parts in the compute thread: exclusive in the process, and timed.

        Phases that are named inside are spans within its own.
        """
        context = self.context
        quiet_torchao()  # transformers and diffusers import it
        span = ExitStack()  # of the current phase

        def enter(name: str) -> None:
            span.close()
            span.enter_context(context.timeline.span(name))
            self.enter(name)

        with context.build_lock, context.timeline.span("build"), entering(enter):
            try:
                yield
            finally:
                span.close()  # without the error, whose place is the build

    def enter(self, name: str) -> None:
        """Begin a phase of the start: in the log and at the controller. From any thread."""
        self.context.log(name)
        if self.connection is not None:
            self.connection.post_from_thread(p.Phase(name))

    def prepare_torch(self) -> None:
        """Set GPU, precision, threads and seed. First call in the compute thread: the current GPU is per thread."""
        import torch

        from cosmos_rl_core.hardware_log import log_choice
        from cosmos_rl_core.parallel.device import use_device

        if use_device().type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = self.config.run.tf32
            torch.backends.cudnn.allow_tf32 = self.config.run.tf32  # convolutions, of autoencoders and pictures
            log_choice(f"float32 matrix products: {'TF32' if self.config.run.tf32 else 'exact'}")
        if self.context.threads is not None:
            torch.set_num_threads(self.context.threads)
        if not self.context.shares_process:
            torch.manual_seed(self.config.run.seed)
