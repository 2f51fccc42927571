import numpy as np
import pytest

from cosmos_rl_core.testing.ranks import RankFailed, run_ranks


def shares(rank, world_size, **sizes):
    import torch

    from cosmos_rl_core.parallel.dims import ParallelDims
    from cosmos_rl_core.parallel.mesh import ReplicaMesh

    mesh = ReplicaMesh.build(ParallelDims(**sizes), device=torch.device("cpu"))
    mine = torch.tensor(10.0**mesh.share.index)
    return {
        "share": mesh.share.index,
        "sum": mesh.sum_over_shares(mine).numpy(),
        "fsdp": mesh.fsdp.mesh.numpy(),
        "experts": mesh.experts.mesh.numpy(),
    }


def test_sums_over_shares_count_every_part_of_the_batch_once():
    ranks = run_ranks(shares, 4, dp_replicate=2, dp_shard=2)
    assert [int(r["share"]) for r in ranks] == [0, 1, 2, 3]
    assert all(r["sum"] == 1111.0 for r in ranks)
    assert all(r["fsdp"].tolist() == [[0, 1], [2, 3]] for r in ranks)


def test_ranks_along_a_sequence_share_their_samples():
    ranks = run_ranks(shares, 4, dp_shard=2, cp=2, ep=2)
    assert [int(r["share"]) for r in ranks] == [0, 0, 1, 1]
    assert all(r["sum"] == 11.0 for r in ranks)
    assert all(r["fsdp"].tolist() == [0, 1, 2, 3] for r in ranks)
    assert all(np.array_equal(r["experts"], [[0, 1], [2, 3]]) for r in ranks)


def test_to_experts_ranks_along_tp_are_more_data_ranks():
    ranks = run_ranks(shares, 4, dp_shard=2, tp=2, ep=2)
    assert [int(r["share"]) for r in ranks] == [0, 0, 1, 1]
    assert [r["fsdp"].tolist() for r in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(np.array_equal(r["experts"], [[0, 1], [2, 3]]) for r in ranks)


def fails_on_the_last(rank, world_size):
    if rank == world_size - 1:
        raise ValueError("rank 1 cannot")
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


def test_a_rank_that_raises_is_told_and_does_not_hang_the_others():
    with pytest.raises(RankFailed, match="rank 1 cannot"):
        run_ranks(fails_on_the_last, 2)
