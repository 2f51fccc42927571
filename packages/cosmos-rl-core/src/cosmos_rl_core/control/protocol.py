"""The messages between controller and workers. Fields are only ever appended, with defaults.

worker                                      controller
  Ready             ->                        Welcome is the answer to the connection itself
  Heartbeat         ->                        (every second, from the worker's main loop)
rollout
  RequestLeases     ->      <- Grant          prompts to answer
  Deliver | Failed  ->      <- Cancel         a group or where it lies, or the reason there is none
                            <- Release        files of the spool that nobody needs any more
                            <- SyncFrom       where to pull weights
policy
  RequestBatch      ->      <- Batch          groups of one step, or where they lie
  PayloadsLost      ->                        some cannot be read; another batch comes
  Vote              ->      <- Committed      gradients are there; take the step
  StepDone          ->                        metrics, and the version that is published
  Validated         ->                        the loss on held-out rows
  CheckpointDone | Alarm ->                   a checkpoint is there, or could not be written
both                        <- Stop
  Goodbye | Fatal   ->
"""

from __future__ import annotations

import msgspec

from cosmos_rl_core.rollout.spool.store import Spooled

Payload = bytes | Spooled
"""An encoded RolloutGroup, or where a large one lies; told apart by their type on the wire."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages: an array on the wire, told apart by its first element."""


class Welcome(Message, frozen=True, tag=True, array_like=True):
    """First frame to every worker."""

    config: str
    """The resolved recipe, TOML."""
    run_dir: str
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
    progress: int
    """Counts work done; a worker that is alive but stuck shows the same number."""
    busy_s: float
    """Seconds with work since the start."""
    holding: list[int]
    """Samples a rollout replica works on; naming them renews their leases."""


class RequestLeases(Message, frozen=True, tag=True, array_like=True):
    version: int
    """Weights the replica holds."""
    capacity: int
    """Groups it can take now. A newer request replaces an older one."""


class LeasedPrompt(Message, frozen=True, tag=True, array_like=True):
    sample: int
    attempt: int
    row: bytes
    """The dataset's row, JSON."""
    origin: str
    evaluation: bool = False


class Grant(Message, frozen=True, tag=True, array_like=True):
    prompts: list[LeasedPrompt]


class Cancel(Message, frozen=True, tag=True, array_like=True):
    sample: int


class Deliver(Message, frozen=True, tag=True, array_like=True):
    sample: int
    attempt: int
    min_version: int
    max_version: int
    num_terms: int
    payload: Payload
    evaluation: bool = False


class Release(Message, frozen=True, tag=True, array_like=True):
    paths: list[str]
    """Files of the replica's spool, as its references name them."""


class Failed(Message, frozen=True, tag=True, array_like=True):
    sample: int
    attempt: int
    reason: str
    final: bool
    evaluation: bool = False


class SyncFrom(Message, frozen=True, tag=True, array_like=True):
    address: str


class RequestBatch(Message, frozen=True, tag=True, array_like=True):
    step: int


class Batch(Message, frozen=True, tag=True, array_like=True):
    step: int
    epoch: int
    samples: list[int]
    payloads: list[Payload]
    """Those of the samples, or rows (JSON) in a supervised run; empty when the run has no more batches."""


class PayloadsLost(Message, frozen=True, tag=True, array_like=True):
    """Groups of a batch cannot be read. The answer is another batch of the same step, in a later epoch."""

    step: int
    epoch: int
    samples: list[int]
    reason: str


class Vote(Message, frozen=True, tag=True, array_like=True):
    step: int
    epoch: int


class Committed(Message, frozen=True, tag=True, array_like=True):
    step: int
    next_sample: int
    """First id of the prompt stream that was never issued."""
    unfinished: list[int]
    """Issued ids that no step up to this one has trained on; with `next_sample` what a checkpoint has to keep."""


class StepDone(Message, frozen=True, tag=True, array_like=True):
    step: int
    version: int
    metrics: dict[str, float]


class Validated(Message, frozen=True, tag=True, array_like=True):
    """A supervised replica's own evaluation."""

    version: int
    metrics: dict[str, float]


class CheckpointDone(Message, frozen=True, tag=True, array_like=True):
    step: int
    path: str


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


ToController = (
    Ready
    | Heartbeat
    | RequestLeases
    | Deliver
    | Failed
    | RequestBatch
    | PayloadsLost
    | Vote
    | StepDone
    | Validated
    | CheckpointDone
    | Alarm
    | Goodbye
    | Fatal
)
ToWorker = Welcome | Grant | Cancel | Release | SyncFrom | Batch | Committed | Stop
