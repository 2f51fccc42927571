"""Rows for heads and back, and terms brought together: values and gradients against plain slices."""

import numpy as np

from doubles.ranks import run_ranks


def axis_of(world_size):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world_size,))


def exchange(rank, world_size, *, length, heads):
    import torch

    from cosmos_rl_core.parallel.axes.context import heads_to_rows, rows_to_heads

    axis = axis_of(world_size)
    whole = torch.arange(float(length * heads * 3)).view(length, heads, 3)
    rows = whole.chunk(world_size, dim=0)[rank].clone().requires_grad_()
    own = rows_to_heads(rows, axis)
    assert torch.equal(own, whole.chunk(world_size, dim=1)[rank])
    slope = own.detach().sin()  # a gradient that is another one at each place
    (gradient,) = torch.autograd.grad(own, rows, slope, retain_graph=True)
    back = heads_to_rows(own * 1, axis)
    (round_trip,) = torch.autograd.grad(back, rows, rows.detach().cos())
    return {"back": back.detach().numpy(), "gradient": gradient.numpy(), "round_trip": round_trip.numpy()}


def test_heads_for_rows_and_back_moves_values_and_gradients_to_their_places():
    whole = np.arange(6 * 4 * 3, dtype=np.float32).reshape(6, 4, 3)
    ranks = run_ranks(exchange, 2, length=6, heads=4)
    for key, wanted in {"back": whole, "gradient": np.sin(whole), "round_trip": np.cos(whole)}.items():
        np.testing.assert_allclose(np.concatenate([rank[key] for rank in ranks]), wanted, rtol=1e-6)


def place(rank, world_size):
    import torch

    from cosmos_rl_core.parallel.axes.context import place_terms

    places = torch.tensor([[3, 0], [], [1, 4, 2]][rank], dtype=torch.int64)
    values = (10.0 * places + 1).requires_grad_()
    whole = place_terms(values, places, 5, axis_of(world_size))
    (gradient,) = torch.autograd.grad(whole, values, torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]))
    return {"whole": whole.detach().numpy(), "gradient": gradient.numpy()}


def test_every_rank_gets_all_terms_and_the_gradient_of_its_own():
    ranks = run_ranks(place, 3)
    assert all(rank["whole"].tolist() == [1, 11, 21, 31, 41] for rank in ranks)
    assert [rank["gradient"].tolist() for rank in ranks] == [[3, 0], [], [1, 4, 2]]
