"""A plan for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cosmos_rl_transfer.planning.plan import Plan

_NUM_BUSIEST = 3


def explain(made: Plan) -> str:
    """Return a few lines: bytes, bounds and ratios, busiest ranks, relay and why, memory, digest."""
    ratio = made.total_bytes / made.lower_bound if made.lower_bound else 1.0
    classes = sum(len(part.classes) for part in made.replicas)
    busiest_out, busiest_in = (max(sizes.values(), default=0) for sizes in (made.bytes_out, made.bytes_in))
    lines = [
        f"bytes     {readable(made.total_bytes)} to {len(made.bytes_in)} target ranks, lower bound "
        f"{readable(made.lower_bound)} ({ratio:.3f}x)",
        f"sources   the busiest of {len(made.bytes_out)} sends {readable(busiest_out)}, lower bound "
        f"{readable(made.egress_bound)} ({made.ratio:.3f}x)",
        f"          busiest: {_busiest(made.bytes_out)}",
        f"targets   the busiest receives {readable(busiest_in)}, as much as it holds",
        f"time      at best {_seconds(made):.3g} s at NIC speed",
        f"relay     {'yes' if made.relay else 'no'}: {made.relay_reason}",
        f"memory    at most {readable(made.peak_extra_bytes)} beside the weights, a rank and direction",
        f"streams   {len(made.pairs)}, planned as {classes} classes of tensors in {len(made.replicas)} replicas",
        f"digest    {made.digest}",
    ]
    return "\n".join(lines)


def readable(num_bytes: int) -> str:
    """Return "1.50 GB", in powers of 1000; below 1 kB in bytes."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"


def _busiest(sizes: Mapping[int, int]) -> str:
    ranked = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:_NUM_BUSIEST]
    return ", ".join(f"rank {rank} {readable(size)}" for rank, size in ranked)


def _seconds(made: Plan) -> float:
    """The larger of the two bounds, as time."""
    out = max((made.topology.source(rank).egress for rank in made.bytes_out), default=1)
    into = max((made.topology.target(rank).ingress for rank in made.bytes_in), default=1)
    return max(made.egress_bound / out, made.ingress_bound / into)
