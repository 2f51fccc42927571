import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_transfer.content import digest
from cosmos_rl_transfer.content.digest import add, bucket_hash, run_sum, tensor_sum
from cosmos_rl_transfer.layout.manifest import Box, whole_box

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


def random_tensor(shape, width, seed=0):
    rng = np.random.default_rng(seed)
    return np.frombuffer(rng.bytes(math.prod(shape) * np.dtype(width).itemsize), width).reshape(shape).copy()


def split(box, draw):
    """Cut a box into disjoint boxes at random, recursively."""
    dims = [d for d, n in enumerate(box.shape) if n > 1]
    if not dims or draw(st.integers(0, 2)) == 0:
        return [box]
    dim = draw(st.sampled_from(dims))
    cut = draw(st.integers(1, box.shape[dim] - 1))
    left, right, middle = list(box.shape), list(box.shape), list(box.offset)
    left[dim], right[dim], middle[dim] = cut, box.shape[dim] - cut, box.offset[dim] + cut
    parts = Box(box.offset, tuple(left)), Box(tuple(middle), tuple(right))
    return [piece for part in parts for piece in split(part, draw)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_disjoint_boxes_add_up_to_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 11), min_size=0, max_size=4)))
    tensor = random_tensor(shape, data.draw(st.sampled_from(WIDTHS)))
    total = 0
    for box in split(whole_box(shape), data.draw):
        total = add(total, tensor_sum(tensor[box.slices()], box, shape))
    assert total == tensor_sum(tensor, whole_box(shape), shape)


@pytest.mark.parametrize("width", WIDTHS)
def test_large_shards_in_either_dim_add_up_to_the_whole(width):
    shape = (300, 8192)  # several blocks of 2^11 words and runs long enough for the fast path
    tensor = random_tensor(shape, width)
    whole = tensor_sum(tensor, whole_box(shape), shape)
    for dim in (0, 1):
        cut = shape[dim] // 3
        total = 0
        for low, high in ((0, cut), (cut, shape[dim])):
            offset, size = [0, 0], list(shape)
            offset[dim], size[dim] = low, high - low
            box = Box(tuple(offset), tuple(size))
            total = add(total, tensor_sum(tensor[box.slices()], box, shape))
        assert total == whole


@pytest.mark.parametrize("width", WIDTHS)
def test_memory_alignment_does_not_change_the_hash(width):
    tensor = random_tensor((100,), width)
    shifted = np.empty(tensor.nbytes + 1, np.uint8)[1:]
    shifted[:] = tensor.view(np.uint8)
    assert run_sum(shifted.view(np.uint8).data.cast("B") and np.ndarray((100,), width, shifted.data), 3) == run_sum(
        tensor, 3
    )


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(WIDTHS), st.integers(1, 5000), st.data())
def test_a_single_flipped_bit_is_noticed(width, size, data):
    tensor = random_tensor((size,), width)
    before = run_sum(tensor, 0)
    raw = tensor.view(np.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert run_sum(tensor, 0) != before


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([np.uint32, np.uint64]), st.integers(2, 5000), st.data())
def test_two_swapped_elements_are_noticed(width, size, data):
    tensor = random_tensor((size,), width)
    i = data.draw(st.integers(0, size - 2))
    j = data.draw(st.integers(i + 1, size - 1))
    if tensor[i] == tensor[j]:
        return
    before = run_sum(tensor, 0)
    tensor[[i, j]] = tensor[[j, i]]
    assert run_sum(tensor, 0) != before


def test_swapped_bfloat16_neighbours_rows_and_columns_are_noticed():
    shape = (64, 64)
    tensor = random_tensor(shape, np.uint16)
    before = tensor_sum(tensor, whole_box(shape), shape)
    rows = tensor[np.r_[1, 0, 2:64]]
    columns = np.ascontiguousarray(tensor[:, np.r_[1, 0, 2:64]])
    turned = np.ascontiguousarray(tensor.T)
    assert before not in [tensor_sum(t, whole_box(shape), shape) for t in (rows, columns, turned)]


def test_the_hash_is_the_sum_of_its_definition():
    tensor = random_tensor((70000,), np.uint64)
    ones = np.zeros_like(tensor)
    total = 0
    for i in (0, 1, 2047, 2048, 69999):
        ones[i] = 1
        mix = run_sum(ones, 0)
        ones[i] = 0
        assert mix % 2 == 1
        alone = np.zeros_like(tensor)
        alone[i] = tensor[i]
        assert run_sum(alone, 0) == mix * int(tensor[i]) % 2**64
        total = add(total, mix)
    ones[[0, 1, 2047, 2048, 69999]] = 1
    assert run_sum(ones, 0) == total


@st.composite
def boxes(draw):
    """A tensor's shape, a box in it, and a box of the same size in an array that holds it."""
    dims = draw(st.integers(0, 4))
    shape, offset, size, held, at = [], [], [], [], []
    for _ in range(dims):
        extent = draw(st.sampled_from([1, 2, 3, 8, 40, 96]))
        before, behind = (draw(st.sampled_from([0, 0, 1, 8])) for _ in range(2))
        shape.append(before + extent + behind)
        offset.append(before)
        size.append(extent)
        low, high = (draw(st.sampled_from([0, 0, 1, 8])) for _ in range(2))
        held.append(low + extent + high)
        at.append(low)
    return tuple(shape), Box(tuple(offset), tuple(size)), tuple(held), Box(tuple(at), tuple(size))


@settings(max_examples=300, deadline=None)
@given(boxes(), st.sampled_from(WIDTHS))
def test_the_compiled_pass_equals_those_of_numpy(case, width):
    shape, box, held, inside = case
    if math.prod(held) > 1 << 20:
        return
    part = random_tensor(held, width)[(*inside.slices(), ...)]
    assert tensor_sum(part, box, shape) == digest.box_sum(part, box, shape)


def test_rows_of_whole_words_are_passed_over_by_compiled_code():
    compiled = pytest.importorskip("cosmos_rl_transfer.content.compiled")
    assert digest.compiled() is compiled
    shape, box = (64, 4096), Box((3, 1024), (50, 2048))
    source = random_tensor(shape, np.uint16)
    wanted = digest.box_sum(source[box.slices()], box, shape)
    source.flags.writeable = False
    assert tensor_sum(source[box.slices()], box, shape) == wanted


def test_bucket_hash_is_xxh3():
    assert bucket_hash(np.frombuffer(b"cosmos", np.uint8)) == bucket_hash(np.frombuffer(b"cosmos", np.uint8).copy())
    assert bucket_hash(np.zeros(0, np.uint8)) == 0x2D06800538D394C2  # xxh3-64 of nothing, from its specification
