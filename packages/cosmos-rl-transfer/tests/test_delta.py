import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_transfer.content.delta import (
    BLOCK,
    Extent,
    PieceDelta,
    decode,
    encode,
    encoded_bytes,
    inward,
    outward,
    row_strides,
    widen,
)
from cosmos_rl_transfer.content.digest import add, sum_change, tensor_sum
from cosmos_rl_transfer.errors import TransferError
from cosmos_rl_transfer.layout.box import Box
from cosmos_rl_transfer.layout.manifest import whole_box

WIDTHS = [1, 2, 4, 8]


def random_values(rng, count, width):
    return np.frombuffer(rng.bytes(count * width), f"u{width}").copy()


def random_change(rng, extent, density):
    positions = widen(np.flatnonzero(rng.random(extent.numel) < density), extent)
    return PieceDelta(positions, random_values(rng, len(positions), extent.item_bytes))


def equal(left, right):
    return np.array_equal(left.positions, right.positions) and np.array_equal(left.values, right.values)


extents = st.builds(
    Extent, st.sampled_from([1, 2, 7, 300, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]), st.sampled_from(WIDTHS)
)
densities = st.sampled_from([0.0, 0.001, 0.01, 0.3, 0.6, 1.0])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(extents, densities), max_size=5), st.integers(0, 99))
def test_what_was_encoded_is_decoded(pieces, seed):
    rng = np.random.default_rng(seed)
    changes = [random_change(rng, extent, density) for extent, density in pieces]
    sizes = [extent for extent, _ in pieces]
    data = encode(changes, sizes)
    assert data.nbytes == encoded_bytes([c.positions for c in changes], sizes)
    found = decode(data, sizes)
    assert len(found) == len(changes)
    assert all(map(equal, found, changes))


@settings(max_examples=100, deadline=None)
@given(extents, densities, st.integers(0, 99))
def test_widening_adds_elements_of_dense_blocks_and_never_bytes(extent, density, seed):
    positions = np.flatnonzero(np.random.default_rng(seed).random(extent.numel) < density)
    wide = widen(positions, extent)
    assert np.isin(positions, wide).all()
    assert (np.diff(wide) > 0).all()
    assert encoded_bytes([wide], [extent]) <= encoded_bytes([positions], [extent])
    dense = extent.numel * extent.item_bytes
    assert encoded_bytes([wide], [extent]) <= dense + 4 * (-(-extent.numel // BLOCK)) + 4


def test_one_percent_of_bfloat16_takes_less_than_two_and_a_fifth_percent():
    extent = Extent(4 << 20, 2)
    change = random_change(np.random.default_rng(0), extent, 0.01)
    assert encode([change], [extent]).nbytes <= 0.022 * extent.numel * extent.item_bytes


def test_a_delta_of_little_endian_bytes_is_what_the_format_says():
    changes = [
        PieceDelta(np.array([1, 2]), np.array([7, 8], np.uint8)),
        PieceDelta(np.array([0, 1]), np.array([5, 6], np.uint32)),
    ]
    data = encode(changes, [Extent(300, 1), Extent(2, 4)])
    assert data.tolist() == [2, 0, 0, 0, 2, 0, 0, 0, *[5, 0, 0, 0], *[6, 0, 0, 0], *[1, 0, 2, 0], *[7, 8]]


def spoiled(data, at, value):
    data = data.copy()
    data[at] = value
    return data


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:3], "shorter than its own table"),
        (lambda data: data[:-1], "where its table makes"),
        (lambda data: np.append(data, np.uint8(0)), "where its table makes"),
        (lambda data: spoiled(data, 0, 3), "where its table makes"),
        (lambda data: spoiled(data, 3, 1), "more elements of a block"),
        (lambda data: spoiled(data, 12, 99), "do not ascend"),
        (lambda data: spoiled(data, 14, 100), "do not ascend"),
        (lambda data: spoiled(data, 15, 1), "do not ascend"),
    ],
)
def test_bytes_that_are_no_delta_are_refused(spoil, message):
    extent = Extent(100, 2)
    data = encode([PieceDelta(np.array([4, 99]), np.array([1, 2], np.uint16))], [extent])
    with pytest.raises(TransferError, match=message):
        decode(spoil(data), [extent])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.lists(extents, max_size=3))
def test_any_bytes_decode_to_positions_inside_the_pieces_or_are_refused(data, sizes):
    try:
        changes = decode(np.frombuffer(data, np.uint8), sizes)
    except TransferError:
        return
    for change, extent in zip(changes, sizes, strict=True):
        assert len(change.positions) == len(change.values)
        assert ((change.positions >= 0) & (change.positions < extent.numel)).all()


@st.composite
def boxes_inside(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    low = [draw(st.integers(0, n - 1)) for n in shape]
    size = [draw(st.integers(1, n - a)) for n, a in zip(shape, low)]
    return Box(tuple(low), tuple(size)), shape


@settings(max_examples=300, deadline=None)
@given(boxes_inside(), st.integers(0, 99))
def test_positions_in_a_box_and_in_what_holds_it_name_the_same_elements(drawn, seed):
    box, shape = drawn
    whole = np.arange(math.prod(shape)).reshape(shape)
    part = whole[box.slices()]
    positions = np.flatnonzero(np.random.default_rng(seed).random(part.size) < 0.5)
    strides = row_strides(shape)
    assert outward(positions, box.shape, strides, box.start(shape)).tolist() == part.reshape(-1)[positions].tolist()
    chosen = np.flatnonzero(np.random.default_rng(seed + 1).random(whole.size) < 0.5).astype(np.int32)
    which, inside = inward(chosen, box, shape)
    assert part.reshape(-1)[inside].tolist() == chosen[which].tolist()
    assert len(inside) == np.isin(chosen, part).sum()


@settings(max_examples=200, deadline=None)
@given(boxes_inside(), st.sampled_from(WIDTHS), densities, st.integers(0, 99))
def test_a_hash_follows_its_changes_without_the_rest(drawn, width, density, seed):
    box, shape = drawn
    rng = np.random.default_rng(seed)
    old = random_values(rng, box.numel, width)
    new = old.copy()
    positions = np.flatnonzero(rng.random(box.numel) < density)
    new[positions] = random_values(rng, len(positions), width)
    before = tensor_sum(old.reshape(box.shape), box, shape)
    at = outward(positions, box.shape, row_strides(shape), box.start(shape))
    gain = sum_change(at, old[positions], new[positions])
    assert add(before, gain) == tensor_sum(new.reshape(box.shape), box, shape)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_hash_follows_changes_of_a_tensor_of_many_blocks(width):
    shape, rng = (5, 100_003), np.random.default_rng(0)
    old = random_values(rng, math.prod(shape), width)
    new = old.copy()
    positions = np.flatnonzero(rng.random(old.size) < 0.01)
    new[positions] = random_values(rng, len(positions), width)
    hashes = [tensor_sum(array.reshape(shape), whole_box(shape), shape) for array in (old, new)]
    assert add(hashes[0], sum_change(positions, old[positions], new[positions])) == hashes[1]
