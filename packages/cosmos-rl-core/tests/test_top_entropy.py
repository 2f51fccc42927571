"""The terms of the highest entropy are found over all ranks, whatever part of them each has."""

from __future__ import annotations

import threading

import pytest
import torch

from cosmos_rl_core.train.learner import smallest_of_share


def alone(counts):
    return counts


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 2, 5, 101, 4097])
def test_the_share_is_that_at_or_above_the_quantile(count, share):
    values = torch.rand(count, generator=torch.Generator().manual_seed(count)) * 3
    values[: count // 3] = 0.0
    values[count // 3 : count // 2] = values[-1]
    kept = values >= smallest_of_share(values, share, sum_counts=alone)
    assert kept.tolist() == (values >= torch.quantile(values, 1 - share)).tolist()


def test_by_hand():
    values = torch.tensor([0.5, 0.1, 0.4, 0.2, 0.3])
    assert smallest_of_share(values, 0.4, sum_counts=alone) == torch.tensor(0.4).item()  # 2 of 5


def test_ranks_agree_and_find_what_one_rank_finds():
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    parts = values.split([700, 0, 299, 1])
    barrier, counted = threading.Barrier(len(parts)), [torch.zeros(256)] * len(parts)
    found = [0.0] * len(parts)

    def rank(place):
        def sum_counts(counts):
            counted[place] = counts
            barrier.wait()
            total = torch.stack(list(counted)).sum(0)
            barrier.wait()
            return total

        found[place] = smallest_of_share(parts[place], 0.2, sum_counts=sum_counts)

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [smallest_of_share(values, 0.2, sum_counts=alone)] * len(parts)
