import math
import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_transfer.content.digest import BLOCK, TABLE, add, bucket_hash, odd, sum_change, tensor_sum
from cosmos_rl_transfer.content.proof import Part, copy_proof
from cosmos_rl_transfer.layout.manifest import Box, whole_box

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


def random_tensor(shape, width, seed=0):
    rng = np.random.default_rng(seed)
    return np.frombuffer(rng.bytes(math.prod(shape) * np.dtype(width).itemsize), width).reshape(shape).copy()


def run_sum(run, start):
    """The hash of elements `start` ... of a long flat tensor."""
    return tensor_sum(run, Box((start,), run.shape), (start + run.size + 7,))


def by_definition(array, box, shape):
    """sum_k mix(k) * w_k over the words of a tensor that is zero outside of the box."""
    tensor = np.zeros(shape, array.dtype)
    tensor[box.slices()] = array
    words = np.frombuffer(tensor.tobytes() + bytes(-tensor.nbytes % 8), np.uint64)
    blocks = np.array([odd(block) for block in range(-(-len(words) // BLOCK))], np.uint64)
    mix = (TABLE * blocks[:, None]).reshape(-1)[: len(words)]
    return int((mix * words).sum(dtype=np.uint64))


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
def test_a_box_in_any_strides_has_the_sum_of_the_definition(case, width):
    shape, box, held, inside = case
    if max(math.prod(held), math.prod(shape)) > 1 << 20:
        return
    part = random_tensor(held, width)[(*inside.slices(), ...)]
    assert tensor_sum(part, box, shape) == by_definition(part, box, shape)


@pytest.mark.parametrize("words", [1, 31, 2047, 2049, 32771])
@pytest.mark.parametrize("first", [0, 8, 2045])
def test_a_run_may_begin_and_end_anywhere_in_a_block(words, first):
    run, shape = random_tensor((words,), np.uint64), (first + words,)
    run.flags.writeable = False  # a publisher's slot
    assert tensor_sum(run, Box((first,), (words,)), shape) == by_definition(run, Box((first,), (words,)), shape)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_transposed_array_has_the_sum_of_its_elements(width):
    shape, box = (40, 70, 9), Box((3, 20, 1), (30, 40, 8))
    array = random_tensor((8, 40, 30), width).T
    assert tensor_sum(array, box, shape) == by_definition(array, box, shape)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_change_of_elements_changes_the_sum_by_its_gain(width):
    old = random_tensor((70000,), width)
    positions = np.unique(np.random.default_rng(1).integers(0, old.size, 900))
    new = old.copy()
    new[positions] = random_tensor(positions.shape, width, seed=2)
    gain = sum_change(positions, old[positions], new[positions])
    assert add(run_sum(old, 0), gain) == run_sum(new, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(boxes(), min_size=1, max_size=3), st.sampled_from(WIDTHS), st.sampled_from(["pack", "scatter", "hash"]))
def test_a_bucket_is_copied_and_proved(cases, width, direction):
    if any(max(math.prod(held), math.prod(shape)) > 1 << 18 for shape, _, held, _ in cases):
        return
    parts, wholes = [], []
    for i, (shape, box, held, inside) in enumerate(cases):
        whole, packed = random_tensor(held, width, seed=i), random_tensor(box.shape, width, seed=10 + i)
        view = whole[(*inside.slices(), ...)]
        pair = {"pack": (view, packed), "scatter": (packed, view), "hash": (packed, None)}[direction]
        parts.append(Part(*pair, box, shape))
        wholes.append((whole, view, whole.copy()))
    sent = b"".join(np.ascontiguousarray(part.source).tobytes() for part in parts)
    sums = tuple(by_definition(part.source, part.box, part.shape) for part in parts)
    proof = copy_proof(parts)
    assert (proof.hash, proof.sums) == (xxhash.xxh3_64_intdigest(sent), sums)
    for part, (whole, view, before) in zip(parts, wholes):
        assert part.target is None or np.array_equal(part.target, part.source)
        assert np.count_nonzero(whole != before) <= (view.size if direction == "scatter" else 0)


def test_the_sum_is_computed_where_no_cache_can_be_written():
    code = "import numpy as np; from cosmos_rl_transfer.content.digest import odd; print(odd(0))"
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "IPythonCacheLocator"}  # which finds no place
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(odd(0))], done.stderr


def test_bucket_hash_is_xxh3():
    assert bucket_hash(np.frombuffer(b"cosmos", np.uint8)) == bucket_hash(np.frombuffer(b"cosmos", np.uint8).copy())
    assert bucket_hash(np.zeros(0, np.uint8)) == 0x2D06800538D394C2  # xxh3-64 of nothing, from its specification
