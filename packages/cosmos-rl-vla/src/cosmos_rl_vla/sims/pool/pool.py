"""Slots of simulators in processes of their own: begins episodes, runs chunks, replaces hung or dead processes.

                     one driver thread
   start(slot) ------------+------------ submit(slots, actions)
                           v
process 0 [slots 0 .. n-1]   process 1 [slots n .. 2n-1]   ...   each with simulators of its own
                           |  observations: shared memory; all else: small messages over a socket pair
                           v
   wait() -> SlotReady(slot, result), Lost(slot, reason)
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core import plugins
from cosmos_rl_core.connected_process import ProcessDied
from cosmos_rl_core.errors import WorkerFailed
from cosmos_rl_core.processes import GRACE_S, unnamed_memory
from cosmos_rl_vla.config import SimulatorLimits
from cosmos_rl_vla.sims.base import GROUP, SimSpec
from cosmos_rl_vla.sims.pool.group import Lost, SimulatorProcess, SlotReady
from cosmos_rl_vla.sims.pool.messages import Make, ObservationMemory


class SimulatorPool:
    """`groups` processes of `slots_per_group` slots each; slot s is in group s // slots_per_group.

        with SimulatorPool("metaworld", options={"image_size": 64}, groups=2, slots_per_group=4) as pool:
            pool.start(0, task="faucet-open", init=7)
            for event in pool.wait():                                  # SlotReady or Lost
                pool.images["corner2"][event.slot], pool.states[event.slot]
                pool.submit([event.slot], actions)                     # [1, H, D]

    The caller decides whether to repeat a lost episode. Used by one thread.
    """

    def __init__(
        self,
        simulator: str,
        *,
        options: Mapping[str, Any] | None = None,
        groups: int = 1,
        slots_per_group: int = 1,
        python: str | None = None,
        limits: SimulatorLimits | None = None,
    ) -> None:
        """Start the processes, and return when all have built their simulators.

        `simulator` is the name of a plug-in in cosmos_rl.simulators, or "module:attribute". `python` is the
        interpreter of simulators that need other package versions. After `limits.max_faults` in a row without a
        successful chunk, a group fails. Raises UserError if the simulators cannot be built with these options, and
        WorkerFailed if their process fails.
        """
        where = plugins.locate(GROUP, simulator)  # in this process: another interpreter has no entry points of ours
        self._name = simulator
        self._slots_per_group = slots_per_group
        self._limits = limits or SimulatorLimits()
        self._events: list[SlotReady | Lost] = []
        self.restarts = 0
        """Number of processes replaced."""
        self._descriptor = unnamed_memory()
        self._groups: list[SimulatorProcess] = []
        try:
            for number in range(groups):
                self._groups.append(
                    SimulatorProcess(
                        number * slots_per_group,
                        make=Make(simulator=where, options=dict(options or {}), slots=slots_per_group),
                        limits=self._limits,
                        memory=self._descriptor,
                        python=python,
                    )
                )
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Wait for the SimSpec, and share memory of its size."""
        while None in (specs := [group.spec for group in self._groups]):
            self._collect(None)
        assert specs[0] is not None
        self.spec: SimSpec = specs[0]
        self.num_slots = len(self._groups) * self._slots_per_group
        memory = ObservationMemory(self._descriptor, self.spec, groups=len(self._groups), slots=self.num_slots)
        self.images: Mapping[str, NDArray[np.uint8]] = memory.images
        """[slots, H, W, 3] by camera: each slot's last observation; valid while the slot is not running."""
        self.states: NDArray[np.float32] = memory.states
        """[slots, state_dim]"""
        for group in self._groups:
            group.attach(memory, spec=self.spec, groups=len(self._groups))

    @property
    def process_ids(self) -> list[int]:
        """Return the current process id of each group."""
        return [group.process.process.pid for group in self._groups]

    def group_of(self, slot: int) -> int:
        """Return the index of a slot's group."""
        return slot // self._slots_per_group

    def start(self, slot: int, *, task: str, init: int) -> None:
        """Begin an episode in a slot that is not running."""
        self._groups[self.group_of(slot)].start(slot, task=task, init=init)

    def submit(self, slots: Sequence[int], actions: NDArray[np.float32]) -> None:
        """Execute a chunk of actions [len(slots), H, D], in units of the simulator, each in its slot.

        The slots of one group in one call reply together. Raises ValueError for actions that are not finite.
        """
        expected = (len(slots), self.spec.action_dim)
        if actions.ndim != 3 or (actions.shape[0], actions.shape[2]) != expected:
            raise ValueError(f"actions {actions.shape} for {expected[0]} slots of {expected[1]} action dimensions")
        bad = [slot for slot, chunk in zip(slots, actions) if not np.isfinite(chunk).all()]
        if bad:
            raise ValueError(f"the policy's actions are not finite for slots {bad}")
        actions = np.asarray(actions, np.float32)
        for number, rows in groupby(range(len(slots)), key=lambda row: self.group_of(slots[row])):
            chosen = list(rows)
            self._groups[number].run([slots[row] for row in chosen], actions[chosen])

    def wait(self, timeout_s: float | None = None, *, beside: Connection | None = None) -> list[SlotReady | Lost]:
        """Return the events since the last call; waits for the first event if a reply is due.

        Consumes replies to commands; produces one event for each slot that was started or submitted, and one Lost for
        each episode whose process failed; waits for the processes; unblocked by a reply, a failure, the timeout, or
        `beside` when it is readable.
        Raises WorkerFailed if a group has failed `max_faults` times in a row.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._collect(0.0)
        while not self._events and any(group.awaited for group in self._groups):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            if self._collect(left, beside=beside):
                break
        events, self._events = self._events, []
        return events

    def _collect(self, timeout_s: float | None, *, beside: Connection | None = None) -> bool:
        """Receive pending replies, waiting for the first one, and replace processes that hang or died.

        Returns whether `beside` ended the wait.
        """
        next_check_s = min(group.time_left_s() for group in self._groups)
        bounds = [max(0.0, bound) for bound in (timeout_s, next_check_s) if bound is not None and bound != math.inf]
        numbers = [group.connection.fileno() for group in self._groups]
        answered = set(wait_for([*numbers, *([] if beside is None else [beside])], min(bounds, default=None)))
        for group, number in zip(self._groups, numbers, strict=True):
            if number in answered:
                self._receive(group)
        for group in self._groups:
            if group.time_left_s() <= 0:
                self._replace(group, group.hung())
        return beside in answered

    def _receive(self, group: SimulatorProcess) -> None:
        try:
            self._events += group.receive()
        except ProcessDied as death:
            self._replace(group, death)
        else:
            self._check(group)

    def _replace(self, group: SimulatorProcess, death: ProcessDied) -> None:
        self._events += group.discard(death)
        self._check(group)
        group.spawn()
        self.restarts += 1

    def _check(self, group: SimulatorProcess) -> None:
        if group.faults > self._limits.max_faults:
            printed = f"; its last lines:\n{group.last_output}" if group.last_output else ""
            raise WorkerFailed(
                f"simulator {self._name!r} failed {group.faults} times in a row; the last: {group.fault}{printed}"
            )

    def close(self) -> None:
        """End the processes and their episodes; idempotent. Views of the arrays stay readable."""
        for group in self._groups:
            group.connection.close()  # they close their simulators and end
        for group in self._groups:
            group.process.close_blocking(grace_s=GRACE_S)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._groups, self._descriptor = [], -1

    def __enter__(self) -> SimulatorPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
