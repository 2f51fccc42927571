"""The messages of a worker that the controller may have missed: they are sent again on a new connection.

message                          until
Ready                            the end
Deliver, Failed                  Release
RequestLeases                    Grant
StepDone and other reports       the commit of a step that was voted for after them
RequestBatch                     Batch, or another mesh
Vote                             Committed, or another mesh
PayloadsLost, PeersLost          another mesh
Leaving                          Leave
Goodbye                          the end
"""

from __future__ import annotations

from cosmos_rl_core.control import protocol as p

Report = p.StepDone | p.Validated | p.CheckpointDone
Key = tuple[int, int, bool]
"""Sample, attempt, and whether it belongs to an evaluation."""


class Unanswered:
    """Records what is sent and received on all connections of a worker.

    unanswered.sent(message)                      before each message
    if unanswered.received(message): ...          False: a reply that came before
    unanswered.messages()                         on a new connection
    """

    def __init__(self) -> None:
        self.vote: p.Vote | None = None
        self.epoch = 0
        """Policy: the newest epoch of the mesh."""
        self.groups: dict[Key, p.Deliver | p.Failed] = {}
        self._leased: set[tuple[int, bool]] = set()
        """Granted samples without a result: (sample, whether of an evaluation)."""
        self._ready: p.Ready | None = None
        self._leases: p.RequestLeases | None = None
        self._batch: p.RequestBatch | None = None
        self._lost: p.PayloadsUnreadable | p.PeersLost | None = None
        self._leaving: p.Leaving | None = None
        self._reports: list[Report] = []
        self._before_vote = 0
        """Number of reports that were sent before the vote."""
        self.goodbye: p.Goodbye | None = None
        """The last message of a worker."""

    def rejoin(self) -> p.Rejoin:
        """Return the first message on a new connection."""
        samples = self._leased | {(sample, evaluation) for sample, _, evaluation in self.groups}
        return p.Rejoin(
            holding=tuple(sorted(sample for sample, evaluation in samples if not evaluation)),
            rows=tuple(sorted(sample for sample, evaluation in samples if evaluation)),
        )

    def messages(self) -> list[p.ToController]:
        """Return what to send again, without the groups, and the Goodbye after them."""
        each = (self._ready, *self._reports, self._leases, self._lost, self.vote, self._batch, self._leaving)
        return [message for message in each if message is not None]

    def sent(self, message: p.ToController) -> None:
        match message:
            case p.Deliver() | p.Failed():
                self._leased.discard((message.sample, message.evaluation))
                self.groups[message.sample, message.attempt, message.evaluation] = message
            case p.RequestLeases():
                self._leases = message
            case p.Return():
                self._leased -= {(sample, False) for sample in message.samples}
                self._leases = None
            case p.StepDone() | p.Validated() | p.CheckpointDone():
                self._reports.append(message)
            case p.RequestBatch():
                self._batch = message
            case p.Vote():
                self.vote, self._before_vote = message, len(self._reports)
            case p.PayloadsUnreadable() | p.PeersLost():
                self._lost = message
            case p.Ready():
                self._ready = message
            case p.Leaving():
                self._leaving = message
            case p.Goodbye():
                self.goodbye = message
            case _:
                pass

    def received(self, message: p.ToWorker) -> bool:
        """Record a message; return False if it repeats an earlier one."""
        match message:
            case p.Grant():
                self._leases = None
                self._leased |= {(prompt.sample, prompt.evaluation) for prompt in message.prompts}
            case p.Cancel():
                self._leased.discard((message.sample, False))
            case p.LineageRolledBack():
                self._leased.clear()
            case p.Release():
                self._release(message)
            case p.Batch():
                if self._batch is None or (message.samples and message.step != self._batch.step):
                    return False
                self._batch = None
            case p.Committed():
                if self.vote is None or message.step != self.vote.step:
                    return False
                self.vote = None
                del self._reports[: self._before_vote]
            case p.Leave():
                self._leaving = None
            case p.Remesh():
                return self._meshed(message)
            case _:
                pass
        return True

    def _release(self, message: p.Release) -> None:
        for sample, attempt in message.groups:
            self.groups.pop((sample, attempt, False), None)
        for row, attempt in message.rows:
            self.groups.pop((row, attempt, True), None)

    def _meshed(self, message: p.Remesh) -> bool:
        if message.epoch <= self.epoch:
            return False
        self.epoch = message.epoch
        self._batch = self._lost = None
        if self.vote is not None and not self.is_committed(message):
            self.vote = None
        return True

    def is_committed(self, mesh: p.Remesh) -> bool:
        """Return whether the step that was voted for was committed before this mesh began: Committed follows."""
        return self.vote is not None and mesh.version > self.vote.step
