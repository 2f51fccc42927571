"""What a reward service answers, as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec


class Enqueued(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request is queued."""

    uuid: str
    """The service's name for it, to fetch it by."""
    id: str = ""
    """The client's name for it, as it was given."""


class Fetched(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a request is."""

    status: Literal["pending", "done", "failed"]
    uuid: str
    id: str = ""
    scores: dict[str, list[float]] = {}
    """One list of B for each reward, or for each of its parts as "reward.part"."""
    total: list[float] = []
    """Their sum by the request's weights, [B]."""
    error: str = ""
    """Why it has failed."""
