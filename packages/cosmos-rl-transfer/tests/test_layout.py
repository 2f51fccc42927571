import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.manifest import (
    Box,
    Manifest,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
    shard_box,
    whole_box,
)


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


def test_equal_cuts_are_written_once():
    specs = [WeightSpec(name=f"expert{i}", shape=(64, 4), dtype="bfloat16") for i in range(100)]
    one = Manifest.sharded(specs[:1], mesh_shape=(32,), placements={specs[0].name: [Shard(0)]})
    many = Manifest.sharded(specs, mesh_shape=(32,), placements={s.name: [Shard(0)] for s in specs})
    assert len(many.encode()) < len(one.encode()) + 100 * 64
    again = Manifest.decode(many.encode())
    assert again == many
    assert len({id(layout.boxes) for layout in again.layouts}) == 1


def test_equal_manifests_give_equal_bytes_however_they_were_made():
    specs = [WeightSpec(name=n, shape=(4,), dtype="float32") for n in ("a", "b")]
    shared = {0: whole_box((4,))}
    apart = Manifest(tuple(TensorLayout(s, {0: whole_box((4,))}) for s in specs), {"y": "a", "x": "b"})
    together = Manifest(tuple(TensorLayout(s, shared) for s in specs), {"x": "b", "y": "a"})
    assert apart == together and apart.encode() == together.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        Manifest(()).encode()[:-1],
        b"\x94\x90\x91\x92\x93\xa1w\x90\xa1f\x05",
        b"\x94\x90\x91\x92\x93\xa2\xff\xfe\x90\xa1f\x00\x90\x90",
    ],
)
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(LayoutError):
        Manifest.decode(data)


def test_parts_of_ranks_merge_into_one_manifest():
    specs = [WeightSpec(name="w", shape=(6, 4), dtype="float32"), WeightSpec(name="b", shape=(4,), dtype="float32")]
    whole = Manifest.sharded(specs, mesh_shape=(3,), placements={"w": [Shard(0)]})
    assert Manifest.merge(whole.only([rank]) for rank in (0, 1, 2)) == whole


def test_ranks_that_describe_a_tensor_differently_do_not_merge():
    parts = [Manifest.whole([WeightSpec(name="w", shape=(n,), dtype="float32")], rank=n) for n in (1, 2)]
    with pytest.raises(LayoutError, match=r"w: float32 \[1\] on one rank, float32 \[2\] on another"):
        Manifest.merge(parts)


def test_a_rank_without_memory_of_a_tied_tensor_merges_with_those_that_see_the_tie():
    embed, head = (WeightSpec(name=n, shape=(4,), dtype="float32") for n in ("embed", "head"))
    seen = Manifest((TensorLayout(embed, {0: whole_box((4,))}),), {"head": "embed"})
    empty = Manifest((TensorLayout(embed, {}), TensorLayout(head, {})))
    assert Manifest.merge([empty, seen]) == seen


def test_tensors_whose_memory_is_freed_are_tied_by_their_storage():
    """Those of an engine that sleeps: all have the address 0."""
    embed = torch.zeros(4, 2)
    weights = {"embed": embed, "other": torch.zeros(4, 2), "head": embed.view(4, 2)}
    for name in ("embed", "other"):
        weights[name].untyped_storage().resize_(0)
    found = Manifest.from_tensors(weights, rank=0).tied  # pytest would print the tensors, which have no values
    assert found == {"head": "embed"}


def test_a_tensor_tied_on_one_rank_and_free_on_another_is_an_error():
    embed, head = (WeightSpec(name=n, shape=(4,), dtype="float32") for n in ("embed", "head"))
    seen = Manifest((TensorLayout(embed, {0: whole_box((4,))}),), {"head": "embed"})
    with pytest.raises(LayoutError, match=r"head is a tensor of its own on ranks \[1\], tied to embed"):
        Manifest.merge([seen, Manifest.whole([embed, head], rank=1)])


def test_one_memory_under_two_names_is_described_once():
    weight = torch.zeros(3, 4)
    manifest = Manifest.from_tensors({"embed": weight, "head": weight.detach(), "free": torch.zeros(3, 4)})
    assert list(manifest.specs) == ["embed", "free"]
    assert manifest.tied == {"head": "embed"}
    assert manifest.canonical("head") == "embed" and manifest.canonical("free") == "free"


def test_views_of_one_memory_with_other_strides_are_not_tied():
    weight = torch.zeros(4, 4)
    assert Manifest.from_tensors({"a": weight, "b": weight.T, "c": weight[:2]}).tied == {}


def test_a_strided_shard_is_cut_after_the_later_axes():
    boxes = [
        shard_box((8,), mesh_shape=(2, 2), placements=[StridedShard(0, 2), Shard(0)], coordinate=(dp, tp))
        for dp in range(2)
        for tp in range(2)
    ]
    assert [b.offset[0] for b in boxes] == [0, 4, 2, 6]


def test_two_strided_axes_are_cut_last_axis_first():
    placements = [StridedShard(0, 6), StridedShard(0, 3), Shard(0)]
    box = shard_box((24,), mesh_shape=(2, 2, 3), placements=placements, coordinate=(1, 0, 2))
    assert box == Box((18,), (2,))  # tp 2: 16..24; then 16..20; then 18..20


def test_a_strided_shard_that_would_give_a_rank_several_boxes_is_refused():
    with pytest.raises(LayoutError, match="later axes cut dim 0 into 2 parts"):
        shard_box((8,), mesh_shape=(2, 2), placements=[StridedShard(0, 4), Shard(0)], coordinate=(0, 0))


def test_padding_moves_the_cuts_and_belongs_to_no_box():
    boxes = [
        shard_box((100, 3), mesh_shape=(4,), placements=[Shard(0, multiple=64)], coordinate=(i,)) for i in range(4)
    ]
    assert [(b.offset[0], b.shape[0]) for b in boxes] == [(0, 32), (32, 32), (64, 32), (96, 4)]


def test_a_name_listed_twice_is_refused():
    spec = WeightSpec(name="w", shape=(4,), dtype="float32")
    with pytest.raises(LayoutError, match="w is listed 2 times"):
        Manifest.whole([spec, spec])


@pytest.mark.parametrize("tied", [{"b": "c"}, {"a": "a"}])
def test_a_tie_leads_from_a_new_name_to_a_listed_one(tied):
    with pytest.raises(LayoutError, match="is tied to"):
        Manifest((TensorLayout(WeightSpec(name="a", shape=(4,), dtype="float32"), {}),), tied)
