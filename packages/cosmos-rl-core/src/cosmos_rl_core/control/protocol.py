"""The messages between workers and controller. Fields are only ever appended, with defaults.

worker                                      controller
  Ready             ->      <- Welcome        the controller answers the connection itself
  Heartbeat         ->                        every second, from the worker's main loop
rollout
  RequestLeases     ->      <- Grant          prompts to answer
  Deliver | Failed  ->      <- Cancel         a group or a reference to it, or the reason there is none
                            <- Release        files of the spool that are no longer needed
                            <- SyncFrom       the address to pull weights from
policy
  RequestBatch      ->      <- Batch          groups of one step, or references to them
  PayloadsLost      ->                        some cannot be read; another batch follows
  Vote              ->      <- Committed      gradients are ready; apply the step
  StepDone          ->                        metrics and the published version
  Validated         ->                        the loss on held-out rows
  CheckpointDone | Alarm ->                   a checkpoint was written, or could not be
both                        <- Stop
  Goodbye | Fatal   ->

The ledger (ledger/ledger.py) takes the workers' messages as they are and answers with messages of this file. `Ack`,
`NoMore`, `Reject`, `Remesh` and `RolledBack` are decided by it but not sent: they matter to a worker that outlives its
connection, and a worker ends with its connection today.
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


class Welcome(Message, frozen=True, tag=True, array_like=True):
    """First frame to every worker."""

    incarnation: int
    """Number of this process of the replica; a new process under the same name gets a higher one."""
    lineage: int
    version: int
    """Committed steps on the lineage."""
    generation: int = 0
    """How often a controller took over from the journal; workers ignore controllers of lower generations."""
    config: str = ""
    """The resolved recipe, TOML."""
    run_dir: str = ""
    resume_from: str = ""
    """Checkpoint to load, empty for a fresh start."""
    last_step: int = 0
    """Version the run ends with; 0 where it is not known."""
    kept: list[str] = []
    """Rollout: files that an earlier process of this replica has spooled and that are still needed."""


class Ready(Message, frozen=True, tag=True, array_like=True):
    """The worker has built its parts."""

    address: str = ""
    """Policy: where its weights are published. Rollout: where its spool is read."""
    version: int = 0


class Heartbeat(Message, frozen=True, tag=True, array_like=True):
    progress: int = 0
    """Counter of work done; it stops rising in a worker that is alive but stuck."""
    busy_s: float = 0.0
    """Seconds with work since the start."""
    holding: tuple[int, ...] = ()
    """Samples a rollout replica works on or has yet to deliver; naming them renews their leases."""


class RequestLeases(Message, frozen=True, tag=True, array_like=True):
    version: int
    """Oldest weights the replica can still sample a term of the new groups from."""
    capacity: int
    """Groups it can start now. A newer request replaces an older one."""
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


class Grant(Message, frozen=True, tag=True, array_like=True):
    """Answer to RequestLeases: at least one prompt, at most the capacity that was asked for."""

    prompts: tuple[LeasedPrompt, ...]


class NoMore(Message, frozen=True, tag=True, array_like=True):
    """Answer to RequestLeases or RequestBatch: the run needs nothing more from this replica."""

    reason: str


class Cancel(Message, frozen=True, tag=True, array_like=True):
    """The replica no longer holds this lease and may stop working on it."""

    sample: int


class Deliver(Message, frozen=True, tag=True, array_like=True):
    """A group is complete. Repeated until answered with Ack or Reject."""

    sample: int
    attempt: int
    min_version: int
    max_version: int
    num_terms: int
    payload: Payload = b""
    evaluation: bool = False


class Ack(Message, frozen=True, tag=True, array_like=True):
    """A Deliver or Failed is settled; the replica may forget the group."""

    sample: int


class Reject(Message, frozen=True, tag=True, array_like=True):
    """A message changed nothing. Repeating it does not help."""

    incarnation: int
    """Of the rejected message."""
    reason: str
    sample: int = -1
    """The sample of a rejected Deliver, which the replica discards."""
    fenced: bool = False
    """True: a newer process took this replica's place, or it was given up; it must join anew or exit."""


class Release(Message, frozen=True, tag=True, array_like=True):
    paths: list[str]
    """Files of the replica's spool, as its references name them."""


class Failed(Message, frozen=True, tag=True, array_like=True):
    """A group could not be completed."""

    sample: int
    attempt: int
    reason: str
    """Starting with "filtered:" for a group left out on purpose, such as "filtered:zero_variance"."""
    final: bool = False
    """True: trying again cannot help."""
    evaluation: bool = False


class SyncFrom(Message, frozen=True, tag=True, array_like=True):
    address: str


class Remesh(Message, frozen=True, tag=True, array_like=True):
    """The set of policy replicas that train together changed: leave the old groups, form new ones, ask again."""

    epoch: int
    members: tuple[str, ...]
    version: int
    lineage: int


class RequestBatch(Message, frozen=True, tag=True, array_like=True):
    """A policy replica wants the batch of a step. Asking again before the commit gives the same batch."""

    step: int
    epoch: int = 0
    """The mesh epoch the replica takes part in; filled in by the server."""


class Batch(Message, frozen=True, tag=True, array_like=True):
    step: int
    epoch: int
    samples: tuple[int, ...]
    """Ascending; empty when the run has no more batches."""
    payloads: list[Payload] = []
    """One a sample: its group, or its row (JSON) in a supervised run."""


class PayloadsLost(Message, frozen=True, tag=True, array_like=True):
    """Groups of a batch cannot be read. The answer is another batch of the same step, in a later epoch."""

    step: int
    epoch: int
    samples: tuple[int, ...]
    reason: str


class Vote(Message, frozen=True, tag=True, array_like=True):
    """A policy replica has the gradients of a step and can apply them."""

    step: int
    epoch: int


class Committed(Message, frozen=True, tag=True, array_like=True):
    """All members voted: apply the gradients of `step`. Version `step + 1` exists."""

    step: int
    next_sample: int
    """First id of the prompt stream that was never issued."""
    unfinished: tuple[int, ...]
    """Issued ids that no step up to this one has trained on; with `next_sample` what a checkpoint has to keep."""


class StepDone(Message, frozen=True, tag=True, array_like=True):
    step: int
    version: int
    metrics: dict[str, float]


class Validated(Message, frozen=True, tag=True, array_like=True):
    """A supervised replica's own evaluation."""

    version: int
    metrics: dict[str, float]


class RolledBack(Message, frozen=True, tag=True, array_like=True):
    """Training goes on from `version` on a new lineage; weights of other lineages are void."""

    lineage: int
    version: int


class CheckpointDone(Message, frozen=True, tag=True, array_like=True):
    """A checkpoint of the weights after `step` steps is complete."""

    step: int
    path: str = ""
    lineage: int = 0


class Alarm(Message, frozen=True, tag=True, array_like=True):
    """Something went wrong that the run survives, such as a checkpoint that could not be written; the user is told."""

    message: str


class Stop(Message, frozen=True, tag=True, array_like=True):
    """End cleanly: a policy replica saves first."""

    reason: str


class Goodbye(Message, frozen=True, tag=True, array_like=True):
    pass


class Fatal(Message, frozen=True, tag=True, array_like=True):
    """The worker cannot go on."""

    message: str
    user: bool
    """True: something the user can mend; the message stands alone."""


ToLedger = (
    Ready | Heartbeat | RequestLeases | Deliver | Failed | RequestBatch | PayloadsLost | Vote | CheckpointDone | Goodbye
)
"""Messages of workers that the ledger decides about."""
FromLedger = Welcome | Grant | NoMore | Cancel | Ack | Reject | Remesh | Batch | Committed | RolledBack
"""Messages to workers that the ledger decides."""
ToController = ToLedger | StepDone | Validated | Alarm | Fatal
ToWorker = Welcome | Grant | Cancel | Release | SyncFrom | Batch | Committed | Stop
