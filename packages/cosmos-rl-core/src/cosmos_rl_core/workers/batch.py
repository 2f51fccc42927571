"""From a Batch message to this rank's share of the trainer's input.

Batch message -> each rank reads the spooled groups -> ranks exchange the groups they could not read
              -> all ranks have all groups, or all report the same loss -> batcher, collation; rollouts file
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from cosmos_rl_core import assemble
from cosmos_rl_core.algorithms.advantages import build_step_advantages
from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.interfaces import Policy
from cosmos_rl_core.observe.rollouts import RolloutFiles, write_dropped, write_rollouts
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.stages import microbatch_multiple
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.rollout.spool.reader import PayloadGone, SpoolReader
from cosmos_rl_core.rollout.spool.store import Spooled
from cosmos_rl_core.train.batch_part import BatchPart
from cosmos_rl_core.train.batcher import Batcher
from cosmos_rl_core.train.comparison import EngineComparison
from cosmos_rl_core.train.replicas import ReplicaGroup
from cosmos_rl_core.types import Prompt, Share, TrainStep
from cosmos_rl_core.wire.payload import decode_compared, decode_group
from cosmos_rl_core.workers.context import Assignment
from cosmos_rl_core.workers.mesh import PolicyMesh
from cosmos_rl_core.workers.ranks import Ranks


def batch_share(config: RunConfig, mesh: ReplicaMesh | None) -> Share:
    """The part of each batch that this rank trains on."""
    if mesh is None:
        return Share()
    return replace(mesh.share, multiple=microbatch_multiple(config.policy.parallel))


class BatchMaker:
    """Turns a Batch message into the trainer's input, and starts writing the step's rollouts to a file."""

    def __init__(
        self, assignment: Assignment, policy: Policy, *, share: Share, compare: EngineComparison | None
    ) -> None:
        """share: of this rank among those of its replica. compare: engine and policy, by rollouts that groups carry."""
        self._at, self._policy, self._share, self._compare = assignment, policy, share, compare
        domain, config = assignment.domain, assignment.config
        texts = partial(domain.term_texts, config.model)
        write = partial(write_rollouts, term_texts=texts, term_groups=config.logging.term_groups)
        self.files = RolloutFiles(assignment.run_dir / "rollouts", every=config.logging.rollouts_every, write=write)
        self._batchers: dict[Share, Batcher] = {}

    def __call__(self, message: p.Batch, payloads: Payloads, replicas: PolicyMesh) -> TrainStep:
        """Return this rank's work. `replicas`: the policy replicas that train together. Raises EpochOver."""
        at, share = self._at, self._share.of_replica(replicas.place, replicas.count)
        writes = replicas.place == 0 and at.context.leads
        with at.context.timeline.span("collate", step=message.step):
            if at.config.is_sft:
                step = self._supervised(message, payloads, share)
            else:
                step = self._of_groups(message, payloads, self._batcher(share, writes=writes), replicas.group)
        if writes and step.rows_dropped:
            write_dropped(at.run_dir, step=message.step, reasons=step.rows_dropped)
        return step

    def _batcher(self, share: Share, *, writes: bool) -> Batcher:
        """Return the batcher of this rank's share among those of all policy replicas.

        writes: whether this rank writes the files of the step; the others send it the texts of their groups.
        """
        if share not in self._batchers:
            config, domain = self._at.config, self._at.domain
            self._batchers[share] = Batcher(
                assemble.build_collate(config, domain, share),
                max_staleness=config.sync.max_staleness,
                advantages=None if config.is_taught_alone else build_step_advantages(config.algorithm),
                data_term=assemble.build_data_term(config, domain, self._policy, share),
                minibatches=config.policy.minibatches,
                epochs=config.policy.epochs,
                seed=config.run.seed,
                on_groups=self.files.begin if writes else None,
            )
        return self._batchers[share]

    def _of_groups(
        self, message: p.Batch, payloads: Payloads, batcher: Batcher, replicas: ReplicaGroup | None
    ) -> TrainStep:
        groups, compared = [decode_group(encoded) for encoded in payloads.encoded], {}
        if self._compare is not None:
            compared = self._compare(map(decode_compared, payloads.encoded), step=message.step)
            self._compare.check_adapters(groups, step=message.step)
        if message.part is None:
            step = batcher(groups, step=message.step)
        else:
            assert replicas is not None, "parts are given to replicas that train together"
            collate = assemble.build_collate(self._at.config, self._at.domain, self._share)
            part = BatchPart(groups, replicas, collate=collate, with_text=self.files.has(message.step))
            assert part.samples == message.samples, f"the parts of step {message.step} are not the batch"
            step = batcher(part.groups, step=message.step, part=part)
        return replace(step, metrics={**step.metrics, **payloads.metrics, **compared})

    def _supervised(self, message: p.Batch, payloads: Payloads, share: Share) -> TrainStep:
        at = self._at
        collate = assemble.build_collate_sft(at.config, at.domain, self._policy, share)
        rows = zip(message.samples, map(bytes, payloads.encoded), strict=True)
        batch = collate([_decode_row(sample, encoded) for sample, encoded in rows])
        if message.upcoming and message.step + 1 != at.last_step:
            at.domain.read_ahead([_decode_row(*each) for each in message.upcoming], policy=self._policy)
        return TrainStep(batches=(batch,), metrics={"terms": float(batch.num_terms)})


def _decode_row(sample: int, encoded: bytes) -> Prompt:
    origin, row = json.loads(encoded)
    return Prompt(sample_id=sample, row=row, origin=origin)


READS_AT_ONCE = 4
_decode_gone = msgspec.msgpack.Decoder(dict[int, str]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Payloads:
    """The payloads of one batch."""

    encoded: Sequence[bytes | memoryview]
    """One per sample, in the format of `wire.payload`."""
    spooled_bytes: int = 0
    """Total size of the spooled ones."""
    fetch_s: float = 0.0
    """Seconds for reading the spooled ones, including lost ones of earlier batches of the step."""
    lost: int = 0
    """Number of groups of the step that could not be read and were generated again."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of reading the spools; empty if no group was spooled."""
        if not self.spooled_bytes:
            return {}
        return {
            "spooled_bytes": float(self.spooled_bytes),
            "spool_fetch_s": self.fetch_s,
            "spool_lost": float(self.lost),
        }


class StepPayloads:
    """Reads the payloads of batches.

    payloads = await StepPayloads(reader, ranks).read(message)
    """

    def __init__(self, reader: SpoolReader, ranks: Ranks | None) -> None:
        """ranks: the replica's ranks, which must all call `read` with the same messages; None: a single rank."""
        self._reader = reader
        self._ranks = ranks
        self._slots = asyncio.Semaphore(READS_AT_ONCE)
        self._fetch_s = 0.0
        self._lost = 0

    async def read(self, message: p.Batch) -> Payloads | p.PayloadsUnreadable:
        """Return the bytes of all groups, or the groups that some rank could not read; equal on every rank."""
        started = time.perf_counter()
        contents = await asyncio.gather(*(self._read(payload) for payload in message.payloads))
        sizes = [payload.num_bytes for payload in message.payloads if isinstance(payload, Spooled)]
        if not sizes:
            return Payloads(encoded=[data for data in contents if not isinstance(data, PayloadGone)])
        pairs = zip(message.own, contents, strict=True)
        gone = await self._agree({sample: str(data) for sample, data in pairs if isinstance(data, PayloadGone)})
        self._fetch_s += time.perf_counter() - started
        if gone:
            self._lost += len(gone)
            samples = tuple(sorted(gone))
            return p.PayloadsUnreadable(
                step=message.step, epoch=message.epoch, samples=samples, reason=gone[samples[0]]
            )
        encoded = [data for data in contents if not isinstance(data, PayloadGone)]
        payloads = Payloads(encoded=encoded, spooled_bytes=sum(sizes), fetch_s=self._fetch_s, lost=self._lost)
        self._fetch_s, self._lost = 0.0, 0
        return payloads

    async def _read(self, payload: p.Payload) -> bytes | memoryview | PayloadGone:
        if isinstance(payload, bytes):
            return payload
        async with self._slots:
            try:
                return await self._reader.read(payload)
            except PayloadGone as error:
                return error

    async def _agree(self, gone: dict[int, str]) -> dict[int, str]:
        """Return the groups that any rank could not read, with the first such rank's reason."""
        if self._ranks is None:
            return gone
        gathered = await self._ranks.gather(msgspec.msgpack.encode(gone))
        return {sample: reason for data in reversed(gathered) for sample, reason in _decode_gone(data).items()}
