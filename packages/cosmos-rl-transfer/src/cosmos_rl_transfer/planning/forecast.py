"""Predicts the bytes and the minimum time of a sync between two layouts; starts nothing and reads no tensor."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cosmos_rl_core.observe.tables import table
from cosmos_rl_transfer.layout import spread
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.layout.shapes import Shapes
from cosmos_rl_transfer.layout.spread import Side
from cosmos_rl_transfer.planning.plan import Plan, plan, readable
from cosmos_rl_transfer.planning.relay import Relay
from cosmos_rl_transfer.planning.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Cost of one version from all trainers to all rollouts."""

    model: str
    parameters: int
    tensors: int
    source: str
    """As text that `parse_side` reads."""
    source_ranks: int
    target: str
    target_ranks: int
    received_bytes: int
    """By all targets, and so sent by trainers or, with relay, by other targets."""
    lower_bound_bytes: int
    """Lower bound of received bytes."""
    trainer_bytes: int
    """Sent by all trainers."""
    busiest_trainer: int
    """Rank."""
    busiest_trainer_bytes: int
    egress_bound_bytes: int
    """Lower bound of the busiest trainer's bytes."""
    busiest_rollout: int
    """Rank."""
    busiest_rollout_bytes: int
    relay: bool
    relay_reason: str
    extra_bytes: int
    """Memory per rank beside its weights, in each direction."""
    gbit: float
    """Speed of a rank's network card, each way."""
    transfer_s: float
    """At that speed, without anything else on the way."""
    planning_s: float

    @property
    def ratio(self) -> float:
        """The busiest trainer's bytes over the lower bound."""
        return self.busiest_trainer_bytes / self.egress_bound_bytes if self.egress_bound_bytes else 1.0

    def as_json(self) -> dict[str, Any]:
        """Return the forecast as JSON-like values."""
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        """Return a table for people."""
        bound = self.received_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0
        rows = [
            ("model", f"{self.model}: {self.parameters:,} parameters in {self.tensors:,} tensors"),
            ("from", f"{self.source}, {_counted(self.source_ranks, 'rank')}"),
            ("to", f"{self.target}, {_counted(self.target_ranks, 'rank')}"),
            ("arrives", f"{readable(self.received_bytes)}, {bound:.3f} x the lower bound"),
            ("trainers send", f"{readable(self.trainer_bytes)} in all"),
            (
                "busiest trainer",
                f"rank {self.busiest_trainer} sends {readable(self.busiest_trainer_bytes)}, "
                f"{self.ratio:.3f} x the lower bound",
            ),
            ("busiest rollout", f"rank {self.busiest_rollout} receives {readable(self.busiest_rollout_bytes)}"),
            ("relay", f"{'yes' if self.relay else 'no'}: {self.relay_reason}"),
            ("extra memory", f"at most {readable(self.extra_bytes)} a rank and direction"),
            ("time", f"at least {self.transfer_s:.3g} s at {self.gbit:g} Gbit/s a rank"),
            ("planned in", f"{self.planning_s:.3g} s"),
        ]
        return table(rows)


def forecast(
    shapes: Shapes,
    source: Side,
    target: Side,
    *,
    wire_dtype: str | None = None,
    bucket_bytes: int,
    relay: Relay = "auto",
    ranks_per_host: int = 8,
    gbit: float = 400.0,
) -> Forecast:
    """Plan a sync of a model from trainers to rollouts, two groups of machines whose ranks are numbered in turn.

    wire_dtype: of wider floating tensors; None: their own. gbit: speed of a rank's network card each way.
    Raises LayoutError for layouts that the model cannot be cut to.
    """
    started = time.perf_counter()
    trainers, rollouts = manifest_of(shapes, source), manifest_of(shapes, target)
    made = plan(
        trainers,
        rollouts,
        _topology(source, target, ranks_per_host=ranks_per_host, bytes_per_s=int(gbit * 1e9 / 8)),
        relay=relay,
        bucket_bytes=bucket_bytes,
        wire_dtype=wire_dtype,
    )
    busiest_trainer, sent = _busiest(made.bytes_out)
    busiest_rollout, received = _busiest(made.bytes_in)
    return Forecast(
        model=shapes.name,
        parameters=shapes.num_parameters,
        tensors=len(shapes.specs),
        source=str(source),
        source_ranks=source.ranks * source.replicas,
        target=str(target),
        target_ranks=target.ranks * target.replicas,
        received_bytes=made.total_bytes,
        lower_bound_bytes=made.lower_bound,
        trainer_bytes=sum(made.bytes_out.values()),
        busiest_trainer=busiest_trainer,
        busiest_trainer_bytes=sent,
        egress_bound_bytes=made.egress_bound,
        busiest_rollout=busiest_rollout,
        busiest_rollout_bytes=received,
        relay=made.relay,
        relay_reason=made.relay_reason,
        extra_bytes=made.peak_extra_bytes,
        gbit=gbit,
        transfer_s=_most_bytes(made) * 8 / (gbit * 1e9),
        planning_s=time.perf_counter() - started,
    )


def manifest_of(shapes: Shapes, side: Side) -> Manifest:
    """Return the manifest of all ranks of one side. Raises LayoutError if the model cannot be sharded so."""
    sizes: dict[str, Any] = {**dict(side), "ep": side.ep}
    one = spread.mesh(shapes.specs, **sizes, kv_heads=shapes.kv_heads)
    return spread.replicas(one, side.replicas)


def _topology(source: Side, target: Side, *, ranks_per_host: int, bytes_per_s: int) -> Topology:
    def hosts(role: str, side: Side) -> list[str]:
        return [f"{role}-{rank // ranks_per_host}" for rank in range(side.ranks * side.replicas)]

    speeds = {"egress": bytes_per_s, "ingress": bytes_per_s}
    return Topology.from_hosts(hosts("trainer", source), hosts("rollout", target), **speeds)


def _most_bytes(made: Plan) -> int:
    """Return the maximum bytes through one network card in one direction."""
    passed_on = made.relay_bytes_out.values() if made.relay else ()
    return max((*made.bytes_out.values(), *made.bytes_in.values(), *passed_on), default=0)


def _busiest(sizes: Mapping[int, int]) -> tuple[int, int]:
    """Return the rank with the most bytes, and them."""
    return max(sizes.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
