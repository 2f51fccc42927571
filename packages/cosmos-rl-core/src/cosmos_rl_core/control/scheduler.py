"""Training and evaluation alternate: requests for leases and batches reach the ledger only while no evaluation runs.

RequestLeases -> evaluation runs? -- yes -> rows to evaluate, or deferred to its end
                                  -- no  -> ledger -> Grant
RequestBatch  -> evaluation runs? -- yes -> wait for its end; likewise for groups after a restart
                                  -- no  -> steps left? -- yes -> ledger -> Batch
                                                        -- no  -> last evaluation -> empty batch: the policy ends
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.durable import DurableLedger
from cosmos_rl_core.control.evaluation import Evaluation, Evaluator
from cosmos_rl_core.control.inflight import Batches
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.peers import Peers, WorkerPeer
from cosmos_rl_core.control.reports import ProgressObserver
from cosmos_rl_core.control.settings import ControllerSettings
from cosmos_rl_core.observe.slices import Slices, slices

FEW = 4
"""Workers that wait for the same and have a line each."""


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Decides between training and evaluation."""

    job: ControllerSettings
    durable: DurableLedger
    observer: ProgressObserver
    peers: Peers
    evaluator: Evaluator
    batches: Batches
    """After a restart of the controller it awaits groups: no batch is assigned meanwhile."""
    stop_reason: str = ""
    """Why the run ends early; then no batch is assigned any more."""
    ledger: Ledger = field(init=False)
    _first: int = field(init=False)
    """Version at the start."""
    _has_begun: bool = False
    """Whether a rollout replica has asked for prompts to train on."""

    def __post_init__(self) -> None:
        self.ledger = self.durable.ledger
        self._first = self.ledger.version

    @property
    def is_over(self) -> bool:
        """Whether the run needs no further step."""
        return bool(self.stop_reason) or self.ledger.why_finished() is not None

    @property
    def num_rollouts(self) -> int:
        """Number of rollout replicas that share the work: the ready ones, before the first step all connected ones.

        Otherwise the first one that is ready would take all prompts of the first step.
        """
        if self.ledger.version > self._first:
            return self.ledger.members.num_ready_rollouts
        return self.peers.num_of_role("rollout")

    def request_leases(self, peer: WorkerPeer, message: p.RequestLeases) -> None:
        """Pass a rollout's request to the ledger, or to the evaluation."""
        if (evaluation := self.evaluator.current) is not None:
            self.observer.phase(f"evaluating version {evaluation.version}")
            self.evaluator.request(peer, message)
            return
        if not self._has_begun:
            self._has_begun = True
            self.observer.phase("training")
        peer.deferred = None
        self.durable.feed(peer.event(message))

    def request_batch(self, peer: WorkerPeer) -> None:
        """Request the batch for a waiting policy from the ledger, once it is in the mesh and no evaluation runs."""
        step = peer.wants_batch
        if step is None or peer.epoch == 0 or self.evaluator.current is not None or self.batches.awaited:
            return
        if self.stop_reason or self.job.ends_at(step):
            self.end_batches(peer)
        else:
            self.durable.feed(peer.event(p.RequestBatch(step, peer.epoch)))

    def end_batches(self, peer: WorkerPeer) -> None:
        """After the last step: evaluate it, then send the policy an empty batch, which ends it."""
        step = self.ledger.version
        if self.stop_reason or not self.evaluate_if_due(step, last=True):
            peer.wants_batch = None
            peer.post(p.Batch(step=step, epoch=peer.epoch, samples=()))

    def has_policy(self) -> bool:
        """Return whether a policy is left that trains. At the end of the run a newcomer does not count."""
        staying = [peer.name for peer in self.peers.of_role("policy") if not peer.leaving]
        return any(not self.is_over or name in self.ledger.members.mesh for name in staying)

    def evaluate_if_due(self, version: int, *, last: bool = False) -> bool:
        """Begin the evaluation of a version if it is due; return whether it was begun."""
        due = self.evaluator.begin_if_due(version, lineage=self.ledger.lineage, last=last)
        if due:
            self.peers.need(version, self.ledger)
            if self.ledger.members.num_ready_rollouts:  # otherwise it begins with the first one that is ready
                self.observer.phase(f"evaluating version {version}")
            self._resume_requests()
        return due

    def evaluated(self, finished: Evaluation) -> None:
        """Record an evaluation and continue training."""
        groups = [finished.groups[row] for row in sorted(finished.groups)]
        self.observer.evaluated(finished.version, finished.metrics(), groups)
        for reason in finished.first_reasons():
            self.observer.note(f"failed in the evaluation: {reason}")
        self.observer.phase("saving" if self.job.ends_at(finished.version) else "training")
        self._resume_requests()
        self.request_batches()

    def committed(self, step: int, *, requests_batches: bool) -> None:
        """A step is committed: evaluate its weights if they are due. requests_batches: policies may have waited."""
        self.evaluate_if_due(step + 1)
        if requests_batches:
            self.request_batches()

    def request_batches(self) -> None:
        """Request the batches of all policies that wait."""
        for policy in self.peers.of_role("policy"):
            self.request_batch(policy)

    def waits(self) -> Slices[list[str]]:
        """Return one line per wait: of the run, and of each worker that is ready and has no work."""
        lines = [*self.ledger.waits(), *self.evaluator.waits()]
        if self.batches.awaited:
            lines.append(
                f"the run waits for {len(self.batches.awaited)} groups to return after the controller's restart"
            )
        lines += [f"{peer.name} {why}" for peer in self.peers.of_role("policy") if (why := self._why_policy(peer))]
        for rollouts in slices(self.peers.of_role("rollout")):
            lines += [f"{peer.name} {why}" for peer in rollouts if (why := self._why_idle(peer))]
            yield
        return _shortened(lines, self.peers.by_name)

    def _why_policy(self, peer: WorkerPeer) -> str:
        """Return why a policy waits, for reasons that the ledger does not have."""
        evaluation, mesh = self.evaluator.current, self.ledger.members.mesh
        if peer.is_ready and mesh and peer.name not in mesh:
            return f"waits for the end of step {self.ledger.version}, to join the mesh"
        if peer.wants_batch is not None and evaluation is not None:
            return f"waits for the end of the evaluation of version {evaluation.version}"
        return ""

    def _why_idle(self, peer: WorkerPeer) -> str:
        """Return why a rollout replica has no work, for reasons that the ledger does not have."""
        evaluation = self.evaluator.current
        if peer.draining:
            return "leaves: its groups are finished and read first"
        if not peer.is_ready or peer.name in self.ledger.samples.leased or peer.name in self.ledger.sessions.waiting:
            return ""
        if peer.version < 0:
            source = "it loads them" if self.peers.has_publisher(self.ledger.members.mesh) else "no policy is ready"
            return f"waits for weights: {source}"
        if evaluation is not None:
            if peer.deferred is None:
                return ""  # it evaluates
            behind = peer.version < evaluation.version
            what = f"weights of version {evaluation.version}" if behind else "the end of the evaluation"
            return f"waits for {what}: version {evaluation.version} is evaluated"
        return "waits for room: it can store no further group until the policy has read one"

    def _resume_requests(self) -> None:
        for rollout in self.peers.of_role("rollout"):
            if rollout.deferred is not None:
                self.request_leases(rollout, rollout.deferred)


def _shortened(lines: Sequence[str], workers: Container[str]) -> list[str]:
    """Return the lines with one for all workers that wait for the same, where these are more than FEW."""
    same: dict[str, list[str]] = {}
    for line in lines:
        name, _, why = line.partition(" ")
        same.setdefault(why if name in workers else line, []).append(line)
    shortened = []
    for each in same.values():
        shortened += each if len(each) <= FEW else [f"{each[0]} (and {len(each) - 1} others)"]
    return shortened
