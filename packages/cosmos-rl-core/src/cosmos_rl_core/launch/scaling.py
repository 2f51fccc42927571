"""The number of workers of a live run, changed by an operator (`cosmos-rl scale`) or by [elastic.autoscale].

`cosmos-rl stop` is an operator too: StopRun counts as an interrupt of the run.

operator --Scale----------> answer_operator -> Scaling.change -> fewer: the youngest workers are drained
         <-Progress--------                                   -> more: the placement starts them, or has commands
         <-Scaled | Refused
metrics of each step --> Scaling.stepped -> wanted_rollouts -> Scaling.change
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.server import Controller
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.launch.interrupts import Interrupts
from cosmos_rl_core.launch.placement import Workers
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.recipe.sections import AutoscaleSection
from cosmos_rl_core.wire.channel import Connection

OPERATOR = "operator"
"""Role in an operator's Hello."""
CHECK_S = 0.05
ROLES: Sequence[p.Role] = ("policy", "rollout")


class Scaling:
    """Changes the number of workers of a run, one request at a time."""

    def __init__(
        self, controller: Controller, workers: Workers, config: RunConfig, *, note: Callable[[str], None]
    ) -> None:
        """note: reports each accepted request in the run's log."""
        self._controller = controller
        self._note = note
        self._workers = workers
        self._is_sft = config.is_sft
        self._autoscale = config.elastic.autoscale
        self._idle: list[tuple[float, float]] = []
        self._autoscaling: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.targets: dict[str, int] = {}
        """Number of workers by role, as last requested; empty for `cosmos-rl controller` before a request."""
        if config.run.placement != "external":
            self.targets = {"policy": len(workers.names("policy")) or config.policy.replicas}
            if not config.is_sft:
                self.targets["rollout"] = len(workers.names("rollout")) or config.rollout.replicas

    def present(self, role: p.Role) -> list[str]:
        """Return the workers of a role that are not leaving, the oldest first; also those not connected yet."""
        peers = [peer.name for peer in self._controller.peers.of_role(role) if not (peer.leaving or peer.draining)]
        return [*peers, *(name for name in self._workers.names(role) if name not in peers)]

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """Apply [elastic.autoscale] after a step; a change in work is finished first."""
        idle = metrics.get("policy_idle_fraction"), metrics.get("rollout_idle_fraction")
        if not self._autoscale.max_rollouts or self._lock.locked() or idle[0] is None or idle[1] is None:
            return
        self._idle.append((idle[0], idle[1]))
        present = len(self.present("rollout"))
        target = wanted_rollouts(self._idle, present=present, section=self._autoscale)
        if target != present:
            self._note(f"autoscaling: policy idle for {idle[0]:.0%}, rollouts for {idle[1]:.0%}")
            self._autoscaling = asyncio.create_task(self._change_rollouts(target))

    async def _change_rollouts(self, target: int) -> None:
        try:
            await self.change({"rollout": target}, report=lambda text: None)  # the controller reports the members
        except UserError as error:
            self._note(f"autoscaling: {error}")
        except Exception as error:  # it would be lost with this task
            self._controller.outcome.fail(error)

    def ready(self) -> dict[str, int]:
        """Return the number of ready workers by role."""
        peers = self._controller.peers
        return {role: sum(peer.is_ready for peer in peers.of_role(role)) for role in ROLES}

    async def change(self, targets: Mapping[str, int], *, report: Callable[[str], None]) -> None:
        """Start or drain workers until there are as many of each role as wanted, and wait until they are ready or gone.

        report: called with one line per worker and event. Raises UserError, before any change, for a number that
        the run cannot have.
        """
        roles = self._checked(targets)
        if self._lock.locked():
            raise UserError("another change of the number of workers is in work: wait for its end")
        async with self._lock:
            present: dict[p.Role, list[str]] = {role: self.present(role) for role in roles}
            leaving = [name for role, number in roles.items() for name in present[role][number:]]
            missing: dict[p.Role, int] = {role: number - len(present[role]) for role, number in roles.items()}
            more: dict[p.Role, int] = {role: number for role, number in missing.items() if number > 0}
            if more:
                self._workers.check(more, without=leaving)
            self._note(f"workers wanted: {', '.join(f'{number} {role}' for role, number in roles.items())}")
            self.targets |= roles
            try:
                await self._drain(leaving, report)
                if more:
                    await self._add(more, report)
            finally:
                self._idle.clear()

    def _checked(self, targets: Mapping[str, int]) -> dict[p.Role, int]:
        """Return the numbers by role. Raises UserError for a role or number that no run can have."""
        if not targets:
            raise UserError("name a role and its number of workers: rollout=4, policy=2")
        roles: dict[p.Role, int] = {}
        for name, number in targets.items():
            role: p.Role | None = next((role for role in ROLES if role == name), None)
            if role is None:
                raise UserError(f"{name}={number}: there is no role {name}; the roles are {' and '.join(ROLES)}")
            if number < 1:
                raise UserError(f"{role}={number}: a run needs at least one {role} worker; cosmos-rl stop ends the run")
            if role == "rollout" and self._is_sft:
                raise UserError(f"rollout={number}: a supervised run has no rollout workers")
            roles[role] = number
        if self._controller.outcome.is_decided or self._controller.ledger.why_finished() is not None:
            raise UserError("the run is over: its workers leave")
        return roles

    async def _drain(self, names: Sequence[str], report: Callable[[str], None]) -> None:
        peers = self._controller.peers.by_name
        for name in names:
            connected = name in peers
            if connected:
                peers[name].drain()
            self._workers.dismiss(name, connected=connected)
            report(f"{name} leaves")

        def outcome(name: str) -> str:
            peer = peers.get(name)
            if peer is not None and not peer.draining:  # the request was lost with an earlier connection
                peer.drain()
            return "" if self._exists(name) else f"{name} has left"

        await self._until_all(names, outcome, report)

    async def _add(self, more: Mapping[p.Role, int], report: Callable[[str], None]) -> None:
        added = self._workers.add(more)
        for name in added.names:
            report(f"{name} starts")
        for command in added.commands:
            report(f"start another worker by: {command}")

        def outcome(name: str) -> str:
            peer = self._controller.peers.by_name.get(name)
            if peer is not None and peer.is_ready:
                return f"{name} is ready"
            return "" if self._exists(name) else f"{name} could not start; its log is logs/{name}.log"

        await self._until_all(added.names, outcome, report)

    async def _until_all(
        self, names: Sequence[str], outcome: Callable[[str], str], report: Callable[[str], None]
    ) -> None:
        """Report the outcome of each worker once there is one. Raises UserError when the run ends before."""
        waiting = list(names)
        while waiting:
            for name in list(waiting):
                if text := outcome(name):
                    waiting.remove(name)
                    report(text)
            if waiting and self._controller.outcome.is_decided:
                raise UserError(f"the run has ended; it waited for {', '.join(waiting)}")
            await asyncio.sleep(CHECK_S)

    def _exists(self, name: str) -> bool:
        return name in self._controller.peers.by_name or self._workers.has(name)


def wanted_rollouts(idle: Sequence[tuple[float, float]], *, present: int, section: AutoscaleSection) -> int:
    """Return the number of rollout workers by the rule of [elastic.autoscale].

    idle: idle fractions of the policy and of the rollout workers, of each step since the last change, the oldest first.
    """
    last = list(idle)[section.cooldown_steps :][-section.steps :]
    if len(last) < section.steps:
        return present
    limit = section.idle_fraction
    if all(policy > limit >= rollout for policy, rollout in last):
        return max(present, min(present + 1, section.max_rollouts))
    if all(rollout > limit >= policy for policy, rollout in last):
        return min(present, max(present - 1, section.min_rollouts))
    return present


async def answer_operator(connection: Connection, scaling: Scaling | None, interrupts: Interrupts) -> None:
    """Answer the request of one operator; returning closes the connection. A change goes on after a lost connection.

    scaling: None while the run starts its first workers.
    """
    message = await connection.receive()
    if isinstance(message, p.StopRun):
        interrupts.interrupt()
        if message.now and interrupts.count == 1:
            interrupts.interrupt()
        clean = "the run ends after the step in work, which is saved"
        _post(connection, p.Progress(clean if interrupts.count == 1 else "the run ends at once"))
        await connection.closed.wait()  # when the run is over
        return
    assert isinstance(message, p.Scale)
    if scaling is None:
        return _post(connection, p.Refused("the run starts its first workers: try again in a moment"))
    try:
        await scaling.change(message.wanted, report=lambda text: _post(connection, p.Progress(text)))
    except UserError as error:
        return _post(connection, p.Refused(str(error)))
    _post(connection, p.Scaled(scaling.ready()))


def _post(connection: Connection, message: p.ToOperator) -> None:
    """Send to the operator, unless the connection is closed."""
    if not connection.closed.is_set():
        connection.post(message)
