"""What a worker is given: its connection, and then its recipe."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.config.run import RunConfig
from cosmos_rl_core.control.client import ControllerClient
from cosmos_rl_core.control.wire import Connection
from cosmos_rl_core.interfaces import Domain
from cosmos_rl_core.observe.trace import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker process has before it knows its recipe."""

    name: str
    connection: Connection
    token: bytes
    timeline: Timeline
    threads: int | None
    """CPU threads of the tensor work; None leaves torch's own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What every role builds itself from."""

    context: WorkerContext
    config: RunConfig
    domain: Domain
    client: ControllerClient
    compute: ThreadPoolExecutor
    """One thread for all tensor work."""
    run_dir: Path
    resume_from: Path | None

    def prepare_torch(self) -> None:
        """Fix threads and seed; called in the compute thread before anything is built."""
        import torch

        if self.context.threads is not None:
            torch.set_num_threads(self.context.threads)
        torch.manual_seed(self.config.run.seed)
