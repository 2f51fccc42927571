"""Sums over the policy replicas that train together: rank i of each replica with rank i of the others.

    group = ReplicaGroup(store, MeshPlace(0, count=2), device=device, is_over=is_over, agree=ranks.gather, limits=...)
    group.sum([gradient, ...])                       # in place; the same call in every replica
    group.end(store.close)                           # the epoch is over

A member that dies or hangs must not block the others, and a gloo operation cannot be aborted. So every wait polls, and
ends with EpochOver as soon as a member is lost. An operation that was given up keeps its buffers until it ends on its
own: sums are made in buffers of their own, a few at a time, and then copied to the gradients. NCCL can abort: its group
is aborted then.

State is sent in pieces, in a thread; each piece counts as progress, and the limit of time is that of a piece.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_rl_core.errors import EpochOver, PeersUnreachable
from cosmos_rl_core.parallel.device import use_device
from cosmos_rl_core.train.byte_sums import WORD_BYTES, Checksum, packed, pieces, room_for, unpack

BUCKET_BYTES = 32 << 20
"""Bytes of gradients in one all-reduce."""
WINDOW = 8
"""Buckets in memory at a time. They are begun and finished by halves: one exchange between ranks is for a half."""
_SIZE_BYTES, _SHORT_BYTES = 8, 4096
"""Bytes of a length, and of the first message of `gather`: shorter data needs no second one."""
PEER_S = 30.0
"""Maximum seconds to connect to a replica that is there."""
NEWCOMER_S = 5.0
"""Likewise to one that was not in the last mesh: the others stand still meanwhile, and one that fails comes again."""
LONGEST = timedelta(days=365)
"""Practically unlimited."""
POLLED_S = 2.0
"""Seconds after a look at an operation in work in which a rank counts as waiting."""
LOOPBACK = "127.0.0.1"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 5e-3
_WORKING, _DONE, _LOST = b"w", b"d", b"l"
_MOVED = b"+"
"""After a state: something was completed since the last exchange."""
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_Operation = tuple[Any, Any]
"""A torch `Work` or `_InThread`, and what it reads or writes."""
_Bucket = tuple[list[int], Any, Tensor]
"""Indices of tensors that are summed together, and the operation on their elements."""


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
        use_device()
        try:
            self.result = self._work()
        except Exception as error:  # raised by `wait`; torch wraps errors of the store in several ways
            self._error = error

    @property
    def num_completed(self) -> int:
        return int(self.is_completed())

    def give_up(self) -> None:
        """No-op: nobody waits for the result."""

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


class _Transfer(_InThread):
    """Sends or receives the pieces of tensors, and then their digest. Each piece counts as completed."""

    def __init__(self, group: Any, tensors: Sequence[Tensor], *, peer: int, device: torch.device) -> None:
        self._group, self._tensors, self._peer, self._device = group, tensors, peer, device
        self._num_completed = 0
        self._is_given_up = False
        self._writing = threading.Lock()
        super().__init__(self._transfer)

    @property
    def num_completed(self) -> int:
        return self._num_completed + int(self.is_completed())

    def give_up(self) -> None:
        """Return when nothing more is written into the tensors: they may be received anew."""
        with self._writing:
            self._is_given_up = True

    def _transfer(self) -> None:
        raise NotImplementedError

    def _completed(self) -> None:
        self._num_completed += 1
        if self._is_given_up:
            raise RuntimeError("the transfer was given up")


class _Send(_Transfer):
    def _transfer(self) -> None:
        checksum = Checksum(self._device)
        for piece in pieces(self._tensors):
            data = packed(piece, self._device)
            sending = self._group.send([data], self._peer, 0)
            checksum.add(data)  # while it is sent
            sending.wait()
            self._completed()
        digest = torch.frombuffer(bytearray(checksum.digest()), dtype=torch.uint8).to(self._device)
        self._group.send([digest], self._peer, 0).wait()


class _Receive(_Transfer):
    def _transfer(self) -> None:
        checksum = Checksum(self._device)
        last: tuple[Tensor, list[Tensor]] | None = None
        for piece in pieces(self._tensors):
            data = room_for(piece, self._device)
            receiving = self._group.recv([data], self._peer, 0)
            self._take(last, checksum)  # while the next one comes
            receiving.wait()
            last = data, piece
            self._completed()
        self._take(last, checksum)
        digest = torch.empty(WORD_BYTES, dtype=torch.uint8, device=self._device)
        self._group.recv([digest], self._peer, 0).wait()
        if digest.cpu().numpy().tobytes() != checksum.digest():
            raise RuntimeError("the state of the other policy replica was damaged on its way")

    def _take(self, received: tuple[Tensor, list[Tensor]] | None, checksum: Checksum) -> None:
        if received is None:
            return
        data, piece = received
        with self._writing:
            if not self._is_given_up:
                unpack(data, piece)
        checksum.add(data)


@dataclass(slots=True)
class RankWaits:
    """A rank's waits for other policy replicas, for heartbeats. Written and read by different threads."""

    completed: int = 0
    """Operations with other replicas that are done."""
    polled_at: float = -math.inf
    """Time of the last look at an operation in work, by the monotonic clock."""

    @property
    def is_now(self) -> bool:
        """Whether the rank waits for others, and can still leave the wait: no other rank of its replica hangs."""
        return time.monotonic() - self.polled_at < POLLED_S


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """The place of a replica in a mesh."""

    place: int
    count: int
    newcomers: Collection[int] = ()
    """Places of replicas for which the others must not wait for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLimits:
    """Limits of the waits for other replicas, in seconds."""

    timeout_s: float
    """For something to be completed."""
    peer_s: float = PEER_S
    """For the connection to a replica that is there."""

    def to_connect(self, at: MeshPlace) -> dict[int, float]:
        """Return the limit of the connection to each place."""
        short_s = min(NEWCOMER_S, self.peer_s)
        return {place: short_s if place in at.newcomers else self.peer_s for place in range(at.count)}


class ReplicaGroup:
    """One rank's group with the same rank of all other replicas. Every call is made in all of them, in one order."""

    def __init__(
        self,
        store: dist.Store,
        at: MeshPlace,
        *,
        device: torch.device,
        is_over: Callable[[], bool],
        agree: Callable[[bytes], list[bytes]],
        limits: WaitLimits,
        waiting: RankWaits | None = None,
        address: str = "",
    ) -> None:
        """Connect to the others. Raises EpochOver if one of them is lost meanwhile, PeersUnreachable if the connection
        to one that is there takes longer than `limits.peer_s`.

        store: shared by the ranks of this group alone. is_over: whether the controller has formed another mesh. agree:
        exchanges bytes between the ranks of this replica, so that all of them see the same outcome. waiting: updated in
        every wait. address: of this machine, to listen on.
        """
        self.place, self.count = at.place, at.count
        self._device = device
        self._is_over, self._agree, self._timeout_s = is_over, agree, limits.timeout_s
        self._waiting = waiting or RankWaits()
        self._group: Any = None
        self._aborting: _InThread | None = None
        _abandoned[:] = [each for each in _abandoned if not all(work.is_completed() for work, _ in each[1])]
        try:
            pairs = self._meet_all(store, address=address, limits=limits.to_connect(at))
            connect = partial(_connect, store, device=device, address=address, timeout_s=limits.timeout_s)
            connecting = _InThread(partial(connect, place=at.place, count=at.count))
            self._finish([(connecting, store)])
        except PeersUnreachable:
            raise
        except EpochOver as error:
            raise EpochOver("no connection to the other policy replicas") from error
        self._group = connecting.result
        del pairs  # not before all replicas have used theirs

    def _meet_all(self, store: dist.Store, *, address: str, limits: Mapping[int, float]) -> Sequence[_InThread]:
        """Connect to each of the others alone, once both are there.

        limits: maximum seconds by place. Raises EpochOver, and PeersUnreachable in all ranks of the replica.
        """

        def meet(peer: int) -> Any:
            first, last = sorted((self.place, peer))
            pair = dist.PrefixStore(f"{first}-{last}", store)
            pair.set(str(self.place), "here")
            pair.get(str(peer))
            place = int(self.place == last)
            limit_s, cpu = limits[peer], torch.device("cpu")
            group = _connect(pair, place=place, count=2, device=cpu, address=address, timeout_s=limit_s)
            group.allreduce([torch.ones(1)]).wait()
            return group

        meetings = [_InThread(partial(meet, peer)) for peer in range(self.count) if peer != self.place]
        self._finish([(_InThread(partial(_join, meetings)), store)])
        peers = (peer for peer in range(self.count) if peer != self.place)
        lost = [peer for peer, meeting in zip(peers, meetings) if meeting.failed]
        if unreachable := {place for places in self._agree(bytes(lost)) for place in places}:
            raise PeersUnreachable(tuple(sorted(unreachable)))
        return meetings

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the replicas. Raises EpochOver: some may be replaced then, others not."""
        halves = list(_halves(tensors))
        # other ranks of this replica may have more: all take part in as many exchanges
        num_halves = max(int(each) for each in self._agree(str(len(halves)).encode()))
        waiting: list[_Bucket] = []
        for number in range(num_halves + 1):
            begun = [self._begin(indices, tensors) for indices in (halves[number] if number < len(halves) else ())]
            if number:
                self._finish([each[1:] for each in waiting], behind=[each[1:] for each in begun])
            _put(waiting, tensors)
            waiting = begun

    def _begin(self, indices: list[int], tensors: Sequence[Tensor]) -> _Bucket:
        flat = torch.cat([tensors[i].reshape(-1) for i in indices])
        return indices, self._group.allreduce([flat]), flat

    def end(self, then: Callable[[], None]) -> None:
        """Abort a group of NCCL, whose threads use its store until then, and call `then`; does not wait for either."""
        if self._device.type == "cuda":
            _InThread(partial(_call_after, self._abort(), then))
        else:
            then()

    def _abort(self) -> _InThread:
        self._aborting = self._aborting or _InThread(self._group.abort)
        return self._aborting

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of every replica, in the order of their places. Raises EpochOver."""
        sized = len(data).to_bytes(_SIZE_BYTES, "little") + data
        gathered = self._gathered(sized[:_SHORT_BYTES], _SHORT_BYTES)
        sizes = [_SIZE_BYTES + int.from_bytes(each[:_SIZE_BYTES], "little") for each in gathered]
        if max(sizes) > _SHORT_BYTES:
            rests = self._gathered(sized[_SHORT_BYTES:], max(sizes) - _SHORT_BYTES)
            gathered = [first + rest for first, rest in zip(gathered, rests)]
        return [each[_SIZE_BYTES:size] for each, size in zip(gathered, sizes)]

    def send(self, tensors: Sequence[Tensor], *, to: Sequence[int]) -> None:
        """Send tensors to the replicas at places `to`, which receive them at the same time. Raises EpochOver."""
        sends = [_Send(self._group, tensors, peer=place, device=self._device) for place in to]
        self._finish([(each, tensors) for each in sends])
        word = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for place in range(self.count):
            if place != self.place:
                self._finish([(_InThread(partial(_send_word, self._group, word, place)), word)])

    def receive(self, tensors: Sequence[Tensor], *, source: int) -> None:
        """Fill contiguous tensors from the replica at place `source`. Raises EpochOver, also if they were damaged."""
        self._finish([(_Receive(self._group, tensors, peer=source, device=self._device), tensors)])
        self.wait_for(source)

    def wait_for(self, source: int) -> None:
        """Wait until all others have received what the replica at place `source` sends, however long that takes.

        Otherwise they would be waited for in the next sum, whose time is limited. Raises EpochOver.
        """
        word = torch.empty(1, dtype=torch.uint8, device=self._device)
        self._finish([(_InThread(partial(_receive_word, self._group, word, source)), word)], timeout_s=math.inf)

    def _gathered(self, data: bytes, size: int) -> list[bytes]:
        """Return `size` bytes of each replica: its data, filled up with zeros."""
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(self._device)
        buffers = [torch.empty_like(mine) for _ in range(self.count)]
        self._finish([(self._group.allgather([buffers], [mine]), mine)])
        return [each.cpu().numpy().tobytes() for each in buffers]

    def _finish(
        self, operations: Sequence[_Operation], *, timeout_s: float | None = None, behind: Sequence[_Operation] = ()
    ) -> None:
        """Wait until all operations are done in all ranks of this replica; raise EpochOver if that cannot be, or if
        nothing is done in a rank for `timeout_s`, unless set that of the group.

        behind: operations that were begun too, and are given up with these.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        pause_s, deadline, completed = _FIRST_PAUSE_S, time.monotonic() + timeout_s, 0
        while True:
            before, completed = completed, sum(_num_completed(work) for work, _ in operations)
            if completed > before:
                deadline = time.monotonic() + timeout_s
            votes = self._agree(self._state(operations, deadline=deadline) + _MOVED * (completed > before))
            moved = any(each.endswith(_MOVED) for each in votes)
            self._waiting.completed += max(completed - before, int(moved))
            self._waiting.polled_at = time.monotonic()
            states = [each[:1] for each in votes]
            if _LOST in states:
                self._give_up([*operations, *behind])
                raise EpochOver("a policy replica of the mesh was lost")
            if _WORKING not in states:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _give_up(self, operations: Sequence[_Operation]) -> None:
        for work, _ in operations:
            if isinstance(work, _InThread):
                work.give_up()
        _abandoned.append((self._group, operations))
        if self._group is not None and self._device.type == "cuda":
            self._abort()  # NCCL would wait for a lost member for good; gloo's operations end with it

    def _state(self, operations: Sequence[_Operation], *, deadline: float) -> bytes:
        if self._is_over():
            return _LOST
        if not all(work.is_completed() for work, _ in operations):
            return _LOST if time.monotonic() > deadline else _WORKING
        try:
            for work, _ in operations:
                work.wait()  # raises the operation's error
        except RuntimeError:
            return _LOST
        return _DONE


def _num_completed(work: Any) -> int:
    return work.num_completed if isinstance(work, _InThread) else int(work.is_completed())


def _send_word(group: Any, word: Tensor, place: int) -> None:
    group.send([word], place, 0).wait()


def _receive_word(group: Any, word: Tensor, source: int) -> None:
    group.recv([word], source, 0).wait(LONGEST)
    word.cpu()


def _call_after(first: _InThread, then: Callable[[], None]) -> None:
    first.join()
    then()


def _join(works: Sequence[_InThread]) -> None:
    for work in works:
        work.join()


def _connect(store: dist.Store, *, place: int, count: int, device: torch.device, address: str, timeout_s: float) -> Any:
    """A bare process group: `new_group` needs all members in the default group, which cannot change."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _member_may_die():
            group: Any = dist.ProcessGroupNCCL(store, place, count, options)
        total = torch.ones(1, device=device)
        group.allreduce([total]).wait()
        total.cpu()  # the first operation connects, and blocks meanwhile
        return group
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in the stubs
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address or LOOPBACK)]
    return dist.ProcessGroupGloo(store, place, count, options)


@contextmanager
def _member_may_die() -> Iterator[None]:
    """Make a group of NCCL inside whose watchdog does not end this process when an operation fails."""
    if _ERROR_HANDLING in os.environ:
        yield
        return
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        del os.environ[_ERROR_HANDLING]


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


def _halves(tensors: Sequence[Tensor]) -> Iterator[list[list[int]]]:
    """Yield the buckets of half a window: fewer where a bucket is larger than BUCKET_BYTES."""
    most = WINDOW // 2
    half, size = list[list[int]](), 0
    for bucket in _buckets(tensors):
        num_bytes = sum(tensors[i].nbytes for i in bucket)
        if half and (len(half) == most or size + num_bytes > most * BUCKET_BYTES):
            yield half
            half, size = [], 0
        half.append(bucket)
        size += num_bytes
    if half:
        yield half


def _put(buckets: Sequence[_Bucket], tensors: Sequence[Tensor]) -> None:
    """Copy sums to the tensors. In a function: a variable of a loop in `sum` would keep a bucket's memory."""
    for indices, _, flat in buckets:
        for i, part in zip(indices, flat.split([tensors[i].numel() for i in indices])):
            tensors[i].copy_(part.view(tensors[i].shape))
