"""The messages between workers and controller. New fields are appended, with defaults.

worker                                      controller
  Phase | Ready     ->      <- Welcome        sent when the worker connects
  Rejoin            ->      <- Welcome        the same process on a new connection
  Heartbeat         ->                        every second, from the worker's main loop
rollout
  RequestLeases     ->      <- Grant          prompts to generate groups for
  Deliver | Failed  ->      <- Cancel         a group, a reference to it, or the reason for its failure
  Return            ->                        leases of a worker that leaves; it gets no new ones
                            <- Release        groups that are no longer needed
                            <- SyncFrom       the address to pull weights from, again when it changes
policy
  RequestBatch      ->      <- Batch          groups of one step, or references to them
  PayloadsLost      ->                        some groups cannot be read; the reply is another batch
                            <- Remesh         the policy replicas that train together
  StoreSet|StoreGet ->      <- StoreValue     the addresses of their ranks, on a connection of each rank
  PeersLost         ->                        one of them cannot be reached
  Vote              ->      <- Committed      gradients are ready; apply the step
  StepDone          ->                        metrics and the published version
  Validated         ->                        the loss on held-out rows
  CheckpointDone | Alarm ->                   a checkpoint was written, or failed
both                        <- RolledBack     all policies were lost: training continues from a checkpoint
                            <- Stop
                            <- Drain          leave in good order, as after SIGTERM
                            <- Refused        instead of the Welcome: the worker exits, the run continues
  Leaving           ->      <- Leave          a policy of several: whether it must save first
  Goodbye | Fatal   ->
operator (`cosmos-rl scale`, `cosmos-rl stop`)
  Scale             ->      <- Progress       one per worker that starts, is ready, leaves or has left
                            <- Scaled | Refused
  StopRun           ->      <- Progress       and the connection closes when the run is over

Messages are repeated on a new connection until their reply: workers/connection.py. The ledger
(ledger/ledger.py) takes the workers' messages unchanged and replies with messages of this file. Its `Ack` and `NoMore`
are not sent: Release and Batch take their place. Of `Reject` those that remove the worker are sent.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cosmos_rl_core.rollout.spool.store import Spooled

Role = Literal["policy", "rollout"]
Payload = bytes | Spooled
"""An encoded RolloutGroup, or a reference to a large one; distinguished by their type on the wire."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages: an array on the wire whose first element is the message's name."""


class Welcome(Message, frozen=True):
    """First frame to every worker."""

    incarnation: int
    """Number of this process of the replica; it rises with each new process of the same name."""
    lineage: int
    version: int
    """Committed steps on the lineage."""
    generation: int = 0
    """Number of controller restarts from the journal; workers ignore controllers of lower generations."""
    config: str = ""
    """The resolved recipe, TOML."""
    run_dir: str = ""
    resume_from: str = ""
    """Checkpoint to load, empty for a fresh start."""
    last_step: int = 0
    """Version at which the run ends; 0 if unknown."""
    kept: list[str] = []
    """Rollout: spooled files of an earlier process of this replica that are still needed."""
    scores_rows: bool = False
    """Rollout: whether this replica scores real rows for the monitor."""


class Rejoin(Message, frozen=True):
    """First message of a worker on a new connection, whose Hello has its incarnation. The reply is a Welcome."""

    holding: tuple[int, ...] = ()
    """Rollout: samples in work, and those whose results were not released; its other leases are returned."""
    rows: tuple[int, ...] = ()
    """Rollout: likewise, rows of the evaluation."""


class Phase(Message, frozen=True):
    """A phase of the worker's start has begun, such as "reading weights"."""

    name: str


class Ready(Message, frozen=True):
    """The worker is built and can work."""

    address: str = ""
    """Policy: address of its published weights. Rollout: address of its spool."""
    version: int = 0
    gpu: str = ""
    """Identity of a GPU that no other worker should use: of rank 0, if there are several. Empty on a CPU, and where the
    recipe shares GPUs."""
    endpoint: str = ""
    """Rollout: base URL of its endpoint for agents; empty without [agent]."""


class Heartbeat(Message, frozen=True):
    progress: int = 0
    """Counter of finished work, and of heartbeats of a policy that waits for the controller; constant in a worker that
    is alive but stuck."""
    waited_s: float = 0.0
    """Seconds without work, because others work, since the start of its process."""
    running_s: float = 0.0
    """Seconds since the start of its process."""
    holding: tuple[int, ...] = ()
    """Rollout: samples in work or not yet delivered; their leases are renewed."""
    version: int = -1
    """Version of its weights; -1: none yet."""
    waits_for_peers: bool = False
    """Policy: whether it waits for other policies of its mesh."""
    rows: int = 0
    """Rollout: number of rows of an evaluation in work."""


class RequestLeases(Message, frozen=True):
    version: int
    """Version of the oldest weights from which a term of the new groups may be sampled."""
    capacity: int
    """Number of groups the replica can start now. A newer request replaces an older one."""
    lineage: int = 0
    """Lineage of those weights."""


class LeasedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """One group to generate."""

    sample: int
    attempt: int
    deadline: int = 0
    """Last step that may train on it."""
    row: bytes = b""
    """The dataset's row, JSON."""
    origin: str = ""
    evaluation: bool = False


class Grant(Message, frozen=True):
    """Reply to RequestLeases: at least one prompt, at most the requested capacity."""

    prompts: tuple[LeasedPrompt, ...]
    rollouts: int = 0
    """Number of rollout replicas that share the work; 0: as before."""


class NoMore(Message, frozen=True):
    """Reply to RequestLeases or RequestBatch: the run needs nothing more from this replica."""

    reason: str


class Cancel(Message, frozen=True):
    """The lease was withdrawn; the replica may stop working on it."""

    sample: int


class Deliver(Message, frozen=True):
    """A complete group. Repeated on a new connection until its Release."""

    sample: int
    attempt: int
    min_version: int
    max_version: int
    num_terms: int
    payload: Payload = b""
    evaluation: bool = False
    lineage: int = 0
    """Lineage of the weights that all its terms were sampled from."""
    mean_reward: float | None = None


class Ack(Message, frozen=True):
    """A Deliver or Failed was processed; the replica may delete the group."""

    sample: int


class Reject(Message, frozen=True):
    """A message was refused. Repeating it does not help."""

    incarnation: int
    """Incarnation of the refused message's sender."""
    reason: str
    sample: int = -1
    """Sample of a refused Deliver; the replica discards it."""
    fenced: bool = False
    """True: the sender was replaced by a newer process or removed; it must rejoin or exit."""


class Release(Message, frozen=True):
    """Results are no longer needed, or were refused. Until then a replica keeps them, for another connection."""

    paths: list[str]
    """Files of the replica's spool, by the paths in its references."""
    groups: tuple[tuple[int, int], ...] = ()
    """Sample and attempt of each Deliver and Failed."""
    rows: tuple[tuple[int, int], ...] = ()
    """Likewise, of an evaluation."""


class Failed(Message, frozen=True):
    """A group could not be completed."""

    sample: int
    attempt: int
    reason: str
    """Starts with "filtered:" for a group left out on purpose, such as "filtered:zero_variance"."""
    final: bool = False
    """True: a retry cannot succeed."""
    evaluation: bool = False
    lineage: int = 0
    """Lineage of the weights."""
    mean_reward: float | None = None
    """Of a group that was left out; None without rewards."""


class Return(Message, frozen=True):
    """The rollout worker leaves: it returns these leases, which does not count as a failure, and gets no new ones."""

    samples: tuple[int, ...] = ()


class SyncFrom(Message, frozen=True):
    """The policy that publishes weights. Sent to every rollout replica whenever it changes."""

    address: str
    lineage: int = 0
    """Lineage of the weights; versions of another lineage are void."""
    version: int = 0
    """Version that is needed whatever [sync] interval says: it is evaluated."""


class Remesh(Message, frozen=True):
    """The set of policy replicas that train together changed: rebuild the process groups and repeat the request."""

    epoch: int
    members: tuple[str, ...]
    version: int
    lineage: int


class RequestBatch(Message, frozen=True):
    """Request for the batch of a step. A repeated request before the commit returns the same batch."""

    step: int
    epoch: int = 0
    """Epoch of the replica's mesh; 0: the current one."""


class Batch(Message, frozen=True):
    step: int
    epoch: int
    samples: tuple[int, ...]
    """Ascending; empty if the run has no more batches."""
    payloads: list[Payload] = []
    """One per sample of `own`: its group, or [origin, row] (JSON) in a supervised run."""
    part: tuple[int, ...] | None = None
    """Samples of this policy replica, ascending, where each replica gets a part of the batch; None: all."""
    upcoming: list[tuple[int, bytes]] = []
    """In a supervised run, samples that the next batch is expected to have and that take long to read, with rows."""

    @property
    def own(self) -> tuple[int, ...]:
        """The samples whose payloads are in the message."""
        return self.samples if self.part is None else self.part


class PayloadsUnreadable(Message, frozen=True):
    """Groups of a batch cannot be read. The reply is another batch of the same step, in a later epoch."""

    step: int
    epoch: int
    samples: tuple[int, ...]
    reason: str


class Vote(Message, frozen=True):
    """A policy replica has the gradients of a step and can apply them."""

    step: int
    epoch: int


class Committed(Message, frozen=True):
    """All members voted: apply the gradients of `step`. Version `step + 1` exists."""

    step: int
    next_sample: int
    """First id of the prompt stream that was not issued yet."""
    unfinished: tuple[int, ...]
    """Issued ids not trained on up to this step; a checkpoint stores them with `next_sample`."""
    save: bool = False
    """Whether to save a checkpoint after the step; set by rank 0 for the others of its replica."""
    successes: bytes = b""
    """The curriculum's memory, which a checkpoint stores too."""


class StepDone(Message, frozen=True):
    step: int
    version: int
    metrics: dict[str, float]


class Validated(Message, frozen=True):
    """Evaluation by a supervised replica."""

    version: int
    metrics: dict[str, float]


class LineageRolledBack(Message, frozen=True):
    """Training continues from `version` on a new lineage; weights of other lineages are invalid."""

    lineage: int
    version: int
    resume_from: str = ""
    """Policy: checkpoint of that version, empty for the initial model; set by the server."""


class CheckpointDone(Message, frozen=True):
    """A checkpoint of the weights after `step` steps is complete."""

    step: int
    path: str = ""
    lineage: int = 0


class Alarm(Message, frozen=True):
    """A non-fatal error to report to the user, such as a failed write of a checkpoint."""

    message: str


class PeersLost(Message, frozen=True):
    """A policy replica cannot reach another one of its mesh: the step is computed again in a new epoch."""

    epoch: int
    reason: str
    suspects: tuple[str, ...] = ()
    """Replicas that cannot be reached, if known."""


class StoreSet(Message, frozen=True):
    """Set a key for the rendezvous of the policy replicas of an epoch. The reply is a StoreValue."""

    epoch: int
    key: str
    value: bytes


class StoreGet(Message, frozen=True):
    """Read a key. The reply is a StoreValue, at once; the key may not be set yet."""

    epoch: int
    key: str


class StoreValue(Message, frozen=True):
    value: bytes | None = None
    """None: the key is not set."""
    over: bool = False
    """Whether a later epoch has begun."""


class Stop(Message, frozen=True):
    """Exit cleanly; a policy replica saves a checkpoint first."""

    reason: str


class Drain(Message, frozen=True):
    """Leave in good order, as after SIGTERM: the run needs fewer workers of this role."""


class Refused(Message, frozen=True):
    """The worker cannot join the run, or return to it, or the operator's request cannot be met."""

    reason: str


class Scale(Message, frozen=True):
    """Change the number of workers. The reply is Refused, or a Progress for each change and then Scaled."""

    wanted: dict[str, int]
    """Number of workers by role; the other role stays as it is."""


class StopRun(Message, frozen=True):
    """End the run as Ctrl-C does: after the step in work, which is saved. A second request ends it at once."""

    now: bool = False
    """Whether to end it at once; nothing is saved."""


class Progress(Message, frozen=True):
    """One line for the operator."""

    text: str


class Scaled(Message, frozen=True):
    """The request of the operator is met."""

    present: dict[str, int]
    """Number of ready workers by role."""


class Leaving(Message, frozen=True):
    """A policy that has peers wants to leave after the step."""


class Leave(Message, frozen=True):
    """Reply to Leaving."""

    save: bool
    """True: no other policy stays that has the weights: save a checkpoint, then send Goodbye. False: the others go on
    already."""


class Goodbye(Message, frozen=True):
    pass


class Fatal(Message, frozen=True):
    """The worker failed."""

    message: str
    user: bool
    """True: an error that the user can fix; the message is shown without the worker's name."""
    out_of_memory: bool = False
    """Whether the worker's device has too little memory."""
    lost: bool = False
    """Whether a process died, rather than raised an error."""


ToLedger = (
    Ready
    | Heartbeat
    | RequestLeases
    | Deliver
    | Failed
    | Return
    | RequestBatch
    | PayloadsUnreadable
    | PeersLost
    | Vote
    | CheckpointDone
    | Leaving
    | Goodbye
)
"""Messages of workers to the ledger."""
FromLedger = Welcome | Grant | NoMore | Cancel | Ack | Reject | Remesh | Batch | Committed | LineageRolledBack | Leave
"""Messages of the ledger to workers."""
ToController = ToLedger | Rejoin | Phase | StepDone | Validated | Alarm | Fatal | StoreSet | StoreGet | Scale | StopRun
ToOperator = Progress | Scaled | Refused
ToWorker = (
    Welcome
    | Grant
    | Cancel
    | Release
    | SyncFrom
    | Remesh
    | Batch
    | Committed
    | LineageRolledBack
    | Reject
    | Stop
    | Drain
    | Leave
    | Refused
    | StoreValue
)
