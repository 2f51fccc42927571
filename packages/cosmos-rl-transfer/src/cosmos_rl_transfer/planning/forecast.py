"""Predicts the bytes and the minimum time of a sync between two layouts; starts nothing and reads no tensor."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.observe.console import table
from cosmos_rl_transfer.layout import spread
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.layout.shapes import Shapes
from cosmos_rl_transfer.layout.spread import Side
from cosmos_rl_transfer.planning.plan import TransferPlan, plan
from cosmos_rl_transfer.planning.relay import Relay
from cosmos_rl_transfer.planning.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Cost of one version from all trainers to all rollouts."""

    shapes: Shapes
    source: Side
    target: Side
    plan: TransferPlan
    gbit: float
    """Speed of a rank's network card, each way."""
    planning_s: float

    @property
    def transfer_s(self) -> float:
        """Seconds of the busiest network card in one direction, without anything else on the way."""
        plan = self.plan
        relayed = plan.relay_bytes_out.values() if plan.relay else ()
        most = max((*plan.bytes_out.values(), *plan.bytes_in.values(), *relayed), default=0)
        return most * 8 / (self.gbit * 1e9)

    def as_json(self) -> dict[str, Any]:
        """Return the forecast as JSON-like values; bytes are those of all ranks unless a key names one."""
        plan = self.plan
        busiest_trainer, sent = _busiest(plan.bytes_out)
        busiest_rollout, received = _busiest(plan.bytes_in)
        return {
            "model": self.shapes.name,
            "parameters": self.shapes.num_parameters,
            "tensors": len(self.shapes.specs),
            "source": str(self.source),
            "source_ranks": self.source.ranks * self.source.replicas,
            "target": str(self.target),
            "target_ranks": self.target.ranks * self.target.replicas,
            "received_bytes": plan.total_bytes,
            "lower_bound_bytes": plan.lower_bound,
            "trainer_bytes": sum(plan.bytes_out.values()),
            "busiest_trainer": busiest_trainer,
            "busiest_trainer_bytes": sent,
            "egress_bound_bytes": plan.egress_bound,
            "busiest_rollout": busiest_rollout,
            "busiest_rollout_bytes": received,
            "relay": plan.relay,
            "relay_reason": plan.relay_reason,
            "extra_bytes": plan.peak_extra_bytes,
            "gbit": self.gbit,
            "transfer_s": self.transfer_s,
            "planning_s": self.planning_s,
            "ratio": plan.ratio,
        }

    def __str__(self) -> str:
        """Return a table for people."""
        numbers = self.as_json()
        arrives, bound = numbers["received_bytes"], numbers["lower_bound_bytes"]
        sent, received = readable(numbers["busiest_trainer_bytes"]), readable(numbers["busiest_rollout_bytes"])
        rows = [
            ("model", f"{numbers['model']}: {numbers['parameters']:,} parameters in {numbers['tensors']:,} tensors"),
            ("from", f"{numbers['source']}, {_counted(numbers['source_ranks'], 'rank')}"),
            ("to", f"{numbers['target']}, {_counted(numbers['target_ranks'], 'rank')}"),
            ("arrives", f"{readable(arrives)}, {arrives / bound if bound else 1.0:.3f} x the lower bound"),
            ("trainers send", f"{readable(numbers['trainer_bytes'])} in all"),
            (
                "busiest trainer",
                f"rank {numbers['busiest_trainer']} sends {sent}, {numbers['ratio']:.3f} x the lower bound",
            ),
            ("busiest rollout", f"rank {numbers['busiest_rollout']} receives {received}"),
            ("relay", f"{'yes' if numbers['relay'] else 'no'}: {numbers['relay_reason']}"),
            ("extra memory", f"at most {readable(numbers['extra_bytes'])} a rank and direction"),
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

    def hosts(role: str, side: Side) -> list[str]:
        return [f"{role}-{rank // ranks_per_host}" for rank in range(side.ranks * side.replicas)]

    speed = int(gbit * 1e9 / 8)
    transfer = plan(
        manifest_of(shapes, source),
        manifest_of(shapes, target),
        Topology.from_hosts(hosts("trainer", source), hosts("rollout", target), egress=speed, ingress=speed),
        relay=relay,
        bucket_bytes=bucket_bytes,
        wire_dtype=wire_dtype,
    )
    planning_s = time.perf_counter() - started
    return Forecast(shapes=shapes, source=source, target=target, plan=transfer, gbit=gbit, planning_s=planning_s)


def manifest_of(shapes: Shapes, side: Side) -> Manifest:
    """Return the manifest of all ranks of one side. Raises LayoutError if the model cannot be sharded so."""
    sizes: dict[str, Any] = {**dict(side), "ep": side.ep}
    one = spread.mesh(shapes.specs, **sizes, kv_heads=shapes.kv_heads)
    return spread.replicas(one, side.replicas)


def _busiest(sizes: Mapping[int, int]) -> tuple[int, int]:
    """Return the rank with the most bytes, and them."""
    return max(sizes.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def readable(num_bytes: int) -> str:
    """Return "1.50 GB", in powers of 1000; below 1 kB in bytes."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
