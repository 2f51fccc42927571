import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_transfer.content.delta import PieceDelta
from cosmos_rl_transfer.content.raw import same_width
from cosmos_rl_transfer.pull.landing import Patch


def change_to(tensor, positions):
    """Change some elements to those of `tensor`."""
    positions = np.array(positions, np.int64)
    return PieceDelta(positions, same_width(tensor.contiguous()).reshape(-1)[positions])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.sampled_from(["bfloat16", "float32"]), st.randoms(), st.data())
def test_only_the_named_elements_of_a_tensor_of_any_strides_change(shape, dtype, random, data):
    order = list(range(len(shape)))
    random.shuffle(order)
    base = torch.zeros([shape[d] + 2 for d in order], dtype=torch.float32)
    live = base[tuple(slice(1, 1 + shape[d]) for d in order)].permute([order.index(d) for d in range(len(shape))])
    wanted = torch.rand(shape).to(getattr(torch, dtype)) + 1
    positions = sorted(data.draw(st.sets(st.integers(0, live.numel() - 1))))
    Patch.of(live, change_to(wanted, positions), dtype=dtype).write()
    expected = torch.zeros(shape).flatten()
    expected[positions] = wanted.float().flatten()[positions]
    assert torch.equal(live.flatten(), expected)
    assert base.count_nonzero() == len(positions)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bool", "int64", "bfloat16"])
def test_every_kind_of_element_can_be_written(dtype):
    live = torch.zeros(9, 7).to(getattr(torch, dtype)).T
    wanted = (torch.arange(63).reshape(7, 9) % 5).to(getattr(torch, dtype))
    Patch.of(live, change_to(wanted, range(63)), dtype=dtype).write()
    assert torch.equal(live.float(), wanted.float())


def test_writing_again_changes_nothing():
    live, wanted = torch.zeros(4, 4), torch.rand(4, 4)
    patch = Patch.of(live, change_to(wanted, [1, 5]), dtype="float32")
    patch.write()
    once = live.clone()
    patch.write()
    assert torch.equal(live, once)


def test_a_parameter_keeps_its_gradient_switch():
    live = torch.nn.Parameter(torch.zeros(4))
    Patch.of(live.detach(), change_to(torch.ones(4), [2]), dtype="float32").write()
    assert live.requires_grad and live.tolist() == [0, 0, 1, 0]
