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


def sum_metrics(metrics: Mapping[str, Tensor], mesh: ReplicaMesh) -> dict[str, float]:
    """Return each metric's sum over the whole batch, the same on all ranks. All ranks of the replica call this.

    Every contributing rank has the same names; the others' metrics are not read.
    """
    at = mesh.dims.coordinates(mesh.rank)
    last_stage = mesh.dims.pp - 1
    contributes = at["pp"] == last_stage and at["cp"] == at["tp"] == 0
    source = next(r for r in range(mesh.dims.world_size) if mesh.dims.coordinates(r)["pp"] == last_stage)
    names = _shared_names(sorted(metrics), source=source, device=mesh.device)
    values = [metrics[name].double() if contributes else torch.zeros((), dtype=torch.float64) for name in names]
    total = torch.stack([value.to(mesh.device) for value in values]) if names else torch.zeros(0)
    if names:
        dist.all_reduce(total)
    return dict(zip(names, total.tolist()))


def _shared_names(names: list[str], *, source: int, device: torch.device) -> list[str]:
    """Return the names that rank `source` has."""
    content = torch.frombuffer(bytearray(msgspec.json.encode(names)), dtype=torch.uint8).to(device)
    size = torch.tensor(len(content), device=device)
    dist.broadcast(size, src=source)
    if dist.get_rank() != source:
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, src=source)
    return msgspec.json.decode(content.cpu().numpy().tobytes(), type=list[str])
