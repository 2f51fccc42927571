"""Two-phase weight updates: all ranks of a rollout replica switch to a version, or none.

    ReplicaSubscriber (in the replica's own process)          ReplicaMember (one in each rank's process)
    receives version v from the trainers
    Stage(v)                              ------->            pulls and verifies v beside its live tensors
                                          <-------            Staged(v), or Failed(v, why)
    all have the same version: `stage` returns v
    the engine pauses between two terms
    `apply`: Commit(v)                    ------->            writes the live tensors
                                          <-------            Committed(v)
    all have: the engine continues

A rank that cannot stage keeps the version it serves, and so do the others. A rank that fails to commit, or dies between
the two, makes the replica unfit to serve: `apply` raises and the engine has to end. With staging "in_place" a commit
also fails if a publisher is lost: `apply` raises PeerLost, and the replica is unfit until the next version is applied.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cosmos_rl_core.weight_sync import WeightSubscriber
from cosmos_rl_core.wire.tls import Tls
from cosmos_rl_transfer.errors import PeerLost, TransferError
from cosmos_rl_transfer.pull.sources import Sources, agree
from cosmos_rl_transfer.pull.subscriber import Subscriber
from cosmos_rl_transfer.wire import messages as m
from cosmos_rl_transfer.wire.link import Link, Listener

log = logging.getLogger(__name__)


class ReplicaSubscriber(WeightSubscriber):
    """Keeps the ranks of one replica at one version."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        token: bytes,
        num_ranks: int,
        bind: str = "127.0.0.1",
        timeout_s: float = 30.0,
        tls: Tls | None = None,
    ) -> None:
        """Listen for the ranks on `bind`.

        address: of every rank that publishes. timeout_s: limit for silence of publishers, and for ranks to connect, to
        stage and to commit.
        """
        self._sources = Sources(address, token=token, timeout_s=timeout_s, tls=tls)
        self._num_ranks, self._timeout_s = num_ranks, timeout_s
        self._members: dict[int, Link] = {}
        self._came = threading.Condition()
        """Guards `_members`."""
        self._staged: int | None = None
        self._is_new = True
        """Whether nothing was staged yet: ranks may then read from other replicas."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replica-stage")
        self._talk = ThreadPoolExecutor(max_workers=num_ranks, thread_name_prefix="replica-talk")
        self._listener = Listener(bind, token=token, name="replica", talk=self._register, tls=tls)
        self.address = self._listener.address
        """Address for the ranks' members."""

    async def stage(self, *, after: int) -> int:
        """Return a version newer than `after` that every rank has pulled and verified.

        Raises PeerLost if a publisher is lost and TransferError, with rank and reason, if a rank could not stage or
        has ended; the served weights are unchanged.
        """
        return await self._sources.run(self._thread, lambda: self._stage(after))

    def apply(self) -> None:
        """Write the staged version into every rank's live tensors. After an error the replica must not serve.

        Raises PeerLost if all that failed is a publisher: another version may be staged, from it or from another one.
        """
        if self._staged is None:
            raise TransferError("nothing is staged: await stage() first")
        version, self._staged = self._staged, None
        self._order(m.CommitVersion(version), m.VersionCommitted)

    async def close(self) -> None:
        """Disconnect from publishers and ranks. Idempotent."""
        self._sources.close()
        self._listener.close()
        for link in self._members.values():
            link.close()
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._talk.shutdown)

    def _stage(self, after: int) -> int:
        self._staged = None
        self._wait_for_members()
        version = self._sources.attempt(lambda: self._newest(after))
        deadline = time.monotonic() + self._timeout_s
        while len(versions := set(self._order(m.StageVersion(version), m.Staged))) > 1:
            version = max(versions)  # some ranks were overtaken and staged a newer one
            if time.monotonic() > deadline:
                raise TransferError(f"the ranks did not stage one version within {self._timeout_s} s: {versions}")
        (self._staged,) = versions
        self._is_new = False
        return self._staged

    def _newest(self, after: int) -> int:
        feeds = self._sources.feeds()
        version = feeds[0].find_holders(after).version if self._is_new else -1
        return version if version > after else agree(feeds, after)

    def _wait_for_members(self) -> None:
        with self._came:
            self._forget_dead()
            here = self._came.wait_for(lambda: len(self._members) == self._num_ranks, self._timeout_s)
            if not here:
                missing = sorted(set(range(self._num_ranks)) - self._members.keys())
                raise TransferError(f"ranks {missing} of the replica did not connect within {self._timeout_s} s")

    def _forget_dead(self) -> None:
        """Remove ended ranks and raise TransferError; the next `stage` waits for others. Called with the lock."""
        gone = [rank for rank, link in self._members.items() if _is_gone(link)]
        for rank in gone:
            self._members.pop(rank).close()
        if gone:
            raise TransferError(f"ranks {gone} of the replica have ended")

    def _register(self, link: Link) -> None:
        """Register a rank; runs in a thread."""
        word = link.receive()
        if not isinstance(word, m.Register) or not 0 <= word.rank < self._num_ranks:
            raise TransferError(f"the first message of a rank was {word}")
        link.set_deadlines(timeout_s=self._timeout_s, idle_s=self._timeout_s)
        with self._came:
            if (before := self._members.get(word.rank)) is not None:
                before.close()
            self._members[word.rank] = link
            self._came.notify_all()

    def _order(
        self, order: m.StageVersion | m.CommitVersion, answer: type[m.Staged] | type[m.VersionCommitted]
    ) -> list[int]:
        """Send a message to all ranks and return the versions of their replies."""
        futures = [self._talk.submit(self._request, rank, order, answer) for rank in sorted(self._members)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
        return [future.result() for future in futures]

    def _request(
        self, rank: int, order: m.StageVersion | m.CommitVersion, answer: type[m.Staged] | type[m.VersionCommitted]
    ) -> int:
        link = self._members[rank]
        try:
            link.send(order)
            reply = link.receive()
        except PeerLost as error:  # converted: a PeerLost means the publishers
            with self._came:
                if self._members.get(rank) is link:
                    del self._members[rank]
            link.close()
            raise TransferError(f"rank {rank} of the replica has ended at {order}: {error}") from error
        if isinstance(reply, m.TransferFailed):
            kind = PeerLost if reply.publisher_lost else TransferError
            raise kind(f"rank {rank} of the replica: version {reply.version}: {reply.reason}")
        if not isinstance(reply, answer):
            raise TransferError(f"rank {rank} of the replica replied {reply} to {order}")
        return reply.version


def _is_gone(link: Link) -> bool:
    try:
        link.check()
    except PeerLost:
        return True
    return False


class ReplicaMember:
    """One rank's side: a thread that executes the replica's messages."""

    def __init__(
        self,
        address: str,
        subscriber: Subscriber,
        *,
        token: bytes,
        rank: int,
        timeout_s: float = 30.0,
        commit: Callable[[], None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Connect to the replica at `address`. `commit` writes the staged version (None: `subscriber.apply`)."""
        self._subscriber = subscriber
        self._commit = commit or subscriber.apply
        self._link = Link.connect(address, token=token, timeout_s=timeout_s, tls=tls)
        self._link.send(m.Register(rank))
        self._link.set_deadlines(timeout_s=timeout_s, idle_s=None)
        self._served = threading.Thread(target=self._serve, name=f"replica-member-{rank}", daemon=True)
        self._served.start()

    def close(self) -> None:
        """Leave the replica and wait for the thread. Idempotent; does not close the subscriber."""
        self._link.close()
        self._served.join()

    def _serve(self) -> None:
        try:
            while True:
                self._link.send(self._obey(self._link.receive()))
        except TransferError as error:
            log.info("the replica's process is gone: %s", error)

    def _obey(self, order: Any) -> m.Staged | m.VersionCommitted | m.TransferFailed:
        try:
            if isinstance(order, m.StageVersion):
                return m.Staged(self._stage(order.version))
            self._commit()
            return m.VersionCommitted(order.version)
        except (TransferError, ValueError, RuntimeError, OSError) as error:  # the replica handles it
            lost = isinstance(error, PeerLost)
            return m.TransferFailed(order.version, f"{type(error).__name__}: {error}", publisher_lost=lost)

    def _stage(self, version: int) -> int:
        staged = self._subscriber.staged
        return staged if staged is not None and staged >= version else self._subscriber.stage_now(version - 1)
