"""Where the ranks of several policy replicas find one another: a key-value store for each epoch of the mesh.

    rank (any replica)   --StoreSet(epoch, key, value)-->   controller
                         <--StoreValue-------------------
                         --StoreGet(epoch, key)--------->
                         <--StoreValue-------------------   at once; the rank asks again until the key is set

Each rank has a connection for this alone, also those that are otherwise connected through rank 0 of their replica. The
store takes the place of torch's TCPStore, which listens on all interfaces without authentication, outlives no restart
and keeps the keys of all epochs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.wire.channel import Connection

STORE = "store"
"""Role of such a connection."""
MAX_KEYS = 1 << 16
MAX_VALUE_BYTES = 1 << 16
"""Limits that a torch process group never reaches: an address is some 100 bytes."""


@dataclass(slots=True)
class Rendezvous:
    """The store of the current epoch."""

    epoch: int = 0
    _values: dict[str, bytes] = field(default_factory=dict)

    def begin(self, epoch: int) -> None:
        """Forget the keys of earlier epochs; their readers learn that they are over."""
        if epoch > self.epoch:
            self.epoch, self._values = epoch, {}

    async def serve(self, connection: Connection) -> None:
        """Answer a rank until it closes the connection, which raises ConnectionClosed."""
        while True:
            await connection.send(self.answer(await connection.receive()))

    def answer(self, message: p.ToController) -> p.StoreValue:
        """Return the reply to a StoreSet or StoreGet. Raises ValueError for anything else, and beyond the limits."""
        match message:
            case p.StoreSet(epoch, key, value):
                if len(value) > MAX_VALUE_BYTES or len(self._values) >= MAX_KEYS:
                    raise ValueError(f"{len(value)} bytes under {key!r}, in a store of {len(self._values)} keys")
                self.begin(epoch)  # after a restart of the controller, before it sends the mesh
                if epoch == self.epoch:
                    self._values[key] = value
                return p.StoreValue(over=epoch < self.epoch)
            case p.StoreGet(epoch, key):
                return p.StoreValue(
                    value=self._values.get(key) if epoch == self.epoch else None, over=epoch < self.epoch
                )
        raise ValueError(f"{type(message).__name__} on a connection for the rendezvous")
