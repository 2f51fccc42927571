"""The end of a run: in good order, or with the error of a worker.

outcome = Outcome(ledger.members, external=False, note=observer.note)
outcome.worker_failed("rollout-0", error)
await outcome.decided                      # raises the error
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger.membership import Members
from cosmos_rl_core.errors import OutOfMemory, TakenOver, UserError, WorkerFailed, WorkerLost


class RunOutcome:
    """Decided once; later decisions are ignored. Created in a running event loop."""

    def __init__(self, members: Members, *, external: bool, note: Callable[[str], None]) -> None:
        """external: workers are started by others, so that one that fails before it is ready does not end the run."""
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.worker = ""
        """The worker whose error has ended the run."""
        self.interrupted = False
        """Whether the last policy left before the end of the run."""
        self._is_taken_over = False
        self._members = members
        self._external = external
        self._note = note

    @property
    def is_decided(self) -> bool:
        return self.decided.done()

    @property
    def is_taken_over(self) -> bool:
        """Whether another controller continues the run."""
        return self._is_taken_over

    def finish(self) -> None:
        """End the run in good order."""
        if not self.decided.done():
            self.decided.set_result(None)

    def last_policy_left(self, *, over: bool) -> None:
        """End the run if it is over, or if no other policy is expected: then like an interrupt.

        A policy that leaves saves a checkpoint first, from which another one that joins in time continues.
        """
        self.interrupted = not over
        if over or not self._external:
            self.finish()

    def removed(self, replica: str) -> None:
        """A member is lost before the run is over: report the last rollout worker, which others have to start again."""
        is_last = self._members.by_name[replica].role == "rollout" and not self._members.has_rollouts()
        if is_last and self._external and not self.is_decided:
            self._note(f"no rollout worker is left after {replica}: the run waits for another one")

    def policy_lost(self, error: Exception) -> None:
        """End the run for want of a policy: with the error, or like an interrupt if the last one left by itself."""
        if self.interrupted:
            self.finish()
        else:
            self.fail(error)

    def fail(self, error: BaseException, *, worker: str = "") -> None:
        """End the run with this error. worker: whose error it is."""
        self._is_taken_over |= isinstance(error, TakenOver)
        if not self.decided.done():
            self.worker = worker
            self.decided.set_exception(error)

    def worker_failed(self, replica: str, error: Exception) -> None:
        """End the run with a worker's error, unless it has never worked, and another one can do its work.

        That is another one of its role that has, or with `external` one that may join. After a WorkerLost the replica
        may be started again.
        """
        member = self._members.by_name.get(replica)
        if isinstance(error, WorkerLost):
            self._note(str(error).partition(";")[0])
        elif (self._external or self._has_other(replica)) and (member is None or not member.has_worked):
            self._note(f"{replica} could not start, and the run continues without it: {error}")
        else:
            self.fail(error, worker=replica)

    def _has_other(self, replica: str) -> bool:
        members = self._members.by_name
        return replica in members and any(
            other.role == members[replica].role and other.has_worked and other.is_live
            for name, other in members.items()
            if name != replica
        )


def worker_error(replica: str, role: p.Role, fatal: p.Fatal) -> Exception:
    """Return the error that a worker reported.

    A policy that has lost another one may be started again; a rollout worker has no peers.
    """
    if fatal.out_of_memory:
        return OutOfMemory(f"{replica}: {fatal.message}", role=role)
    if fatal.user:
        return UserError(fatal.message)
    kind = WorkerLost if fatal.lost and role == "policy" else WorkerFailed
    return kind(f"{replica}: {fatal.message}")
