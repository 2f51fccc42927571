"""Groups in flight from rollout replicas to the policy.

delivered -> held -> in a batch -> its step committed -> released
                         |
                         +-> unreadable -> released, the sample is generated again

A large group is held as a reference to the spool of the replica that generated it (rollout/spool/store.py).
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

import msgspec

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import records
from cosmos_rl_core.control.ledger.samples import ASSIGNED, READY, Sample
from cosmos_rl_core.control.peers import Peers, WorkerPeer
from cosmos_rl_core.data.source import PromptSource
from cosmos_rl_core.rollout.spool.store import Spooled
from cosmos_rl_core.types import Prompt


@dataclass(frozen=True, slots=True)
class InflightGroup:
    """A group in flight."""

    payload: p.Payload
    replica: str
    """The rollout replica that generated it."""
    group: tuple[int, int]
    """Sample and attempt."""
    num_terms: int = 0
    file: str = field(default="", compare=False)
    """The file that the policy may still read, of a group that has come a second time without it."""

    @property
    def files(self) -> list[str]:
        """The files to remove with the group."""
        return [self.payload.path] if isinstance(self.payload, Spooled) else [self.file] if self.file else []


@dataclass(slots=True, kw_only=True)
class Batches:
    """Holds the delivered group of each sample until its step is committed."""

    source: PromptSource
    supervised: bool
    """True: a sample's payload is its row, read on demand."""
    peers: Peers
    _groups: dict[int, InflightGroup] = field(default_factory=dict)
    _spooled: dict[str, dict[int, str]] = field(default_factory=dict)
    """Held files by replica and sample."""
    awaited: set[int] = field(default_factory=set)
    """After a restart: delivered samples whose groups have not come again from their replicas."""
    _assigned: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Step -> samples of its batch, until its commit."""
    _parts: tuple[tuple[int, ...], int, list[tuple[int, ...]]] = ((), 0, [])
    """The last batch that was cut, the number of its parts, and these."""

    def deliver(
        self, message: p.Deliver, *, replica: str, decided: Iterable[records.Record], entry: Sample | None
    ) -> bool:
        """Hold a group if the ledger accepted it, else release it: late groups and duplicates are not accepted.

        entry: the sample after the message. A replica repeats the groups that were not released; one that leaves sends
        those in its files. Returns whether this was the last awaited one.
        """
        group = InflightGroup(message.payload, replica, (message.sample, message.attempt), message.num_terms)
        earlier = self._groups.get(message.sample)
        if any(isinstance(record, records.Delivered) for record in decided) or (
            earlier is None and _is_of(entry, message, replica)
        ):
            self._groups[message.sample] = group
            if isinstance(group.payload, Spooled):
                self._spooled.setdefault(replica, {})[message.sample] = group.payload.path
        elif earlier is not None and _is_content_of(earlier, group) and _is_of(entry, message, replica):
            self._replace(message.sample, earlier, group)
        elif earlier != group:
            self._release([group])
        is_last = self.awaited == {message.sample}
        if message.sample in self._groups:
            self.awaited.discard(message.sample)
        return is_last and not self.awaited

    def _replace(self, sample: int, earlier: InflightGroup, group: InflightGroup) -> None:
        """Hold a group in place of the reference to its file, which is removed unless the policy may be reading it."""
        assert isinstance(earlier.payload, Spooled)
        path = earlier.payload.path
        del self._spooled[earlier.replica][sample]
        if any(sample in samples for samples in self._assigned.values()):
            self._groups[sample] = replace(group, file=path)
            return
        self._groups[sample] = group
        if (peer := self.peers.by_name.get(group.replica)) is not None:
            peer.post(p.Release([path]))

    def lose(self, decided: Iterable[records.Record]) -> list[int]:
        """Release the groups that the ledger recorded as unreadable, and return their samples."""
        lost = [s for record in decided if isinstance(record, records.PayloadsLost) for s in record.samples]
        self._drop(lost)
        return lost

    def missing(self, samples: Iterable[int]) -> tuple[int, ...]:
        """Return the samples whose groups nobody holds."""
        return () if self.supervised else tuple(sample for sample in samples if sample not in self._groups)

    def with_payloads(self, batch: p.Batch, policy: WorkerPeer) -> p.Batch:
        """Return the batch with the payloads of the policy replica's part.

        In a supervised run that is every row: rows are small, and what is made of them may depend on the whole batch.
        """
        self._assigned[batch.step] = batch.samples
        part = None if self.supervised else self._part(batch.samples, policy)
        samples = batch.samples if part is None else part
        upcoming = self.source.upcoming(max(batch.samples), len(batch.samples)) if self.supervised else []
        return msgspec.structs.replace(
            batch,
            payloads=[self._payload(sample) for sample in samples],
            part=part,
            upcoming=[(prompt.sample_id, _encode_row(prompt)) for prompt in upcoming],
        )

    def _part(self, samples: tuple[int, ...], policy: WorkerPeer) -> tuple[int, ...] | None:
        """Return the samples of one policy replica; all have nearly equal numbers of terms.

        None, which is all, where a replica trains alone or would get none.
        """
        count = len(policy.mesh)
        if not 1 < count <= len(samples):
            return None
        if self._parts[:2] != (samples, count):
            costs = {sample: max(1, self._groups[sample].num_terms) for sample in samples}
            self._parts = samples, count, parts_of(costs, count)
        return self._parts[2][policy.mesh.index(policy.name)]

    def restarted(self, ready: Iterable[int], *, step: int, assigned: tuple[int, ...]) -> None:
        """Await the groups that are ready, and those of the batch of `step`, which a policy may have in work."""
        self._assigned[step] = assigned
        self.awaited.update(self.missing((*ready, *assigned)))

    def committed(self, step: int) -> bool:
        """Release the groups of a step's batch. No-op for a commit that is repeated: the batch in work is kept.

        Returns whether the last awaited groups were those of the batch.
        """
        samples, before = self._assigned.pop(step, ()), len(self.awaited)
        self._drop(samples)
        self.awaited.difference_update(samples)
        return before > len(self.awaited) == 0

    def roll_back(self, version: int, *, ready: Set[int]) -> None:
        """Forget the batches of the steps from `version` on, and release the groups of samples that are not `ready`."""
        self._assigned = {step: samples for step, samples in self._assigned.items() if step < version}
        self.awaited &= ready
        self._drop(self._groups.keys() - ready)

    def kept(self, replica: str) -> list[str]:
        """Return the files of a replica that are still needed."""
        return list(self._spooled.get(replica, {}).values())

    def _payload(self, sample: int) -> p.Payload:
        if self.supervised:
            return _encode_row(self.source[sample])
        group = self._groups[sample]
        if isinstance(group.payload, bytes):
            return group.payload
        maker = self.peers.by_name.get(group.replica)
        return msgspec.structs.replace(group.payload, address=maker.address if maker else "")

    def _drop(self, samples: Iterable[int]) -> None:
        dropped = [(sample, self._groups.pop(sample)) for sample in samples if sample in self._groups]
        for sample, group in dropped:
            if isinstance(group.payload, Spooled):
                del self._spooled[group.replica][sample]
        self._release([group for _, group in dropped])

    def _release(self, groups: Iterable[InflightGroup]) -> None:
        """Make the replicas forget groups and remove files.

        A new process without a Welcome yet gets the list of kept files with it; one on a new connection repeats its
        groups.
        """
        of_replica: dict[str, list[InflightGroup]] = {}
        for group in groups:
            of_replica.setdefault(group.replica, []).append(group)
        messages: dict[str, p.ToWorker] = {}
        for replica, released in of_replica.items():
            peer = self.peers.by_name.get(replica)
            if peer is not None and peer.is_welcome:
                files = [path for group in released for path in group.files]
                messages[replica] = p.Release(files, tuple(group.group for group in released))
        self.peers.post_each(messages)


def _encode_row(prompt: Prompt) -> bytes:
    return json.dumps([prompt.origin, dict(prompt.row)]).encode()


def _is_content_of(earlier: InflightGroup, group: InflightGroup) -> bool:
    """Return whether a replica sends the content of the file that it has sent a reference to."""
    is_same = (earlier.replica, earlier.group, earlier.num_terms) == (group.replica, group.group, group.num_terms)
    return is_same and isinstance(earlier.payload, Spooled) and isinstance(group.payload, bytes)


def _is_of(entry: Sample | None, message: p.Deliver, replica: str) -> bool:
    """Return whether a repeated group is the one that the ledger has accepted."""
    return (
        entry is not None
        and entry.state in (READY, ASSIGNED)
        and (entry.replica, entry.min_version, entry.max_version, entry.num_terms)
        == (replica, message.min_version, message.max_version, message.num_terms)
    )


def parts_of(costs: Mapping[int, int], count: int) -> list[tuple[int, ...]]:
    """Return the samples of `costs` in `count` parts of nearly equal cost, each ascending; the costliest sample first.

    The part with the least cost so far takes the next one. None is empty where there are as many samples as parts.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, -place) for place in reversed(range(count))]  # of equal ones the last, so that the first has the least
    for sample in sorted(costs, key=lambda sample: (-costs[sample], sample)):
        load, place = loads[0]
        parts[-place].append(sample)
        heapq.heapreplace(loads, (load + costs[sample], place))
    return [tuple(sorted(part)) for part in parts]
