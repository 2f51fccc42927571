"""The entry point `cosmos_rl.weight_sync`: builds both sides of a sync from the section [sync]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_core.parallel.rank_group import RankGroup
    from cosmos_rl_core.types import WeightSpec
    from cosmos_rl_core.weight_sync import SyncCost, SyncSection
    from cosmos_rl_core.wire.tls import Tls
    from cosmos_rl_transfer.publish.publisher import Publisher, RankPublisher
    from cosmos_rl_transfer.pull.subscriber import Subscriber


class TransferSync:
    """Implements `cosmos_rl_core.weight_sync.WeightSync`. Torch is imported with the first side."""

    def publisher(
        self,
        weights: Mapping[str, Tensor],
        *,
        settings: SyncSection,
        token: bytes,
        tls: Tls | None = None,
        bind: str,
        ranks: RankGroup | None = None,
    ) -> Publisher | RankPublisher:
        """Allocate the publisher of these weights, or of this rank's parts, and start to listen on `bind`."""
        from cosmos_rl_transfer.publish.publisher import Publisher, RankPublisher

        if ranks is None:
            return Publisher(weights, token=token, settings=settings, tls=tls, bind=bind)
        return RankPublisher(weights, ranks=ranks, settings=settings, token=token, tls=tls, bind=bind)

    def subscriber(
        self,
        address: str,
        weights: Mapping[str, Tensor],
        *,
        settings: SyncSection,
        token: bytes,
        tls: Tls | None = None,
    ) -> Subscriber:
        """Make the subscriber that keeps these live weights up to date from `address`, of one rank or of several."""
        from cosmos_rl_transfer.pull.subscriber import Subscriber

        return Subscriber(address, weights, token=token, settings=settings, tls=tls)

    def plan(
        self, specs: Sequence[WeightSpec], *, settings: SyncSection, policy: Mapping[str, int], replicas: int
    ) -> SyncCost:
        """Return the cost of one version from a policy replica of these axes to `replicas` engines of one rank each.

        Raises UserError if the model cannot be sharded by them.
        """
        from cosmos_rl_core.errors import UserError
        from cosmos_rl_core.weight_sync import BUCKET_BYTES, SyncCost
        from cosmos_rl_transfer.errors import LayoutError
        from cosmos_rl_transfer.layout import spread
        from cosmos_rl_transfer.layout.manifest import Manifest
        from cosmos_rl_transfer.planning.plan import plan

        axes: dict[str, Any] = dict(policy)
        try:
            trainers = spread.mesh(specs, **axes)
        except LayoutError as error:
            raise UserError(f"[policy.parallel]: {error}") from error
        transfer = plan(
            trainers,
            spread.replicas(Manifest.whole(specs), replicas),
            relay=settings.relay,
            bucket_bytes=settings.bucket_bytes or BUCKET_BYTES,
            wire_dtype=settings.dtype,
        )
        return SyncCost(
            received_bytes=transfer.total_bytes,
            lower_bound_bytes=transfer.lower_bound,
            busiest_bytes=max(transfer.bytes_out.values(), default=0),
            busiest_bound_bytes=transfer.egress_bound,
            extra_bytes=transfer.peak_extra_bytes,
            relay=f"{'yes' if transfer.relay else 'no'}, {transfer.relay_reason}",
        )
