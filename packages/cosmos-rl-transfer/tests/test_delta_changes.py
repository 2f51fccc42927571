import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_transfer.content.raw import same_width
from cosmos_rl_transfer.publish.outgoing import CHUNK_BYTES, Comparison, chunks

DTYPES = ["uint8", "bfloat16", "float32", "int64"]


def random_tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    return torch.randint(0, 255, shape, generator=generator).to(kind)


def changed(tensor, density, seed=1):
    """The same tensor with other values at some places, and where."""
    mask = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < density
    return torch.where(mask, tensor + 1, tensor).to(tensor.dtype), np.flatnonzero(mask.numpy())


def snapshot_of(tensor):
    return same_width(tensor.contiguous()).reshape(-1).copy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.2])
@pytest.mark.parametrize("transposed", [False, True])
def test_exactly_what_changed_is_found_and_the_copy_follows(dtype, density, transposed):
    old = random_tensor((501, 1003), dtype)
    old = old.T if transposed else old
    new, where = changed(old, density)
    copy = snapshot_of(old)
    found = Comparison().refresh(new, copy, dtype=dtype)
    assert found is not None
    assert found.positions.tolist() == where.tolist()
    assert np.array_equal(found.old, snapshot_of(old)[where])
    assert np.array_equal(copy, snapshot_of(new))


@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("numel", [100, 7 * CHUNK_BYTES, 40 * CHUNK_BYTES])
def test_many_changes_are_not_listed_and_the_copy_follows(density, numel):
    old = random_tensor((numel,), "uint8")
    new, _ = changed(old, density)
    copy = snapshot_of(old)
    assert Comparison().refresh(new, copy, dtype="uint8") is None
    assert np.array_equal(copy, snapshot_of(new))


def test_a_change_that_the_cast_removes_is_none():
    old = torch.ones(64)
    new = old + 1e-6
    copy = snapshot_of(old.bfloat16())
    found = Comparison().refresh(new, copy, dtype="bfloat16")
    assert found is not None and len(found.positions) == 0
    new[7] = 2.0
    found = Comparison().refresh(new, copy, dtype="bfloat16")
    assert found is not None and found.positions.tolist() == [7]
    assert np.array_equal(copy, snapshot_of(new.bfloat16()))


def test_a_zero_that_loses_its_sign_is_a_change():
    old, new = torch.tensor([0.0, -0.0]), torch.tensor([-0.0, -0.0])
    found = Comparison().refresh(new, snapshot_of(old), dtype="float32")
    assert found is None  # one of two is more than a third
    found = Comparison().refresh(torch.cat((new, new)), snapshot_of(torch.cat((old, new))), dtype="float32")
    assert found is not None and found.positions.tolist() == [0]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 40), st.randoms())
def test_chunks_of_any_strides_are_the_tensor_in_row_major_order(shape, most, random):
    dims = list(range(len(shape)))
    random.shuffle(dims)
    tensor = torch.arange(int(np.prod(shape, dtype=int))).reshape([shape[d] for d in dims])
    tensor = tensor.permute([dims.index(d) for d in range(len(shape))])
    found, end = [], 0
    for first, part in chunks(tensor, most):
        assert first == end and 0 < part.numel() <= most
        found += part.flatten().tolist()
        end += part.numel()
    assert found == tensor.flatten().tolist()
