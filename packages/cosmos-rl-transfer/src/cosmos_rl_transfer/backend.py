"""What the entry point `cosmos_rl.weight_sync` names: both sides of a sync, as the [sync] section wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_transfer.publisher import Publisher
    from cosmos_rl_transfer.subscriber import Subscriber


class TransferSync:
    """Implements `cosmos_rl_core.interfaces.WeightSync`. Torch is imported with the first side."""

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
    ) -> Publisher:
        """Allocate the publisher of these weights and start to listen on `bind`."""
        from cosmos_rl_transfer.publisher import Publisher

        return Publisher(
            weights,
            token=token,
            transport=transport,
            wire_dtype=dtype,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            bind=bind,
        )

    def subscriber(
        self, address: str, weights: Mapping[str, Tensor], *, token: bytes, transport: str, timeout_s: float
    ) -> Subscriber:
        """Make the subscriber that keeps these live weights up to date from `address`."""
        from cosmos_rl_transfer.subscriber import Subscriber

        return Subscriber(address, weights, token=token, transport=transport, timeout_s=timeout_s)
