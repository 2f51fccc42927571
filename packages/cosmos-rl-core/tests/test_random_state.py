"""First values are drawn by a seed whatever else draws."""

from concurrent.futures import ThreadPoolExecutor

import torch

from cosmos_rl_core.parallel.device import forked_rng


def drawn(seed):
    with forked_rng(seed=seed):
        return torch.rand(4)


def test_draws_begin_at_the_seed_and_leave_the_state_as_it_was():
    before = torch.get_rng_state()
    assert torch.equal(drawn(3), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_take_turns():
    alone = [drawn(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert all(map(torch.equal, pool.map(drawn, range(8)), alone))
