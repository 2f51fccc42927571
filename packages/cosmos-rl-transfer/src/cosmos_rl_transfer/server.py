"""The publisher's threads: one accepts, one per subscriber answers its requests.

They block in sockets and in the double buffer's condition, so they serve while the trainer computes. A
subscriber's thread waits for requests or for a version, and ends when its connection does; what it had leased
is given back.
"""

from __future__ import annotations

import logging
import socket
import threading
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from cosmos_rl_transfer import messages as m
from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.errors import LayoutError, TransferError
from cosmos_rl_transfer.layout import Manifest
from cosmos_rl_transfer.link import Link
from cosmos_rl_transfer.plan import plan
from cosmos_rl_transfer.snapshot import Slot, Snapshots
from cosmos_rl_transfer.stream import Stream

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
_HANDSHAKE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a publisher serves."""

    manifest: Manifest
    rank: int
    arena: Arena
    wire_dtype: str | None
    bucket_bytes: int
    snapshots: Snapshots


class Server:
    """Listens and serves until closed."""

    def __init__(self, source: Source, *, token: bytes, bind: str, timeout_s: float, pool: Executor) -> None:
        self._source, self._token, self._timeout_s = source, token, timeout_s
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._listener = socket.create_server((bind, 0), family=family)
        host = f"[{bind}]" if ":" in bind else bind
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._closed = False
        self._sessions: dict[Link, threading.Thread] = {}
        self._pool = pool
        self._accepting = threading.Thread(target=self._accept, name="weights-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening, close every connection, wait for the threads. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions = dict(self._sessions)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in sessions:
            link.close()
        self._source.snapshots.close()
        for thread in [self._accepting, *sessions.values()]:
            thread.join(timeout=_HANDSHAKE_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return  # closed
            link = Link(connection, timeout_s=_HANDSHAKE_S, side="publisher")
            thread = threading.Thread(target=self._serve, args=(link, peer), name="weights-serve", daemon=True)
            with self._lock:
                if self._closed:
                    link.close()
                    return
                self._sessions[link] = thread
            thread.start()

    def _serve(self, link: Link, peer: object) -> None:
        try:
            link.authenticate(self._token)
            # a subscriber may have nothing to ask for long; its death closes the socket
            link.set_deadlines(timeout_s=self._timeout_s, idle_s=None)
            _Session(self._source, link, self._pool).run()
        except (TransferError, msgspec.DecodeError) as error:
            log.info("subscriber %s left: %s", peer, error)
        finally:
            link.close()
            with self._lock:
                self._sessions.pop(link, None)


class _Session:
    """One subscriber's requests, one after the other."""

    def __init__(self, source: Source, link: Link, pool: Executor) -> None:
        self._source, self._link, self._pool = source, link, pool
        self._stream = Stream(source.arena, ())
        self._stream_key = ("", 0)
        self._leases: dict[int, Slot] = {}

    def run(self) -> None:
        """Answer until the connection ends."""
        try:
            while True:
                self._answer(self._link.receive())
        finally:
            for lease in self._leases:
                self._source.snapshots.give_back(lease)

    def _answer(self, request: Any) -> None:
        match request:
            case m.Hello(protocol):
                self._link.send(self._welcome(protocol))
            case m.Join():
                self._link.send(self._join(request))
            case m.Await(after):
                self._announce(after)
            case m.Borrow(version):
                self._link.send(self._lend(version))
            case m.ReadBucket(lease, bucket):
                self._send_bucket(lease, bucket)
            case m.Return(lease):
                held = self._leases.pop(lease, None) is not None and self._source.snapshots.give_back(lease)
                self._link.send(m.Returned(held))

    def _welcome(self, protocol: int) -> m.Welcome | m.Refused:
        if protocol != m.PROTOCOL:
            return m.Refused(f"the publisher speaks protocol {m.PROTOCOL}, the subscriber {protocol}")
        source = self._source
        offers = tuple(slot.segment.offer for slot in source.snapshots.slots)
        return m.Welcome(source.manifest, source.rank, source.wire_dtype, source.bucket_bytes, offers)

    def _join(self, request: m.Join) -> m.Joined | m.Refused:
        source = self._source
        try:
            made = plan(
                source.manifest,
                request.target,
                bucket_bytes=source.bucket_bytes,
                wire_dtype=source.wire_dtype,
            )
        except LayoutError as error:
            return m.Refused(str(error))
        if made.digest != request.plan_digest:
            return m.Refused(
                f"the plans differ: {made.digest[:12]} at the publisher, {request.plan_digest[:12]} at "
                "the subscriber; install the same cosmos-rl-transfer on both sides"
            )
        self._stream = Stream(source.arena, made.streams.get((source.rank, request.rank), ()))
        self._stream_key = (made.digest, request.rank)
        return m.Joined()

    def _announce(self, after: int) -> None:
        while (version := self._source.snapshots.wait_newer(after, timeout_s=HEARTBEAT_S)) is None:
            self._link.send(m.Waiting())
        self._link.send(m.Announce(version))

    def _lend(self, version: int) -> m.Lent | m.Overtaken:
        snapshots = self._source.snapshots
        granted = snapshots.lend(version)
        if granted is None:
            return m.Overtaken(snapshots.newest)
        lease, slot = granted
        self._leases[lease] = slot
        digest = slot.stream_digests.get(self._stream_key)
        if digest is None:
            digest = self._stream.digest(slot.segment.memory, box_sums=slot.tensor_sums, pool=self._pool)
            if not snapshots.keep_digest(lease, self._stream_key, digest):
                return m.Overtaken(snapshots.newest)  # revoked meanwhile: the hashes may be of torn bytes
        return m.Lent(lease, slot.index, digest.bucket_hashes, digest.tensor_sums)

    def _send_bucket(self, lease: int, index: int) -> None:
        owned = lease in self._leases and 0 <= index < len(self._stream.buckets)
        if not owned or not self._source.snapshots.valid(lease):
            self._link.send(m.Overtaken(self._source.snapshots.newest))
            return
        packed = self._stream.packed(self._leases[lease].segment.memory, self._stream.buckets[index])
        self._link.send(m.Data(packed.nbytes), packed.data)
