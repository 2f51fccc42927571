"""Ray: an actor for each process of a run, which starts the process, watches it and starts it again.

    controller, policy-0, policy-1.0, policy-1.1, rollout-0     actors, named LABEL.NAME, detached
    policy-0, policy-1                                          placement groups, named LABEL.NAME

The actors need no `cosmos-rl launch` that stays: Ray starts them again after the loss of a machine, and that of the
controller removes them at the end of the run. Ray reserves the GPUs, and moves none of the run's data.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import msgspec

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.ops.clusters.follow import follow
from cosmos_rl_core.ops.clusters.launcher import CONTROLLER, FOLDER, ClusterRun, Replica
from cosmos_rl_core.ops.clusters.ray_supervisor import (
    CALLS,
    LEAVING,
    RayPlace,
    RaySupervisor,
    RunEnded,
    actors,
    is_there,
    remove_groups,
)
from cosmos_rl_core.supervisor import ProcessSpec

SILENT_S = 10.0
"""Time after which a start prints what it waits for."""
ANSWER_S = 5.0
"""Maximum time for the answers of actors about their state."""
HEAD_S = 30.0
"""Time without an answer of Ray's head after which `cosmos-rl launch` ends."""
END_S = 30.0
"""Maximum time for the answer of an actor whose process shall end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayProcess:
    """One process of the run on one machine, with what Ray reserves for it."""

    spec: ProcessSpec
    place: RayPlace
    resources: Mapping[str, float]
    strategy: str
    """Of its placement group, or of its own without one."""

    @property
    def needs(self) -> str:
        """The resources in words."""
        amounts = _listed(self.resources) or "nothing"
        several = self.place.machines > 1
        return f"{amounts} on {f'each of {self.place.machines} machines' if several else 'one machine'}"


class Ray:
    """Implements `Launcher`, and stays until the end of the run."""

    def plan(self, run: ClusterRun) -> str:
        """Return each process with its resources and its command."""
        lines = [f"# Ray at {_address(run)}, namespace {run.config.cluster.ray.namespace}"]
        for process in processes_of_run(run):
            group = f"placement group {process.strategy}" if process.place.group else process.strategy
            lines += [f"{process.spec.name}: {process.needs} ({group})", f"  {_command(process.spec)}"]
        return "\n".join(lines)

    def start(self, run: ClusterRun) -> list[str]:
        """Create the actors, and wait until each has a place, for which the controller waits too."""
        connect(run)
        folder = run.directory / FOLDER
        RunEnded.path(folder).unlink(missing_ok=True)
        for log in folder.glob("*.log"):
            log.replace(log.with_suffix(".log.old"))
        try:
            return self._start(run, processes_of_run(run))
        except BaseException:  # Ctrl-C too
            self.stop(run, now=True)
            raise

    def alive(self, run: ClusterRun) -> Mapping[str, str]:
        """Return the state of each actor: "RUNNING on 10.0.0.1", or "PENDING" without a machine."""
        connect(run)
        return _states(actors(run.label), timeout_s=ANSWER_S)[0]

    def scale(self, run: ClusterRun, targets: Mapping[str, int]) -> list[str]:
        """Create actors of policies and rollouts, or end those with the highest numbers."""
        connect(run)
        by_name = actors(run.label)
        if CONTROLLER not in by_name:
            raise UserError(f"{run.directory}: the run has ended")
        states, _ = _states(by_name, timeout_s=ANSWER_S)
        taken = {replica_of(name) for name in states}
        leaving = {replica_of(name) for name, state in states.items() if state.startswith(LEAVING)}
        lines, new = [], []
        for role, count in targets.items():
            surplus, missing = run.rescaled(role, count, present=taken, leaving=leaving)
            for replica in surplus:
                for name, actor in by_name.items():
                    if replica_of(name) == replica:
                        _end(run, name, actor)
                lines.append(f"{replica}: leaves")
            new += missing
        return lines + self._start(run, processes(run, new))

    def stop(self, run: ClusterRun, *, now: bool) -> list[str]:
        """End the controller, which ends the others; now: remove all actors. Raises UserError if it does not answer."""
        import ray

        connect(run)
        by_name = actors(run.label)
        if not now and CONTROLLER in by_name:
            if not _answers(by_name[CONTROLLER].end):
                raise UserError(
                    f"the actor of the controller does not answer within {END_S:g} s: it has no machine, or has lost "
                    f"it, and nothing can be saved now; cosmos-rl stop {run.directory} --now removes all actors"
                )
            return [f"{CONTROLLER}: saves and ends the run"]
        for actor in by_name.values():
            ray.kill(actor, no_restart=True)
        remove_groups(run.label)
        return [f"{name}: removed" for name in by_name]

    def follow(self, run: ClusterRun) -> int:
        """Print the logs until the end of the run, and return the controller's exit code."""
        connect(run)
        stopped = follow(
            run,
            is_alive=_ControllerActor(run).is_there,
            stop=lambda now: self.stop(run, now=now),
            say=lambda line: print(line, flush=True),  # noqa: T201  as the run's own console
        )
        try:
            return msgspec.json.decode(RunEnded.path(run.directory / FOLDER).read_bytes(), type=RunEnded).code
        except FileNotFoundError:
            if stopped:
                return 130
            raise UserError(f"the actors of {run.label} were removed before the end of the run") from None

    def _start(self, run: ClusterRun, new: Sequence[RayProcess]) -> list[str]:
        """Create actors and wait until they answer. Raises UserError, and removes those that do not."""
        import ray

        created, place_s = _create(run, new), run.config.cluster.ray.place_s
        states, waiting = _states(created, timeout_s=min(SILENT_S, place_s))
        if waiting and place_s > SILENT_S:
            missing = [process for process in new if process.spec.name in waiting]
            first = f"waiting for Ray, up to {place_s:g} s ([cluster.ray] place_s):"
            lines = [first, *not_started(missing, reserved=_reserved(run)), *_machines()]
            print("\n  ".join(lines), flush=True)  # noqa: T201  what it waits for is otherwise said at the end alone
            states, waiting = _states(created, timeout_s=place_s - SILENT_S)
        if not waiting:
            return [f"{name}: {state}" for name, state in states.items()]
        missing = [process for process in new if process.spec.name in waiting]
        first = f"Ray has not started all processes within {place_s:g} s ([cluster.ray] place_s):"
        message, machines = [first, *not_started(missing, reserved=_reserved(run))], _machines()
        for name in waiting:
            ray.kill(created[name], no_restart=True)
        for group in {process.place.group for process in missing if process.place.group}:
            remove_groups(run.label, group)
        raise UserError("\n  ".join([*message, *machines]))


def not_started(missing: Sequence[RayProcess], *, reserved: Collection[str]) -> list[str]:
    """Return a line for each process whose actor has not answered.

    reserved: placement groups that have their resources: Ray is still starting the actors in them. Outside of a group
    Ray does not show whether it has reserved an actor's resources.
    """
    lines = []
    for process in missing:
        name = process.spec.name
        if process.place.group in reserved:
            lines.append(
                f"{process.spec.name} has a place, and Ray is still starting it (imports, [cluster.ray] extra)"
            )
        elif process.place.group:
            lines.append(f"{name} wants {process.needs}, and there is no place for it")
        else:
            lines.append(f"{name} wants {process.needs}: there is no place for it, or Ray is still starting it")
    if any(process.place.machines == 1 and process.resources.get("GPU", 0) > 1 for process in missing):
        lines.append("the GPUs of a rollout replica are all of one machine: [rollout.parallel] tp x pp")
    return lines


def processes_of_run(run: ClusterRun) -> list[RayProcess]:
    """Return the processes of a run, the controller's last."""
    workers = processes(run, [*run.policies(), *run.rollouts()])
    folder = run.directory / FOLDER
    spec = run.process(CONTROLLER, run.controller_arguments(), log=str(folder / f"{CONTROLLER}.log"))
    place = RayPlace(
        label=run.label,
        folder=str(folder),
        advertises="bind" not in run.config.run.model_fields_set,
        after=tuple(process.spec.name for process in workers),
    )
    resources = _resources(run, CONTROLLER, gpus=0)
    return [*workers, RayProcess(spec=spec, place=place, resources=resources, strategy="DEFAULT")]


def processes(run: ClusterRun, replicas: Sequence[Replica]) -> list[RayProcess]:
    """Return the processes of replicas, a process a machine."""
    return [_worker(run, replica, machine) for replica in replicas for machine in range(replica.machines)]


def _worker(run: ClusterRun, replica: Replica, machine: int) -> RayProcess:
    folder, several = run.directory / FOLDER, replica.machines > 1
    name = f"{replica.name}.{machine}" if several else replica.name
    is_policy = replica.role == "policy"
    return RayProcess(
        spec=run.process(name, run.worker_arguments(replica), log=str(folder / f"{name}.log")),
        place=RayPlace(
            label=run.label,
            folder=str(folder),
            group=f"{run.label}.{replica.name}" if is_policy else "",
            machine=machine,
            machines=replica.machines,
        ),
        resources=_resources(run, replica.role, gpus=replica.gpus),
        strategy=("STRICT_SPREAD" if several else "STRICT_PACK") if is_policy else "SPREAD",
    )


def connect(run: ClusterRun) -> None:
    """Connect this process to the cluster of a run. Raises UserError if there is none, or no Ray here."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # the actors have environments of their own
    os.environ.setdefault(
        "RAY_NUM_REDIS_GET_RETRIES", "1"
    )  # of 40 s each, for a cluster that has been here; default 20
    try:
        import ray
    except ImportError as error:
        raise UserError(f"Ray is not installed here: {pip_install('cosmos-rl-core[ray]')}") from error
    if ray.is_initialized():
        return
    address, section = _address(run), run.config.cluster.ray
    try:
        _must_listen(address)
        ray.init(address=address, namespace=section.namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"no cluster of Ray answers at {address}: {reason}; start one by ray start --head, or set RAY_ADDRESS or "
            "[cluster.ray] address"
        ) from error


def replica_of(name: str) -> str:
    """Return the replica of an actor: policy-0 of policy-0.1."""
    return name.partition(".")[0]


class _ControllerActor:
    """The controller's actor, as seen from `cosmos-rl launch`, also without the head of Ray.

    Without it a call of Ray waits for a minute and then ends this process, so that a thread makes it.
    """

    def __init__(self, run: ClusterRun) -> None:
        import ray

        self._head: str = ray.get_runtime_context().gcs_address
        self._run = run
        self._answered = time.monotonic()
        self._call: Future[bool] | None = None

    def is_there(self) -> bool:
        """Return whether it is there, as far as is known. Raises UserError if the head does not answer for a time."""
        if not self._head_answers():
            return True
        if self._call is None:
            self._call = Future()
            threading.Thread(target=self._ask, args=(self._call,), daemon=True).start()
        done, _ = wait([self._call], timeout=ANSWER_S)
        if not done:
            return True
        call, self._call = self._call, None
        return call.result()

    def _ask(self, call: Future[bool]) -> None:
        try:
            call.set_result(is_there(self._run.label, CONTROLLER))
        except Exception as error:
            call.set_exception(error)

    def _head_answers(self) -> bool:
        try:
            _must_listen(self._head)
        except OSError as error:
            silent_s = time.monotonic() - self._answered
            if silent_s < HEAD_S:
                return False
            raise UserError(
                f"the head of Ray at {self._head} has not answered for {silent_s:.0f} s: {error}; Ray ends the "
                f"run's processes then, unless it is set up to survive this. cosmos-rl status {self._run.directory} "
                "shows whether the run is live, and the line that continues it"
            ) from error
        self._answered = time.monotonic()
        return True


def _must_listen(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT, which Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()


def _address(run: ClusterRun) -> str:
    return run.config.cluster.ray.address or os.environ.get("RAY_ADDRESS", "") or "auto"


def _resources(run: ClusterRun, role: str, *, gpus: int) -> dict[str, float]:
    amounts: dict[str, float] = {"CPU": 1.0, "GPU": float(gpus)}
    for one, resources in run.config.cluster.ray.resources.items():
        amounts |= resources if one == role else {}
    return {name: amount for name, amount in amounts.items() if amount}


def _create(run: ClusterRun, new: Sequence[RayProcess]) -> dict[str, Any]:
    """Create the actors of processes, and return them by name."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind, groups, created = ray.remote(RaySupervisor), {}, {}
    for process in new:
        resources, name, strategy = dict(process.resources), process.place.group, process.strategy
        if name:
            if name not in groups:
                bundles = [resources] * process.place.machines
                groups[name] = placement_group(bundles, strategy, name=name, lifetime="detached")
            strategy = PlacementGroupSchedulingStrategy(groups[name], process.place.machine)
        options = {
            "name": f"{run.label}.{process.spec.name}",
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": CALLS,
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": strategy,
            "runtime_env": run.config.cluster.ray.extra or None,
        }
        created[process.spec.name] = kind.options(**options).remote(process.spec, process.place)
    return created


def _states(by_name: Mapping[str, Any], *, timeout_s: float) -> tuple[dict[str, str], list[str]]:
    """Return the state of each actor by name, and the names of those that have no machine after the time."""
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

    calls = {name: actor.state.remote() for name, actor in by_name.items()}
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    states, waiting = {}, []
    for name, call in calls.items():
        if call not in ready:
            states[name] = "PENDING (it has no machine yet, or Ray is still starting it)"
            waiting.append(name)
            continue
        try:
            states[name] = ray.get(call)
        except ActorUnavailableError:
            states[name] = "RESTARTING (its machine does not answer)"
        except ActorDiedError:
            continue  # it has ended
        except RayError as error:
            raise UserError(f"{name}: Ray could not start its actor: {error}") from error
    return states, waiting


def _end(run: ClusterRun, name: str, actor: Any) -> None:
    """Let an actor end its process; remove one that does not answer, as it has no machine."""
    import ray

    if not _answers(actor.end):
        ray.kill(actor, no_restart=True)
        remove_groups(run.label, f"{run.label}.{replica_of(name)}")


def _answers(method: Any) -> bool:
    """Call a method of an actor, and return whether it answers in time."""
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    call = method.remote()
    if not ray.wait([call], timeout=END_S)[0]:
        return False
    try:
        ray.get(call)
    except ActorUnavailableError:
        return False
    except ActorDiedError:
        pass  # it has ended
    return True


def _reserved(run: ClusterRun) -> set[str]:
    """Return the placement groups of a run that have their resources."""
    from ray.util.placement_group import placement_group_table

    groups = placement_group_table().values()
    return {one["name"] for one in groups if one["state"] == "CREATED" and one["name"].startswith(f"{run.label}.")}


def _machines() -> list[str]:
    """Return a line for each machine of the cluster with its resources, and one with those that are free."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    lines = [f"machine {node['NodeManagerAddress']} has {_listed(node['Resources'])}" for node in alive]
    lines.append(f"free in all: {_listed(ray.available_resources()) or 'nothing'}")
    if not any(node["Resources"].get("GPU") for node in alive):
        lines.append("no machine has a GPU; with [cluster] gpus = false none is asked for")
    return lines


def _listed(amounts: Mapping[str, float]) -> str:
    """Return resources in words, without those that each machine has of its own."""
    own = ("node:", "memory", "object_store_memory")
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(amounts.items()) if not name.startswith(own))


def _command(spec: ProcessSpec) -> str:
    return " ".join([*spec.command, *spec.first])
