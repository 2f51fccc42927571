import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_rl_core.parallel.axes.expert import combine, dispatch, grouped_linear, own_rows
from cosmos_rl_core.parallel.dims import ParallelDims
from cosmos_rl_core.parallel.mesh import ReplicaMesh
from cosmos_rl_core.parallel.remat import checkpoint_activations
from doubles.ranks import run_ranks

EXPERTS, TOP_K, WIDTH, OUT = 4, 2, 8, 4


def routed(num_rows, seed):
    """Rows with gradient, their two experts, gates, and all experts' weights, the same in every rank."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, WIDTH, generator=random).requires_grad_()
    experts = torch.rand(num_rows, EXPERTS - 1, generator=random).topk(TOP_K).indices  # nobody goes to the last one
    gates = torch.rand(num_rows, TOP_K, generator=random).requires_grad_()
    weights = torch.randn(EXPERTS, WIDTH, OUT, generator=torch.Generator().manual_seed(99)).requires_grad_()
    return hidden, experts, gates, weights


def one_by_one(hidden, experts, gates, weights):
    products = torch.einsum("nh,nkho->nko", hidden, weights[experts])
    return (products * gates.unsqueeze(-1)).sum(1)


def through(hidden, experts, gates, weights, axis=None):
    rows, ends, exchange = dispatch(hidden, experts, num_experts=EXPERTS, axis=axis)
    return combine(grouped_linear(rows, weights, ends), gates, exchange)


def test_one_rank_gives_each_row_the_gated_sum_of_its_experts():
    hidden, experts, gates, weights = routed(7, seed=1)
    torch.testing.assert_close(through(hidden, experts, gates, weights), one_by_one(hidden, experts, gates, weights))


def spread(rank, world_size):
    mesh = ReplicaMesh.build(ParallelDims(dp_shard=world_size, ep=world_size), device=torch.device("cpu"))
    hidden, experts, gates, weights = routed(3 * rank, seed=rank)  # the first rank has no rows at all
    held = EXPERTS // world_size
    mine = weights.detach()[rank * held : (rank + 1) * held].clone().requires_grad_()
    output = through(hidden, experts, gates, mine, axis=mesh.axis("ep"))
    output.square().sum().backward()
    return {"output": output.detach(), "hidden": hidden.grad, "gates": gates.grad, "weights": mine.grad}


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_give_what_one_rank_gives_and_its_gradients(world_size):
    ranks = run_ranks(spread, world_size)
    weight_gradient = torch.zeros(EXPERTS, WIDTH, OUT)
    for rank, result in enumerate(ranks):
        hidden, experts, gates, weights = routed(3 * rank, seed=rank)
        output = one_by_one(hidden, experts, gates, weights)
        of_hidden, of_gates, of_weights = torch.autograd.grad(output.square().sum(), [hidden, gates, weights])
        np.testing.assert_allclose(result["output"], output.detach(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(result["hidden"], of_hidden, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(result["gates"], of_gates, rtol=1e-5, atol=1e-5)
        weight_gradient += of_weights
    np.testing.assert_allclose(np.concatenate([r["weights"] for r in ranks]), weight_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out", [4, 5])  # 5 float32 are no multiple of 16 bytes: another product
def test_grouped_products_are_those_of_each_expert_also_without_rows(out):
    rows = torch.randn(5, WIDTH, requires_grad=True)
    weights = torch.randn(3, WIDTH, out, requires_grad=True)
    output = grouped_linear(rows, weights, torch.tensor([2, 2, 5], dtype=torch.int32))
    torch.testing.assert_close(output, torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[2]]))
    output.square().sum().backward()
    assert weights.grad is not None and weights.grad[1].eq(0).all() and weights.grad[2].ne(0).all()


def test_experts_without_a_single_row_have_gradients_of_zeros():
    weights = torch.randn(3, WIDTH, OUT, requires_grad=True)
    grouped_linear(torch.zeros(0, WIDTH), weights, torch.zeros(3, dtype=torch.int32)).square().sum().backward()
    assert weights.grad is not None and weights.grad.eq(0).all()


def test_biases_are_added_to_the_rows_of_their_expert():
    bias = torch.tensor([[1.0], [2.0], [3.0]])
    ends = torch.tensor([1, 1, 3], dtype=torch.int32)
    output = grouped_linear(torch.zeros(3, 4), torch.zeros(3, 4, 1), ends, bias=bias)
    assert output.flatten().tolist() == [1.0, 3.0, 3.0]


def parts(rank, world_size):
    mesh = ReplicaMesh.build(ParallelDims(tp=world_size), device=torch.device("cpu"))
    rows = own_rows(5, mesh.axis("tp"))
    return {"rows": np.arange(5)[rows]}


def test_rows_that_all_ranks_have_are_shared_out_once():
    assert [r["rows"].tolist() for r in run_ranks(parts, 3)] == [[0], [1, 2], [3, 4]]
    assert np.arange(5)[own_rows(5, None)].tolist() == [0, 1, 2, 3, 4]


class CountedExchanges(TorchDispatchMode):
    """Counts the all-to-alls that are really executed: results kept by recomputation do not come here."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops._c10d_functional.all_to_all_single.default
        return func(*args, **(kwargs or {}))


class Layer(torch.nn.Module):
    def __init__(self, weights, axis):
        super().__init__()
        self.weights, self.axis = torch.nn.Parameter(weights), axis

    def forward(self, hidden, experts, gates):
        return through(hidden, experts, gates, self.weights, axis=self.axis)


def recomputed(rank, world_size, mode):
    mesh = ReplicaMesh.build(ParallelDims(dp_shard=world_size, ep=world_size), device=torch.device("cpu"))
    hidden, experts, gates, weights = routed(3 + rank, seed=rank)
    held = EXPERTS // world_size
    layer = Layer(weights.detach()[rank * held : (rank + 1) * held].clone(), mesh.axis("ep"))
    checkpoint_activations([layer], mode)
    with CountedExchanges() as exchanges:
        layer(hidden, experts, gates).square().sum().backward()
    return {"exchanges": torch.tensor(exchanges.count), "hidden": hidden.grad, "weights": layer.weights.grad}


def test_selective_recomputation_keeps_what_came_over_the_network():
    """Counts, rows and outputs go forward, two gradients back; "full" sends the first three again."""
    found = {mode: run_ranks(recomputed, 2, mode=mode) for mode in ("none", "selective", "full")}
    assert {mode: [int(r["exchanges"]) for r in ranks] for mode, ranks in found.items()} == {
        "none": [5, 5],
        "selective": [5, 5],
        "full": [8, 8],
    }
    for ranks in (found["selective"], found["full"]):
        for result, wanted in zip(ranks, found["none"]):
            np.testing.assert_array_equal(result["hidden"], wanted["hidden"])
            np.testing.assert_array_equal(result["weights"], wanted["weights"])
