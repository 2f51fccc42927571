"""Errors of a weight sync."""

from __future__ import annotations


class LayoutError(ValueError):
    """The two sides do not describe the same tensors. Names the tensor, its shapes and the ranks."""


class TransferError(RuntimeError):
    """A sync could not be completed. The live tensors are unchanged."""


class PeerLost(TransferError, ConnectionError):
    """The other side closed its connection, was killed, or stayed silent past the deadline."""


class WeightMismatch(TransferError):
    """Received weights differ from the published ones, even after fetching them again."""


class Superseded(TransferError):
    """The version being read was overwritten by a newer one; read that one."""


class AuthenticationError(TransferError):
    """The other side does not have this run's token."""
