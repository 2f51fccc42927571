from datetime import timedelta

import numpy as np
import pytest

from doubles.ranks import RankFailed, run_ranks


def shares(rank, world_size, **sizes):
    import torch

    from cosmos_rl_core.parallel.dims import ParallelDims
    from cosmos_rl_core.parallel.mesh import ReplicaMesh

    mesh = ReplicaMesh.build(ParallelDims(**sizes), device=torch.device("cpu"))
    return {
        "share": mesh.share.index,
        "fsdp": mesh.fsdp.mesh.numpy(),
        "experts": mesh.experts.mesh.numpy(),
    }


def test_each_data_parallel_rank_has_its_own_samples():
    ranks = run_ranks(shares, 4, dp_replicate=2, dp_shard=2)
    assert [int(r["share"]) for r in ranks] == [0, 1, 2, 3]
    assert all(r["fsdp"].tolist() == [[0, 1], [2, 3]] for r in ranks)


def test_ranks_along_a_sequence_share_their_samples():
    ranks = run_ranks(shares, 4, dp_shard=2, cp=2, ep=2)
    assert [int(r["share"]) for r in ranks] == [0, 0, 1, 1]
    assert all(r["fsdp"].tolist() == [0, 1, 2, 3] for r in ranks)
    assert all(np.array_equal(r["experts"], [[0, 1], [2, 3]]) for r in ranks)


def test_to_experts_ranks_along_tp_are_more_data_ranks():
    ranks = run_ranks(shares, 4, dp_shard=2, tp=2, ep=2)
    assert [int(r["share"]) for r in ranks] == [0, 0, 1, 1]
    assert [r["fsdp"].tolist() for r in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(np.array_equal(r["experts"], [[0, 1], [2, 3]]) for r in ranks)


def waits_in_vain(rank, world_size, **sizes):
    """How long rank 0 waits for the others on each axis before it gives up."""
    import time

    import torch
    import torch.distributed as dist

    from cosmos_rl_core.parallel.dims import ParallelDims
    from cosmos_rl_core.parallel.mesh import ReplicaMesh

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    mesh = ReplicaMesh.build(ParallelDims(**sizes), device=torch.device("cpu"))
    waited = {}
    for axis in sizes:
        started = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError, match="Timed out"):
                dist.all_reduce(torch.ones(1), group=mesh.world[axis].get_group())
            waited[axis] = time.monotonic() - started
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60))
    return waited


def test_no_axis_waits_longer_than_all_ranks_do():
    waited = run_ranks(waits_in_vain, 4, timeout_s=60.0, dp_shard=2, tp=2)[0]
    assert all(seconds < 10.0 for seconds in waited.values())
    assert set(waited) == {"dp_shard", "tp"}


def fails_on_the_last(rank, world_size):
    if rank == world_size - 1:
        raise ValueError("rank 1 cannot")
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def test_a_rank_that_raises_is_told_and_does_not_hang_the_others():
    with pytest.raises(RankFailed, match="rank 1 cannot"):
        run_ranks(fails_on_the_last, 2)
