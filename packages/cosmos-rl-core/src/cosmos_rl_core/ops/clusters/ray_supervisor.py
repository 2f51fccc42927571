"""The actor that supervises one process of a run on a machine of Ray. It needs no launcher: it ends by itself.

worker's actor        its process has left, or fails too often -> the actor is removed, then its placement group
controller's actor    its process has ended: the run has -> the other actors are removed, the exit code is written

Ray starts an actor again elsewhere when its machine is lost. Ray moves no data of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from cosmos_rl_core.ops.clusters.launcher import CONTROLLER
from cosmos_rl_core.supervisor import ProcessSpec, ProcessSupervisor
from cosmos_rl_core.wire.advertised import ADVERTISE

LEAVING = "LEAVING"
"""Begins the state of an actor whose process ends, and which will be gone."""
CALLS = 64
"""Maximum concurrent calls of an actor; each other machine of a replica may hold one."""
CHECK_S = 0.2
ANSWER_S = 10.0
SAVE_S, FAILED_S = 600.0, 60.0
"""Maximum seconds until the workers have left: after the end of the run, and after an error."""


class RunEnded(msgspec.Struct, frozen=True):
    """The content of `<run>/launch/ended.json`: the end of the run."""

    code: int
    """The controller's exit code."""

    @staticmethod
    def path(folder: Path) -> Path:
        return folder / "ended.json"


class RayPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a job in the run."""

    label: str
    """The run's: the names of its actors begin with it and a dot."""
    folder: str
    """`launch` in the run's directory."""
    group: str = ""
    """Name of its placement group."""
    machine: int = 0
    machines: int = 1
    """Index and number of the machines of its replica."""
    after: tuple[str, ...] = ()
    """Jobs that have a machine before this one starts."""
    advertises: bool = False
    """Whether the process advertises the address that Ray has for its machine."""


class ReplicaAddress:
    """The address at which the machines of a replica meet: another one for each start of the replica."""

    def __init__(self, restart: Callable[[], None]) -> None:
        """restart: ends the replica's part of this machine, which then calls `open` again."""
        self._restart = restart
        self._address = ""
        self._machines: set[int] = set()
        self._changed = threading.Condition()

    def open(self, address: str) -> None:
        """Begin a start of the replica."""
        with self._changed:
            self._address = address
            self._machines.clear()
            self._changed.notify_all()

    def address(self, machine: int) -> str:
        """Return the address for a machine, which asks again when its part of the replica has ended.

        Waits for the next start then, as a replica without one of its parts has failed.
        """
        with self._changed:
            if machine in self._machines:
                self._address = ""
                self._machines.clear()
                self._restart()
            self._changed.wait_for(lambda: self._address)
            self._machines.add(machine)
            return self._address


class RaySupervisor:
    """Supervises a process; made an actor by `clusters.ray`."""

    def __init__(self, spec: ProcessSpec, place: RayPlace) -> None:
        import ray

        self._place = place
        self._ip: str = ray.util.get_node_ip_address()
        self._moved = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        advertised = {ADVERTISE: self._ip} if place.advertises and ADVERTISE not in os.environ else {}
        self._spec = structs.replace(spec, variables=advertised, first=() if self._moved else spec.first)
        self._processes = ProcessSupervisor()
        self._meeting = ReplicaAddress(self.restart)
        self._loop = asyncio.new_event_loop()
        self._begun = threading.Event()
        """Set when the supervisor knows the process, and so requests to end it."""
        threading.Thread(target=self._supervise, name="supervise", daemon=True).start()

    def __repr__(self) -> str:
        return self._spec.name

    def state(self) -> str:
        """Return the machine's address and the number of restarts, for `cosmos-rl status`."""
        restarts = self._processes.starts(self._spec.name) - 1
        if self._processes.is_last(self._spec.name):
            return f"{LEAVING} on {self._ip}"
        return f"RUNNING on {self._ip}" + (f", restarts: {restarts}" if restarts > 0 else "")

    def meeting(self, machine: int) -> str:
        """Return the address at which the machines of the replica meet; called on the actor of machine 0."""
        return self._meeting.address(machine)

    def restart(self) -> None:
        """End the process; it is started again."""
        self._call(partial(self._processes.kill, restart=True))

    def last(self) -> None:
        """Do not start the process again."""
        self._call(self._processes.end_restarts)

    def end(self) -> None:
        """Ask the process to save and leave."""
        self._call(self._processes.terminate)

    def remove(self, name: str, group: str) -> None:
        """Remove a worker's actor, then its placement group; called on the controller's actor, which is in no group.

        The other way round Ray may see the actor's process die with the group, and restart the actor, which would wait
        for a place in the group forever.
        """
        with contextlib.suppress(ValueError):  # it has ended
            _kill(_actor(self._place.label, name))
        remove_groups(self._place.label, group)

    def _call(self, request: Callable[[], None]) -> None:
        """Pass a request on to the thread of the process."""
        self._begun.wait()
        self._loop.call_soon_threadsafe(request)

    def _supervise(self) -> None:
        try:
            self._run()
        finally:
            with contextlib.suppress(ValueError):  # it has been removed with its placement group
                _kill(_actor(self._place.label, self._spec.name))

    def _run(self) -> None:
        place, others = self._place, [f"{self._replica}.{index}" for index in range(1, self._place.machines)]
        if self._moved and place.machine == 0:
            for name in others:  # their processes may wait for the lost machine
                with contextlib.suppress(ValueError):  # it has ended
                    _actor(place.label, name).restart.remote()
        code = self._loop.run_until_complete(self._processes.keep(self._spec, arguments=self._arguments))
        if self._spec.name == CONTROLLER:
            self._end_run(code)
        elif place.group and place.machine == 0:
            _until(lambda: not actors(place.label).keys() & set(others), timeout_s=SAVE_S)
            self._ask_for_removal()

    async def _arguments(self) -> Sequence[str]:
        """Return the arguments of a start, the first one when the other jobs have machines."""
        if not self._begun.is_set():
            self._begun.set()
            if not self._moved:
                await asyncio.to_thread(self._wait_for_places)
        return await asyncio.to_thread(self._rendezvous)

    def _ask_for_removal(self) -> None:
        import ray
        from ray.exceptions import RayActorError

        with contextlib.suppress(RayActorError, ValueError):  # at the end of the run the controller removes all groups
            controller = _actor(self._place.label, CONTROLLER)
            ray.get(controller.remove.remote(self._spec.name, self._place.group))

    def _wait_for_places(self) -> None:
        """Wait until the other jobs have machines; the launcher removes this one if they do not get any."""
        import ray
        from ray.exceptions import RayActorError

        for name in self._place.after:
            with contextlib.suppress(RayActorError, ValueError):  # it has ended
                ray.get(_actor(self._place.label, name).state.remote())

    @property
    def _replica(self) -> str:
        return self._spec.name.partition(".")[0]

    def _rendezvous(self) -> list[str]:
        """Return the arguments with which the machines of the replica meet, other ones for each start."""
        place = self._place
        if place.machines == 1:
            return []
        if place.machine == 0:
            address = f"{self._ip}:{_free_port(self._ip)}"
            self._meeting.open(address)
        else:
            address = self._ask_first_machine()
        return ["--node", str(place.machine), "--rendezvous", address]

    def _ask_first_machine(self) -> str:
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        while True:
            try:
                first = _actor(self._place.label, f"{self._replica}.0")
                return ray.get(first.meeting.remote(self._place.machine))
            except (ActorUnavailableError, ActorDiedError, ValueError):
                time.sleep(1.0)  # Ray starts it again on another machine

    def _end_run(self, code: int) -> None:
        """Wait until the other actors have ended, remove those that stay, write the exit code."""
        import ray

        is_saved, label = code in (0, 3, 130), self._place.label
        workers = {name: actor for name, actor in actors(label).items() if name != CONTROLLER}
        called = [(actor.last if is_saved else actor.end).remote() for actor in workers.values()]
        _, silent = ray.wait(called, num_returns=len(called), timeout=ANSWER_S) if called else ([], [])
        for actor, call in zip(workers.values(), called, strict=True):
            if call in silent:
                _kill(actor)  # it has no machine yet, or has lost it
        _until(lambda: actors(label).keys() <= {CONTROLLER}, timeout_s=SAVE_S if is_saved else FAILED_S)
        for name, actor in actors(label).items():
            if name != CONTROLLER:
                _kill(actor)
        remove_groups(label)
        partial = Path(self._place.folder) / ".ended.partial"
        partial.write_bytes(msgspec.json.encode(RunEnded(code)))
        partial.replace(RunEnded.path(Path(self._place.folder)))


def actors(label: str) -> Mapping[str, Any]:
    """Return the actors of a run by the names of their jobs, also those that wait for a machine."""
    import ray

    by_name = {}
    for name in ray.util.list_named_actors():
        if name.startswith(f"{label}."):
            with contextlib.suppress(ValueError):  # it has ended
                by_name[name.removeprefix(f"{label}.")] = ray.get_actor(name)
    return by_name


def is_there(label: str, name: str) -> bool:
    """Return whether a job of a run has an actor."""
    import ray

    return f"{label}.{name}" in ray.util.list_named_actors()


def remove_groups(label: str, only: str = "") -> None:
    """Remove the placement groups of a run, or one of them, with the actors in them."""
    import ray
    from ray.util.placement_group import placement_group_table, remove_placement_group

    for group in placement_group_table().values():
        name = group["name"]
        if group["state"] != "REMOVED" and name.startswith(f"{label}.") and only in ("", name):
            with contextlib.suppress(ValueError):  # it has been removed
                remove_placement_group(ray.util.get_placement_group(name))


def _actor(label: str, name: str) -> Any:
    """Return an actor of a run. Raises ValueError if it has ended."""
    import ray

    return ray.get_actor(f"{label}.{name}")


def _kill(actor: Any) -> None:
    import ray

    ray.kill(actor, no_restart=True)


def _until(condition: Callable[[], bool], *, timeout_s: float) -> None:
    """Return when the condition holds, or after the time."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(CHECK_S)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
