"""A simulator with injected faults, for tests of the code that runs simulators."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import SimObservation, SimulatorError, Stepped
from cosmos_rl_vla.sims.reach import Reach

FAULTS = ("exit", "hang", "nan_reward", "nan_state", "raise", "diverge")


class Faulty:
    """Reach, with faults in some episodes; see Simulator."""

    def __init__(
        self,
        *,
        faults: Mapping[str, str] | None = None,
        when: str = "step",
        at_start: str = "",
        once: str = "",
        max_steps: int = 40,
    ) -> None:
        """`faults` by the `init` of their episode happen in its second step, or with `when` = "reset" in its reset.

        `at_start` happens here ("user": a UserError). With `once`, a path, only the first of all faults
        happens: it leaves a file there.
        """
        self._faults = {int(init): fault for init, fault in (faults or {}).items()}
        self._when, self._once = when, Path(once) if once else None
        self._reach = Reach(max_steps=max_steps)
        self.spec = self._reach.spec
        self._fault, self._steps, self._blind = "", 0, False
        if at_start == "user":
            raise UserError("the simulator needs another machine")
        self._fail(at_start)

    def instruction(self, task: str) -> str:
        """See Simulator."""
        return self._reach.instruction(task)

    def reset(self, task: str, init: int) -> None:
        """See Simulator."""
        self._fault, self._steps, self._blind = self._faults.get(init, ""), 0, False
        self._reach.reset(task, init)
        if self._when == "reset":
            self._fail(self._fault)

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """See Simulator."""
        self._steps += 1
        stepped = self._reach.step(action)
        if self._when == "step" and self._steps == 2 and self._fail(self._fault):
            return Stepped(reward=float("nan"), terminated=False, truncated=False, success=False)
        return stepped

    def observe(self) -> SimObservation:
        """See Simulator."""
        seen = self._reach.observe()
        return SimObservation(images=seen.images, state=seen.state * np.float32("nan")) if self._blind else seen

    def close(self) -> None:
        """See Simulator."""
        self._reach.close()

    def _fail(self, fault: str) -> bool:
        """Perform the fault. Returns whether the reward is to be NaN."""
        if not fault or (self._once is not None and self._once.exists()):
            return False
        if self._once is not None:
            self._once.touch()
        print(f"about to {fault}", flush=True)  # the last words, which an error shows
        if fault == "exit":
            os._exit(3)
        if fault == "hang":
            threading.Event().wait()
        if fault == "raise":
            raise RuntimeError("the simulator is out of order")
        if fault == "diverge":
            raise SimulatorError("the physics diverged")
        self._blind = fault == "nan_state"
        return fault == "nan_reward"
