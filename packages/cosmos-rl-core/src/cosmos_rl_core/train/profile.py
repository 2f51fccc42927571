"""A window of torch's profiler over a policy's steps, as [logging.profile] asks for it.

    start ... wait_steps ... one step of warm-up ... steps -> profile/policy-0.json.gz

Perfetto and chrome://tracing read the file: operators, kernels and copies of each step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP_STEPS = 1
"""Steps that are recorded and thrown away: the first ones with the profiler are slow."""


class ProfileWindow:
    """Records operators of the thread that calls it, and kernels of the process.

    window.advance()    # before each step
    window.stop()       # after the last
    """

    def __init__(
        self,
        path: Path,
        *,
        wait_steps: int,
        steps: int,
        shapes: bool = False,
        memory: bool = False,
        stack: bool = False,
        modules: bool = False,
        log: Callable[[str], None],
    ) -> None:
        """The other arguments are keys of [logging.profile]. log: receives a line when the file is written."""
        self._path = path
        self._log = log
        self._left = wait_steps + WARM_UP_STEPS + steps
        self._runs = False
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *gpu],
            schedule=schedule(wait=wait_steps, warmup=WARM_UP_STEPS, active=steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=shapes,
            profile_memory=memory,
            with_stack=stack,
            with_modules=modules,
            acc_events=True,
        )

    def advance(self) -> None:
        """Begin the next step; after the window this does nothing."""
        if self._runs:
            self._left -= 1
            self._profiler.step() if self._left else self.stop()
        elif self._left:
            self._profiler.start()
            self._runs = True

    def stop(self) -> None:
        """End the window, or what the run had of it."""
        self._left = 0
        if self._runs:
            self._runs = False
            self._profiler.stop()

    def _write(self, profiler: profile) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        self._log(f"profile of steps in {self._path}")
