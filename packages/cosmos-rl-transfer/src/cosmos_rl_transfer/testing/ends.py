"""The two ends of a transport that is to be tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cosmos_rl_transfer.testing.sample_exchange import PublisherProcess
from cosmos_rl_transfer.transports.base import Transport

BUCKET_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The two ends of a transport that is to be tried, not used before."""

    publisher: Transport
    subscriber: Transport
    start: Callable[[], tuple[PublisherProcess, Transport]]
    """Starts a publisher in another process; returns it and the subscriber's end of its transport."""
    max_readers: int = 3
    """Subscribers one outlet can serve."""

    @classmethod
    def of(cls, kind: type[Transport]) -> Ends:
        """Use a transport whose two ends are made alike, without arguments."""
        spec = f"{kind.__module__}:{kind.__qualname__}"
        return cls(
            publisher=kind(),
            subscriber=kind(),
            start=lambda: (PublisherProcess.of(spec, bucket_bytes=BUCKET_BYTES), kind()),
        )
