import numpy as np
import pytest
import torch
from torch import nn

from cosmos_rl_core.parallel.gradients import clip_gradients
from doubles.ranks import run_ranks


def test_one_process_clips_like_torch():
    values = [torch.arange(6.0).view(2, 3), torch.tensor([3.0, -4.0])]
    ours, theirs = ([nn.Parameter(torch.zeros_like(v)) for v in values] for _ in range(2))
    for mine, other, value in zip(ours, theirs, values):
        mine.grad, other.grad = value.clone(), value.clone()
    norm = clip_gradients(ours, max_norm=1.0)
    assert norm == nn.utils.clip_grad_norm_(theirs, 1.0)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs))


def mixed_meshes(rank, world_size, *, max_norm):
    """Four ranks: a matrix cut over all, one cut over one axis and copied over the other, a vector that all hold."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    placed = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()]]
    values = [torch.arange(20.0).view(4, 5), torch.arange(15.0).view(3, 5), torch.tensor([2.0, -1.0])]
    parameters = []
    for value, placements in zip(values, placed):
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, placements))
        parameter.grad = distribute_tensor(value, mesh, placements)
        parameters.append(parameter)
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([5.0, 7.0])
    norm = float(clip_gradients([*parameters, plain], max_norm=max_norm))
    clipped = [p.grad.full_tensor().numpy() for p in parameters]
    return {"norm": norm, "first": clipped[0], "second": clipped[1], "plain": plain.grad.numpy()}


def test_parts_on_several_meshes_count_once():
    values = [np.arange(20.0), np.arange(15.0), np.array([2.0, -1.0]), np.array([5.0, 7.0])]
    wanted = np.sqrt(sum((v**2).sum() for v in values))
    for found in run_ranks(mixed_meshes, 4, max_norm=1.0):
        assert found["norm"] == pytest.approx(wanted, rel=1e-6)
        np.testing.assert_allclose(found["first"].ravel(), values[0] / wanted, rtol=1e-5)
        np.testing.assert_allclose(found["second"].ravel(), values[1] / wanted, rtol=1e-5)
        np.testing.assert_allclose(found["plain"], values[3] / wanted, rtol=1e-5)


def stages(rank, world_size, *, bad):
    """Two stages of one rank each, with parameters of their own; the second also holds a copy the first counts."""
    own = nn.Parameter(torch.zeros(2))
    own.grad = torch.tensor([3.0, 4.0]) * (rank + 1)
    if bad and rank == 1:
        own.grad[0] = float("nan")
    tied = nn.Parameter(torch.zeros(1))
    tied.grad = torch.tensor([2.0])
    elsewhere = [tied] if rank == 1 else []
    return {"norm": float(clip_gradients([own, tied], max_norm=0.0, num_stages=2, elsewhere=elsewhere))}


def test_stages_add_up_and_a_tied_matrix_counts_once():
    for found in run_ranks(stages, 2, bad=False):
        assert found["norm"] == pytest.approx(np.sqrt(25 + 100 + 4))


def test_all_ranks_get_a_norm_that_is_not_finite():
    assert all(np.isnan(found["norm"]) for found in run_ranks(stages, 2, bad=True))


def metrics(rank, world_size, *, pp, cp, dp_shard):
    from cosmos_rl_core.parallel.dims import ParallelDims
    from cosmos_rl_core.parallel.mesh import ReplicaMesh
    from cosmos_rl_core.parallel.metrics import sum_metrics

    mesh = ReplicaMesh.build(ParallelDims(pp=pp, cp=cp, dp_shard=dp_shard), device=torch.device("cpu"))
    mine = {} if mesh.stage < pp - 1 else {"loss": torch.tensor(10.0**mesh.share.index), "kl": torch.tensor(0.5)}
    return sum_metrics(mine, mesh, equal={"grad_norm": torch.tensor(2.5)})


@pytest.mark.parametrize("dims", [(1, 1, 4), (2, 1, 2), (2, 2, 1), (1, 2, 2)])
def test_metrics_are_summed_over_the_terms_once_and_equal_on_all_ranks(dims):
    pp, cp, dp_shard = dims
    for found in run_ranks(metrics, 4, pp=pp, cp=cp, dp_shard=dp_shard):
        assert found == {"loss": sum(10.0**i for i in range(dp_shard)), "kl": 0.5 * dp_shard, "grad_norm": 2.5}


def optimizer_groups(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from cosmos_rl_core.train.optimizers.build import build_optimizer

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    module = nn.Module()
    module.whole = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
    module.part = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["a"], [Shard(0)]))
    module.bias = nn.Parameter(distribute_tensor(torch.ones(4), mesh["a"], [Shard(0)]))
    optimizer = build_optimizer("adamw", module, learning_rate=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {name: p.full_tensor().detach().numpy() for name, p in module.named_parameters()}


def test_one_optimizer_updates_parameters_of_several_meshes():
    for found in run_ranks(optimizer_groups, 4):
        np.testing.assert_allclose(found["whole"], 0.85, rtol=1e-5)
        np.testing.assert_allclose(found["part"], 0.85, rtol=1e-5)
        np.testing.assert_allclose(found["bias"], 0.9, rtol=1e-5)
