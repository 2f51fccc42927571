import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.layout import Box, Manifest, Replicate, Shard, shard_box, whole_box


@st.composite
def shape_and_box(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    low = [draw(st.integers(0, n - 1)) for n in shape]
    size = [draw(st.integers(1, n - o)) for n, o in zip(shape, low)]
    return shape, Box(tuple(low), tuple(size))


@given(shape_and_box())
def test_a_box_is_contiguous_exactly_when_its_flat_indices_are_one_run(case):
    shape, box = case
    flat = np.arange(math.prod(shape)).reshape(shape)[box.slices()].reshape(-1)
    assert box.start(shape) == flat[0]
    assert box.is_contiguous(shape) == (flat[-1] - flat[0] + 1 == box.numel)


@given(shape_and_box())
def test_run_length_is_the_length_of_the_first_run_up_to_a_gap(case):
    shape, box = case
    flat = np.arange(math.prod(shape)).reshape(shape)[box.slices()].reshape(-1)
    gaps = np.flatnonzero(np.diff(flat) != 1)
    first_gap = int(gaps[0]) + 1 if len(gaps) else len(flat)
    assert first_gap % box.run_length(shape) == 0
    assert not len(gaps) or box.run_length(shape) == first_gap


@given(shape_and_box(), st.data())
def test_intersection_holds_the_common_elements(case, data):
    shape, box = case
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    other = Box(tuple(low), tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, low)))
    marks = np.zeros(shape, int)
    marks[box.slices()] += 1
    marks[other.slices()] += 1
    common = box.intersect(other)
    assert (marks == 2).sum() == (common.numel if common else 0)
    if common:
        assert (marks[common.slices()] == 2).all()
        assert box.contains(common) and other.contains(common)


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("parts", range(1, 9))
def test_shards_follow_torch_chunk(size, parts):
    chunks = [len(c) for c in torch.arange(size).chunk(parts)]
    boxes = [shard_box((size,), mesh_shape=(parts,), placements=[Shard(0)], coordinate=(i,)) for i in range(parts)]
    assert [b.numel for b in boxes] == chunks + [0] * (parts - len(chunks))


def test_two_mesh_axes_may_cut_the_same_dim():
    boxes = [
        shard_box((10,), mesh_shape=(2, 2), placements=[Shard(0), Shard(0)], coordinate=(i, j))
        for i in range(2)
        for j in range(2)
    ]
    assert boxes == [Box((0,), (3,)), Box((3,), (2,)), Box((5,), (3,)), Box((8,), (2,))]


def test_sharded_manifest_replicates_what_has_no_placement_and_leaves_out_empty_parts():
    specs = [
        WeightSpec(name="w", shape=(2, 4), dtype="float32"),
        WeightSpec(name="b", shape=(4,), dtype="float32"),
    ]
    manifest = Manifest.sharded(specs, mesh_shape=(3,), placements={"w": [Shard(0)]}, first_rank=5)
    assert dict(manifest.layouts[0].boxes) == {5: Box((0, 0), (1, 4)), 6: Box((1, 0), (1, 4))}
    assert dict(manifest.layouts[1].boxes) == {rank: whole_box((4,)) for rank in (5, 6, 7)}


def test_manifest_survives_the_wire_with_the_same_digest():
    specs = [
        WeightSpec(name="w", shape=(3, 4), dtype="bfloat16"),
        WeightSpec(name="s", shape=(), dtype="int64"),
    ]
    placements = {"w": [Replicate(), Shard(1)]}
    manifest = Manifest.sharded(specs, mesh_shape=(2, 3), placements=placements)
    again = Manifest.decode(manifest.encode())
    assert again == manifest
    assert again.digest == manifest.digest


def test_from_tensors_describes_plain_tensors_as_whole():
    weights = {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "s": torch.tensor(1)}
    manifest = Manifest.from_tensors(weights, rank=3)
    assert manifest == Manifest.whole(
        [WeightSpec(name="w", shape=(2, 3), dtype="bfloat16"), WeightSpec(name="s", shape=(), dtype="int64")],
        rank=3,
    )
