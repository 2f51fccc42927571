"""A step's metrics, summed over the ranks that counted different terms.

Ranks along cp and tp count the same terms, and stages before the last count none; so only the first rank along cp and
tp of the last stage contributes, and all ranks get the sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_rl_core.parallel.mesh import ReplicaMesh


def sum_metrics(
    metrics: Mapping[str, Tensor], mesh: ReplicaMesh, *, equal: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """Return each metric's sum over the whole batch, the same on all ranks. All ranks of the replica call this.

    Every contributing rank has the same names; the others' metrics are not read. `equal`: metrics that are equal on all
    ranks, returned as they are. The host waits for the device once.
    """
    last_stage = mesh.dims.pp - 1
    contributes = _contributes(mesh)
    source = next(r for r in range(mesh.dims.world_size) if mesh.dims.coordinates(r)["pp"] == last_stage)
    names = _shared_names(sorted(metrics), source=source)
    total = torch.zeros(len(names), dtype=torch.float64, device=mesh.device)
    if names and contributes:
        total = torch.stack([metrics[name].double().to(mesh.device) for name in names])
    if names:
        dist.all_reduce(total)
    equal = equal or {}
    kept = [value.double().to(mesh.device).reshape(1) for value in equal.values()]
    return dict(zip((*names, *equal), torch.cat([total, *kept]).tolist()))


def sum_over_terms(counts: Tensor, mesh: ReplicaMesh) -> Tensor:
    """Return counts [n] int64 of this rank's terms, summed over all terms of the replica. All ranks call this."""
    total = counts.to(mesh.device) if _contributes(mesh) else torch.zeros_like(counts, device=mesh.device)
    dist.all_reduce(total)
    return total.cpu()


def _contributes(mesh: ReplicaMesh) -> bool:
    at = mesh.dims.coordinates(mesh.rank)
    return at["pp"] == mesh.dims.pp - 1 and at["cp"] == at["tp"] == 0


def _shared_names(names: list[str], *, source: int) -> list[str]:
    """Return the names that rank `source` has. They are exchanged in host memory, apart from the device's work."""
    content = torch.frombuffer(bytearray(msgspec.json.encode(names)), dtype=torch.uint8)
    size = torch.tensor(len(content))
    dist.broadcast(size, src=source)
    if dist.get_rank() != source:
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, src=source)
    return msgspec.json.decode(content.numpy().tobytes(), type=list[str])
