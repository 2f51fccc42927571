"""The memory that operators hold, with values and without."""

import torch

from cosmos_rl_core.parallel.offload.swap import tensors_of
from cosmos_rl_core.plan.live_bytes import LiveBytes, tensors_without_memory


def test_bytes_are_counted_while_a_tensor_uses_them():
    weight = torch.nn.Linear(8, 8, bias=False)
    with torch.no_grad(), LiveBytes(without=tensors_of(weight)) as held:
        first = torch.zeros(4, 8)  # 128
        view = first[1:]
        del first
        second = weight(view)  # 96, and views of the weight
        del view
        third = second + 1  # 96, after 128 went
        del second
    assert third.shape == (3, 8)
    assert held.peak == 128 + 96


def test_without_memory_the_same_bytes_are_counted():
    def peak():
        network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        with torch.no_grad(), LiveBytes(without=tensors_of(network)) as held:
            network(torch.zeros(32, 64))
        return held.peak

    with tensors_without_memory():
        found = peak()
    assert found == peak() == 4 * 32 * (64 + 256 + 256)  # the input, and before and after ReLU
