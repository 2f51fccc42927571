"""Small weights that are different at every version, a publisher with a subscriber, and a transport that errs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.weight_sync import SyncSection
from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.publish.publisher import Publisher
from cosmos_rl_transfer.pull.subscriber import Subscriber
from cosmos_rl_transfer.transports.base import Inlet, Outlet, Transport
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data

TOKEN = b"the run's token"
_BUCKET_BYTES = 2048


def sync(**options: Any) -> SyncSection:
    """Return the section [sync] with these keys, without its limits: tests have buckets of a few bytes."""
    return SyncSection.model_construct(**{"timeout_s": 30.0, **options})


def over(transport: str | Transport, **options: Any) -> dict[str, Any]:
    """Return the arguments of either side for a transport, by name or an instance, and the keys of [sync]."""
    if isinstance(transport, str):
        return {"settings": sync(transport=transport, **options)}
    return {"settings": sync(**options), "transport": transport}


def weights_at(version: int, *, rows: int = 64) -> dict[str, Tensor]:
    """Return small tensors of several dtypes that only this version has."""
    draw = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(rows, 24, generator=draw),
        "norm": torch.randn(7, generator=draw).bfloat16(),
        "count": torch.tensor(version),
        "proj": torch.randn(24, rows, generator=draw).bfloat16(),
    }


def blank() -> dict[str, Tensor]:
    """Return zeros of the same shapes and dtypes."""
    return {name: torch.zeros_like(tensor) for name, tensor in weights_at(0).items()}


def assert_version(live: Mapping[str, Tensor], version: int) -> None:
    """Assert that the tensors are exactly those of a version."""
    for name, tensor in weights_at(version).items():
        assert torch.equal(live[name], tensor), (name, version)


class Pair:
    """A publisher and a subscriber of these tensors in this process."""

    def __init__(
        self,
        transport: str,
        *,
        reading: Transport | None = None,
        patience_s: float = 2.0,
        staging: str = "shadow",
    ) -> None:
        self.trained = weights_at(0)
        self.publisher = Publisher(
            self.trained,
            token=TOKEN,
            settings=sync(transport=transport, bucket_bytes=_BUCKET_BYTES, patience_s=patience_s),
        )
        self.live = blank()
        self.subscriber = Subscriber(
            self.publisher.address,
            self.live,
            token=TOKEN,
            **over(reading or transport, timeout_s=10, staging=staging),
        )

    async def publish(self, version: int) -> Mapping[str, float]:
        """Fence, change the trained tensors into those of a version, and publish them."""
        fenced = await self.publisher.fence()
        for name, tensor in weights_at(version).items():
            self.trained[name].copy_(tensor)
        return {**fenced, **await self.publisher.publish(version, self.trained)}

    async def __aenter__(self) -> Pair:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.subscriber.close()
        await self.publisher.close()


class Watched:
    """A transport that shows every bucket it has received to `see`, which returns what to go on with."""

    def __init__(self, inner: Transport, see: Callable[[Data, Raw], Raw]) -> None:
        self.name = inner.name
        self._inner, self._see = inner, see

    def open(self, *, bucket_bytes: int, num_slots: int) -> Outlet:
        """Make an ordinary end."""
        return self._inner.open(bucket_bytes=bucket_bytes, num_slots=num_slots)

    def attach(self, link: Link, *, offer: Mapping[str, str], memory: Sequence[Raw]) -> Inlet:
        """Make a watched end."""
        return _WatchedInlet(self._inner.attach(link, offer=offer, memory=memory), self._see)


class _WatchedInlet:
    def __init__(self, inner: Inlet, see: Callable[[Data, Raw], Raw]) -> None:
        self.views, self.over_link = inner.views, inner.over_link
        self._inner, self._see = inner, see

    def receive(self, data: Data, *, out: Raw | None) -> Raw:
        """Receive, then show."""
        return self._see(data, self._inner.receive(data, out=out))

    def close(self) -> None:
        """Close what is inside."""
        self._inner.close()


class BitFlips(Watched):
    """A transport that flips one bit in the first `times` receptions of a bucket."""

    def __init__(self, inner: Transport, *, bucket: int, times: int) -> None:
        super().__init__(inner, self._flip)
        self.num_reads = 0
        """Receptions of that bucket so far."""
        self._bucket, self._times = bucket, times

    def _flip(self, data: Data, packed: Raw) -> Raw:
        if data.bucket == self._bucket:
            self.num_reads += 1
            if self.num_reads <= self._times:
                packed = packed if packed.flags.writeable else np.array(packed)
                packed[packed.size // 2] ^= 4
        return packed
