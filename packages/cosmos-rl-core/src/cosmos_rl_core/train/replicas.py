"""Sums over the policy replicas that train together: rank i of each replica with rank i of the others.

    group = ReplicaGroup(store, place=0, count=2, device=device, is_over=is_over, agree=ranks.gather, timeout_s=600)
    totals = group.sum([gradient, ...])              # new tensors; the same call in every replica

A member that dies or hangs must not block the others, and a gloo operation cannot be aborted. So every wait polls, and
ends with EpochOver as soon as a member is lost. An operation that was given up keeps its buffers until it ends on its
own: sums are made in buffers of their own, never in the gradients.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_rl_core.errors import EpochOver, PeersUnreachable

BUCKET_BYTES = 32 << 20
"""Bytes of gradients in one all-reduce."""
_SIZE_BYTES, _SHORT_BYTES = 8, 4096
"""Bytes of a length, and of the first message of `gather`: shorter data needs no second one."""
PEER_S = 60.0
"""Maximum seconds to connect to a replica that is there."""
POLLED_S = 2.0
"""Seconds after a look at an operation in work in which a rank counts as waiting."""
LOOPBACK = "127.0.0.1"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 5e-3
_WORKING, _DONE, _LOST = b"w", b"d", b"l"
_Operation = tuple[Any, Any]
"""A torch `Work` or `_InThread`, and what it reads or writes."""


_abandoned: list[tuple[Any, Sequence[_Operation]]] = []
"""Groups with operations that were given up. Their buffers may still be written, and torch's destructor of a group
waits for its operations: they are kept until these have ended."""


class _InThread:
    """Work that blocks, in a thread of its own: connecting, and sends and receives, which gloo completes in `wait`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:  # raised by `wait`; torch wraps errors of the store in several ways
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def wait(self) -> None:
        """Raise RuntimeError if the work failed."""
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


@dataclass(slots=True)
class Waiting:
    """A rank's waits for other policy replicas, for heartbeats. Written and read by different threads."""

    completed: int = 0
    """Operations with other replicas that are done."""
    polled_at: float = -math.inf
    """Time of the last look at an operation in work, by the monotonic clock."""

    @property
    def is_now(self) -> bool:
        """Whether the rank waits for others, and can still leave the wait: no other rank of its replica hangs."""
        return time.monotonic() - self.polled_at < POLLED_S


class ReplicaGroup:
    """One rank's group with the same rank of all other replicas. Every call is made in all of them, in one order."""

    def __init__(
        self,
        store: dist.Store,
        *,
        place: int,
        count: int,
        device: torch.device,
        is_over: Callable[[], bool],
        agree: Callable[[bytes], list[bytes]],
        timeout_s: float,
        peer_s: float = PEER_S,
        waiting: Waiting | None = None,
        address: str = "",
    ) -> None:
        """Connect to the others. Raises EpochOver if one of them is lost meanwhile, PeersUnreachable if the connection
        to one that is there takes longer than `peer_s`.

        store: shared by the ranks of this group alone. place: of this replica among `count`. is_over: whether the
        controller has formed another mesh. agree: exchanges bytes between the ranks of this replica, so that all of
        them see the same outcome. waiting: updated in every wait. address: of this machine, to listen on.
        """
        self.place, self.count = place, count
        self._device = device
        self._is_over, self._agree, self._timeout_s = is_over, agree, timeout_s
        self._waiting = waiting or Waiting()
        self._group: Any = None
        _abandoned[:] = [each for each in _abandoned if not all(work.is_completed() for work, _ in each[1])]
        try:
            pairs = self._meet_all(store, address=address, peer_s=peer_s)
            connect = partial(_connect, store, device=device, address=address, timeout_s=timeout_s)
            connecting = _InThread(partial(connect, place=place, count=count))
            self._finish([(connecting, store)])
        except PeersUnreachable:
            raise
        except EpochOver as error:
            raise EpochOver("no connection to the other policy replicas") from error
        self._group = connecting.result
        del pairs  # not before all replicas have used theirs

    def _meet_all(self, store: dist.Store, *, address: str, peer_s: float) -> Sequence[_InThread]:
        """Connect to each of the others alone. Raises EpochOver, and PeersUnreachable in all ranks of the replica."""

        def meet(peer: int) -> Any:
            first, last = sorted((self.place, peer))
            pair = dist.PrefixStore(f"{first}-{last}", store)
            pair.set(str(self.place), "here")
            pair.get(str(peer))
            place = int(self.place == last)
            group = _connect(pair, place=place, count=2, device=torch.device("cpu"), address=address, timeout_s=peer_s)
            group.allreduce([torch.ones(1)]).wait()
            return group

        meetings = [_InThread(partial(meet, peer)) for peer in range(self.count) if peer != self.place]
        self._finish([(_InThread(partial(_join, meetings)), store)])
        peers = (peer for peer in range(self.count) if peer != self.place)
        lost = [peer for peer, meeting in zip(peers, meetings) if meeting.failed]
        if found := {place for places in self._agree(bytes(lost)) for place in places}:
            raise PeersUnreachable(tuple(sorted(found)))
        return meetings

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum of each tensor over the replicas, in new memory. Raises EpochOver."""
        buckets = [(each, torch.cat([tensors[i].reshape(-1) for i in each])) for each in _buckets(tensors)]
        self._finish([(self._group.allreduce([flat]), flat) for _, flat in buckets])
        totals: dict[int, Tensor] = {}
        for each, flat in buckets:
            sizes = [tensors[i].numel() for i in each]
            totals |= {i: part.view(tensors[i].shape) for i, part in zip(each, flat.split(sizes))}
        return [totals[i] for i in range(len(tensors))]

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of every replica, in the order of their places. Raises EpochOver."""
        sized = len(data).to_bytes(_SIZE_BYTES, "little") + data
        found = self._gathered(sized[:_SHORT_BYTES], _SHORT_BYTES)
        sizes = [_SIZE_BYTES + int.from_bytes(each[:_SIZE_BYTES], "little") for each in found]
        if max(sizes) > _SHORT_BYTES:
            rests = self._gathered(sized[_SHORT_BYTES:], max(sizes) - _SHORT_BYTES)
            found = [first + rest for first, rest in zip(found, rests)]
        return [each[_SIZE_BYTES:size] for each, size in zip(found, sizes)]

    def send(self, tensors: Sequence[Tensor], *, to: int) -> None:
        """Send contiguous tensors to the replica at place `to`, which receives them. Raises EpochOver."""
        self._transfer(tensors, lambda each, tag: self._group.send([each], to, tag))

    def receive(self, tensors: Sequence[Tensor], *, source: int) -> None:
        """Fill contiguous tensors from the replica at place `source`. Raises EpochOver."""
        self._transfer(tensors, lambda each, tag: self._group.recv([each], source, tag))

    def _transfer(self, tensors: Sequence[Tensor], start: Callable[[Tensor, int], dist.Work]) -> None:
        works = [start(each, tag) for tag, each in enumerate(tensors) if each.numel()]
        self._finish([(_InThread(lambda: [work.wait() for work in works]), tensors)])

    def send_bytes(self, data: bytes, *, to: int) -> None:
        self.send([torch.tensor([len(data)], device=self._device)], to=to)
        self.send([torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)], to=to)

    def receive_bytes(self, *, source: int) -> bytes:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        self.receive([size], source=source)
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self.receive([data], source=source)
        return data.cpu().numpy().tobytes()

    def _gathered(self, data: bytes, size: int) -> list[bytes]:
        """Return `size` bytes of each replica: its data, filled up with zeros."""
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(self._device)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        self._finish([(self._group.allgather([found], [mine]), mine)])
        return [each.cpu().numpy().tobytes() for each in found]

    def _finish(self, operations: Sequence[_Operation]) -> None:
        """Wait until all operations are done in all ranks of this replica; raise EpochOver if that cannot be."""
        pause_s, deadline, completed = _FIRST_PAUSE_S, time.monotonic() + self._timeout_s, 0
        while True:
            found = self._agree(self._state(operations, deadline=deadline))
            before, completed = completed, sum(work.is_completed() for work, _ in operations)
            self._waiting.completed += completed - before
            self._waiting.polled_at = time.monotonic()
            if _LOST in found:
                _abandoned.append((self._group, operations))
                raise EpochOver("a policy replica of the mesh was lost")
            if _WORKING not in found:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _state(self, operations: Sequence[_Operation], *, deadline: float) -> bytes:
        if self._is_over() or time.monotonic() > deadline:
            return _LOST
        if not all(work.is_completed() for work, _ in operations):
            return _WORKING
        try:
            for work, _ in operations:
                work.wait()  # raises the operation's error
        except RuntimeError:
            return _LOST
        return _DONE


def _join(works: Sequence[_InThread]) -> None:
    for work in works:
        work.join()


def _connect(store: dist.Store, *, place: int, count: int, device: torch.device, address: str, timeout_s: float) -> Any:
    """A bare process group: `new_group` needs all members in the default group, which cannot change."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, place, count, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stubs
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address or LOOPBACK)]
    return dist.ProcessGroupGloo(store, place, count, options)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield indices of tensors that are summed together: of one dtype, up to BUCKET_BYTES unless one is larger."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(i)
    for indices in by_dtype.values():
        bucket, size = [], 0
        for i in indices:
            if bucket and size + tensors[i].nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(i)
            size += tensors[i].nbytes
        yield bucket
