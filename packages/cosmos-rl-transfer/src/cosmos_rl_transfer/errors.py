"""What can go wrong in a sync, by name."""

from __future__ import annotations


class LayoutError(ValueError):
    """The two sides do not describe the same tensors. Names the tensor, its shapes and the ranks."""


class TransferError(RuntimeError):
    """A sync could not be completed. The live tensors were not touched."""


class PeerLost(TransferError, ConnectionError):
    """The other side closed its connection, was killed, or stayed silent past the deadline."""


class WeightMismatch(TransferError):
    """What arrived is not what was published, even after fetching it again."""


class Superseded(TransferError):
    """The version being read was overwritten by a newer one; take that one."""


class AuthenticationError(TransferError):
    """The other side does not know this run's token."""
