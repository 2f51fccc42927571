"""What the entry point `cosmos_rl.weight_sync` names: both sides of a sync, as the [sync] section wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_core.types import WeightSpec
    from cosmos_rl_core.weight_sync import RankExchange
    from cosmos_rl_transfer.publisher import Publisher
    from cosmos_rl_transfer.replica import RankPublisher
    from cosmos_rl_transfer.subscriber import Subscriber


class TransferSync:
    """Implements `cosmos_rl_core.weight_sync.WeightSync`. Torch is imported with the first side."""

    def publisher(
        self,
        weights: Mapping[str, Tensor],
        *,
        token: bytes,
        transport: str,
        dtype: str | None,
        bucket_bytes: int,
        timeout_s: float,
        bind: str,
        ranks: RankExchange | None = None,
    ) -> Publisher | RankPublisher:
        """Allocate the publisher of these weights, or of this rank's parts, and start to listen on `bind`."""
        from cosmos_rl_transfer.publisher import Publisher
        from cosmos_rl_transfer.replica import RankPublisher

        options: dict[str, Any] = {
            "token": token,
            "transport": transport,
            "bucket_bytes": bucket_bytes,
            "timeout_s": timeout_s,
            "bind": bind,
        }
        if ranks is None:
            return Publisher(weights, wire_dtype=dtype, **options)
        return RankPublisher(weights, ranks=ranks, wire_dtype=dtype, **options)

    def subscriber(
        self, address: str, weights: Mapping[str, Tensor], *, token: bytes, transport: str, timeout_s: float
    ) -> Subscriber:
        """Make the subscriber that keeps these live weights up to date from `address`, of one rank or of several."""
        from cosmos_rl_transfer.replica import SEPARATOR
        from cosmos_rl_transfer.subscriber import Subscriber

        return Subscriber(address.split(SEPARATOR), weights, token=token, transport=transport, timeout_s=timeout_s)

    def plan(
        self, specs: Sequence[WeightSpec], *, dtype: str | None, bucket_bytes: int, replicas: int
    ) -> Mapping[str, int]:
        """Return what one version costs on the wire, for one trainer and `replicas` engines of one rank each."""
        from cosmos_rl_transfer.layout import Manifest
        from cosmos_rl_transfer.plan import plan

        whole = Manifest.whole(specs)
        made = plan(whole, whole, bucket_bytes=bucket_bytes, wire_dtype=dtype)
        return {
            "bytes": replicas * made.total_bytes,
            "lower_bound_bytes": replicas * made.lower_bound,
            "buckets": replicas * sum(len(buckets) for buckets in made.streams.values()),
        }
