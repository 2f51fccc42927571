"""The ranks of a policy replica as a torch DeviceMesh, and the sums over its parts.

    world [pp, dp_replicate, dp_shard, cp, tp]
        fsdp     dp_shard x cp flattened; with dp_replicate before it where that is above 1 (HSDP)
        experts  dp_shard x cp x tp as [efsdp, ep]: efsdp shards an expert's weights, ep spreads the experts

Every gradient is a sum, never a mean: losses are already divided by counts over the whole batch, so that the gradient
of a parameter is the sum over the ranks that hold parts of the batch (dp) or of its sequences (cp). Along tp ranks hold
the same tokens and the experts see a slice of them from each, so that to an expert tp ranks are more data ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from cosmos_rl_core.parallel.dims import AXES, ParallelDims
from cosmos_rl_core.types import Share


@dataclass(frozen=True, slots=True)
class ReplicaMesh:
    """The position of this rank in its replica. Made by `ReplicaMesh.build` in every rank at the same time."""

    dims: ParallelDims
    world: DeviceMesh
    """With the axes of `dims.AXES`, those of size 1 too."""
    fsdp: DeviceMesh
    """[dp_shard_cp] or [dp_replicate, dp_shard_cp]: the mesh of `fully_shard` for everything but experts."""
    experts: DeviceMesh
    """[efsdp, ep], with dp_replicate before it where that is above 1."""
    device: torch.device

    @classmethod
    def build(cls, dims: ParallelDims, *, device: torch.device) -> ReplicaMesh:
        """Make the mesh out of the default process group, which must have exactly `dims.world_size` ranks.

        The groups of the axes keep the default group's timeout.
        """
        assert dist.get_world_size() == dims.world_size, f"{dist.get_world_size()} ranks for {dims.describe()}"
        world = init_device_mesh(device.type, dims.shape, mesh_dim_names=AXES)
        shards = world["dp_shard", "cp"]._flatten("dp_shard_cp")
        tokens = world["dp_shard", "cp", "tp"]._flatten("dp_shard_cp_tp")
        spread = tokens._unflatten(0, (tokens.size() // dims.ep, dims.ep), ("efsdp", "ep"))
        _set_timeouts(world, shards, tokens, spread, device=device)
        if dims.dp_replicate == 1:
            return cls(dims, world, shards, spread, device)
        both = DeviceMesh._concatenate([world["dp_replicate"], shards])
        return cls(dims, world, both, DeviceMesh._concatenate([world["dp_replicate"], spread]), device)

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """[efsdp] or [dp_replicate, efsdp]: the mesh of `fully_shard` for experts."""
        return self.experts["dp_replicate", "efsdp"] if self.dims.dp_replicate > 1 else self.experts["efsdp"]

    def axis(self, name: str) -> DeviceMesh | None:
        """Return the one-dimensional mesh of an axis, None where its size is 1."""
        mesh = self.experts["ep"] if name == "ep" else self.world[name]
        return mesh if mesh.size() > 1 else None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def share(self) -> Share:
        """The part of each batch that this rank trains on."""
        return self.dims.share(self.rank)

    @property
    def stage(self) -> int:
        """Index in the pipeline, 0 first."""
        return self.dims.coordinates(self.rank)["pp"]

    def sum_over_all(self, value: Tensor) -> Tensor:
        """Return the sum over all ranks of the replica; in place."""
        dist.all_reduce(value)
        return value

    def most_over_shards(self, value: int) -> int:
        """Return the largest value of the ranks that gather and reduce parameters together; all of them call it."""
        most = torch.tensor(value, device=self.device)
        for group in self.fsdp.get_all_groups():
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return int(most)


def _set_timeouts(*meshes: DeviceMesh, device: torch.device) -> None:
    """Give the meshes' groups the timeout of the default group; torch gives new groups one of its own."""
    default = dist.distributed_c10d._get_default_group()
    timeout = default._get_backend(device).options._timeout
    for mesh in meshes:
        for group in mesh.get_all_groups():
            _set_pg_timeout(timeout, group)
