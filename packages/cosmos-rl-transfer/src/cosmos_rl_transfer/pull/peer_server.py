"""The holder's side of peers.py: what one rank has staged, served out of its shadow."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from cosmos_rl_transfer.content.arena import Arena
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import PeerLost
from cosmos_rl_transfer.layout.manifest import Manifest, TensorLayout
from cosmos_rl_transfer.planning.plan import Bucket
from cosmos_rl_transfer.publish.live import runs_in
from cosmos_rl_transfer.publish.partial import Partial
from cosmos_rl_transfer.publish.server import Server
from cosmos_rl_transfer.publish.supply import Supply
from cosmos_rl_transfer.pull.feed import Feed
from cosmos_rl_transfer.pull.landing import Shadow
from cosmos_rl_transfer.transports.base import Run, Transport, TransportUnavailable

log = logging.getLogger(__name__)

PATIENCE_S = 0.2
"""How long a pull waits for those who still read the version before."""


class PeerServer:
    """Serves what one rank has staged, out of its shadow."""

    def __init__(
        self,
        shadow: Shadow,
        manifest: Manifest,
        *,
        rank: int,
        wire_dtypes: Mapping[str, str],
        token: bytes,
        transport: str,
        bucket_bytes: int,
        bind: str,
        timeout_s: float,
        partial: Partial,
    ) -> None:
        """Allocate two slots of a bucket each and listen on `bind`; nothing can be had before `open`.

        manifest, rank: what all ranks of this replica hold, and which of them this is. wire_dtypes: by tensor, what
        the shadow holds it in. partial: which buckets have landed of a version that is still coming. Raises
        TransportUnavailable where `transport` cannot serve, OSError where `bind` is no address of this host.
        """
        served = _as_held(manifest, wire_dtypes)
        self._supply = Supply(
            _Held(shadow, served),
            served,
            rank=rank,
            wire_dtypes={name: spec.dtype for name, spec in served.specs.items()},
            wire_dtype=None,
            bucket_bytes=bucket_bytes,
            transport=transport,
            patience_s=PATIENCE_S,
            partial=partial,
        )
        self._supply.outlet.expose([shadow.memory])
        self._server = Server(self._supply, token=token, bind=bind, timeout_s=timeout_s)
        self._versions, self._partial = self._supply.versions, partial

    @property
    def address(self) -> str:
        """Where joiners connect: "host:port"."""
        return self._server.address

    @property
    def sent_bytes(self) -> int:
        """Bytes of buckets sent so far."""
        return self._supply.sent_bytes

    def begin(self, version: int) -> None:
        """Let the version that will be in the shadow be read, bucket by bucket as they land. Fence before."""
        self._partial.begin(version)
        self._versions.publish(version)

    def open(self, version: int) -> None:
        """Let the version that is in the shadow be read. Versions may also fall: publishers may have started anew."""
        if not self._partial.complete(version):
            self._versions.publish(version)

    def fence(self) -> None:
        """Return when the shadow may be written: who reads has a moment to finish, and is dropped."""
        self._partial.end()
        self._versions.fence(patience_s=PATIENCE_S, copy=False)
        self._supply.proofs.forget()

    def close(self) -> None:
        """Disconnect all joiners and free the slots. May be called twice."""
        self._server.close()


class Offer:
    """What a subscriber offers to others: a server that is made with its first version, and told to publishers."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        rank: int,
        token: bytes,
        transport: str | Transport,
        bind: str | None,
        timeout_s: float,
    ) -> None:
        """Remember how to serve; arguments as for `PeerServer`. bind: None for where publishers are reached from."""
        self._manifest, self._rank, self._token = manifest, rank, token
        # an instance, or a process group, reaches one peer only
        self._transport = transport if isinstance(transport, str) and transport != "collective" else "auto"
        self._bind, self._timeout_s = bind, timeout_s
        self._server: PeerServer | None = None
        self._works = True
        self._version: int | None = None
        self.partial = Partial()
        """Which buckets can be had here."""

    @property
    def address(self) -> str | None:
        """Where others connect, once there was a version."""
        return None if self._server is None else self._server.address

    def begin(self, version: int) -> None:
        """Serve what lands of a version, after `fence`."""
        if self._server is not None:
            self._server.begin(version)

    def open(self, version: int, shadow: Shadow, feeds: Sequence[Feed]) -> None:
        """Serve the version that is in the shadow and tell the publishers. Where that cannot be, warn once."""
        if not self._works or not feeds:
            return
        if self._server is None:
            try:
                self._server = PeerServer(
                    shadow,
                    self._manifest,
                    rank=self._rank,
                    wire_dtypes=self.partial.wire_dtypes,
                    token=self._token,
                    transport=self._transport,
                    bucket_bytes=feeds[0].welcome.bucket_bytes,
                    bind=self._bind or feeds[0].link.local_host,
                    timeout_s=self._timeout_s,
                    partial=self.partial,
                )
            except (TransportUnavailable, OSError) as error:
                self._works = False
                log.warning("other rollouts cannot read from this one: %s", error)
                return
        self._version = version
        self._server.open(version)
        with suppress(PeerLost):  # the next `stage` will find out
            self.tell(feeds)

    def tell(self, feeds: Sequence[Feed]) -> None:
        """Tell publishers what can be had here, if anything."""
        if self._server is not None and self._version is not None:
            for feed in feeds:
                feed.holds(self._version, self._server.address)

    def fence(self) -> None:
        """Return when the shadow may be written."""
        self._version = None
        if self._server is not None:
            self._server.fence()

    def close(self) -> None:
        """Serve no more. May be called twice."""
        if self._server is not None:
            self._server.close()


class _Held:
    """A shadow as a `Memory`."""

    def __init__(self, shadow: Shadow, manifest: Manifest) -> None:
        places = shadow.arena.places
        aliases = {alias: places[name] for alias, name in manifest.tied.items() if name in places}
        self._arena = Arena({**places, **aliases}, shadow.arena.num_bytes)
        self._memory = shadow.memory

    def runs(self, bucket: Bucket) -> list[Run] | None:
        """Return the bucket's bytes where they lie, or None where they have to be packed."""
        return runs_in(self._arena, self._memory, bucket)

    def pack(self, bucket: Bucket, out: Raw) -> tuple[int, ...]:
        """Write the bucket's packed bytes into `out` uint8 [bucket.num_bytes]; return each piece's additive hash."""
        return self._arena.gather(self._memory, bucket, out)


def _as_held(manifest: Manifest, wire_dtypes: Mapping[str, str]) -> Manifest:
    """Describe a replica's parts in the dtypes that its shadows hold them in."""
    layouts = (TensorLayout(replace(x.spec, dtype=wire_dtypes[x.spec.name]), x.boxes) for x in manifest.layouts)
    return Manifest(tuple(layouts), manifest.tied, manifest.replicas)
