import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.content.arena import Arena
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.manifest import Box, Manifest, Replicate, Shard, TensorLayout, whole_box
from cosmos_rl_transfer.planning.plan import plan


def spec(name="w", shape=(8, 6), dtype="float32"):
    return WeightSpec(name=name, shape=shape, dtype=dtype)


@st.composite
def manifests(draw):
    """A few small tensors, cut and replicated over two unrelated meshes."""
    specs = [
        spec(
            f"t{i}",
            tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))),
            draw(st.sampled_from(DTYPES)),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    return [draw(sharded(specs)) for _ in range(2)]


DTYPES = ["float32", "bfloat16", "uint8", "int64"]


@st.composite
def sharded(draw, specs):
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    placements = {
        s.name: [
            Shard(draw(st.integers(0, len(s.shape) - 1))) if s.shape and draw(st.booleans()) else Replicate()
            for _ in mesh_shape
        ]
        for s in specs
    }
    return Manifest.sharded(specs, mesh_shape=mesh_shape, placements=placements)


def arenas(manifest, made):
    return {r: Arena(manifest, rank=r, wire_dtypes=made.wire_dtypes) for r in manifest.ranks}


def execute(made, source, target):
    for (sender, receiver), buckets in made.streams.items():
        for bucket in buckets:
            out = np.full(bucket.num_bytes, 0xEE, np.uint8)
            source[sender].pack(bucket, out)
            run = target[receiver].run(bucket)
            if run is None:
                target[receiver].scatter(out, bucket)
            else:
                run[:] = out


def fill(manifest, held, whole):
    for s in manifest.specs.values():
        for rank, box in next(t for t in manifest.layouts if t.spec == s).boxes.items():
            held[rank].tensor(s.name)[...] = whole[s.name][box.slices()]


def whole_tensors(manifest, seed=0):
    rng = np.random.default_rng(seed)
    widths = {"float32": np.uint32, "bfloat16": np.uint16, "uint8": np.uint8, "int64": np.uint64}
    return {s.name: rng.integers(1, 250, s.shape).astype(widths[s.dtype]) for s in manifest.specs.values()}


@settings(max_examples=300, deadline=None)
@given(manifests(), st.integers(8, 400))
def test_executing_a_plan_gives_what_cutting_the_whole_tensors_gives(pair, bucket_bytes):
    source, target = pair
    made = plan(source, target, bucket_bytes=bucket_bytes)
    whole = whole_tensors(source)
    sending, receiving = arenas(source, made), arenas(target, made)
    fill(source, sending, whole)
    execute(made, sending, receiving)
    for layout in target.layouts:
        for rank, box in layout.boxes.items():
            landed = receiving[rank].tensor(layout.spec.name)
            np.testing.assert_array_equal(landed, whole[layout.spec.name][box.slices()])


@settings(max_examples=100, deadline=None)
@given(manifests(), st.integers(8, 400))
def test_every_needed_byte_travels_once(pair, bucket_bytes):
    source, target = pair
    made = plan(source, target, bucket_bytes=bucket_bytes)
    item = {"float32": 4, "bfloat16": 2, "uint8": 1, "int64": 8}
    travelled = sum(
        piece.box.numel * item[made.wire_dtypes[piece.name]]
        for stream in made.streams.values()
        for bucket in stream
        for piece in bucket.pieces
    )
    held = sum(box.numel * item[t.spec.dtype] for t in target.layouts for box in t.boxes.values())
    assert travelled == made.total_bytes == made.lower_bound == held
    assert sum(made.bytes_out.values()) == held or made.relay
    assert max(made.bytes_out.values()) >= made.egress_bound


@settings(max_examples=50, deadline=None)
@given(manifests(), st.integers(8, 400))
def test_no_bucket_is_larger_than_asked(pair, bucket_bytes):
    made = plan(*pair, bucket_bytes=bucket_bytes)
    assert all(b.num_bytes <= bucket_bytes for stream in made.streams.values() for b in stream)


def test_replicated_sources_share_the_load_evenly():
    specs = [spec(f"layer{i}", (64, 64)) for i in range(80)]
    source = Manifest.sharded(specs, mesh_shape=(8,), placements={})
    made = plan(source, Manifest.whole(specs), bucket_bytes=1 << 20)
    assert set(made.bytes_out.values()) == {10 * 64 * 64 * 4}
    assert made.ratio == 1.0


def test_hybrid_sharding_to_tensor_parallel_is_balanced_within_a_percent():
    specs = [spec(f"layer{i}", (128, 96)) for i in range(50)]
    cut = {s.name: [Replicate(), Shard(0)] for s in specs}
    source = Manifest.sharded(specs, mesh_shape=(4, 8), placements=cut)
    target = Manifest.sharded(specs, mesh_shape=(4,), placements={s.name: [Shard(1)] for s in specs})
    assert plan(source, target, bucket_bytes=1 << 20).ratio <= 1.01


def test_the_plan_is_a_function_of_its_inputs_and_notices_a_difference():
    specs = [spec(shape=(12, 8))]
    source = Manifest.sharded(specs, mesh_shape=(3,), placements={"w": [Shard(0)]})
    target = Manifest.sharded(specs, mesh_shape=(2,), placements={"w": [Shard(1)]})
    made = plan(source, target, bucket_bytes=64)
    again = plan(Manifest.decode(source.encode()), target, bucket_bytes=64)
    assert again.digest == made.digest
    assert dict(again.streams) == dict(made.streams)
    assert made.digest != plan(source, target, bucket_bytes=32).digest
    assert made.digest != plan(source, target, bucket_bytes=64, wire_dtype="bfloat16").digest


def test_wire_dtype_replaces_floating_dtypes_only():
    specs = [spec("w"), spec("count", (3,), "int64")]
    made = plan(Manifest.whole(specs), Manifest.whole(specs), bucket_bytes=1024, wire_dtype="bfloat16")
    assert made.wire_dtypes == {"w": "bfloat16", "count": "int64"}
    assert made.total_bytes == 48 * 2 + 3 * 8


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "float32"])
def test_the_wire_dtype_widens_nothing_and_leaves_what_it_does_not_narrow(wire):
    dtypes = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")
    manifest = Manifest.whole([spec(dtype, (8,), dtype) for dtype in dtypes])
    made = plan(manifest, manifest, bucket_bytes=1024, wire_dtype=wire)
    assert made.wire_dtypes == {dtype: dtype for dtype in dtypes}
    assert made.total_bytes == plan(manifest, manifest, bucket_bytes=1024).total_bytes


def test_an_unknown_dtype_is_refused_at_the_source_and_on_the_way():
    for dtype, wire in (("complex64", "bfloat16"), ("float32", "float7")):
        manifest = Manifest.whole([spec("w", (8,), dtype)])
        with pytest.raises(LayoutError, match=r"w: dtype .* cannot be transferred; known: float64"):
            plan(manifest, manifest, bucket_bytes=1024, wire_dtype=wire)


def test_whole_tensors_travel_as_one_run_of_the_arena():
    specs = [spec("a", (5, 7)), spec("b", (3,)), spec("c", (64, 64))]
    manifest = Manifest.whole(specs)
    made = plan(manifest, manifest, bucket_bytes=4096)
    arena = Arena(manifest, rank=0, wire_dtypes=made.wire_dtypes)
    assert all(arena.run(bucket) is not None for bucket in made.streams[0, 0])


def test_a_bucket_never_takes_the_rest_of_a_tensor_for_padding():
    short, wide = spec("a", (25,)), spec("b", (4,))
    source = Manifest(
        (
            TensorLayout(short, {0: Box((0,), (24,)), 1: Box((24,), (1,))}),
            TensorLayout(wide, {0: Box((0,), (4,))}),
        )
    )
    made = plan(source, Manifest.whole([short, wide]), bucket_bytes=1024)
    arena = Arena(Manifest.whole([short, wide]), rank=0, wire_dtypes=made.wire_dtypes)
    assert arena.run(made.streams[0, 0][0]) is None


def test_a_bucket_never_takes_the_start_of_the_next_tensor_for_padding():
    first, second = spec("a", (25,)), spec("b", (20,))
    source = Manifest(
        (
            TensorLayout(first, {0: Box((24,), (1,)), 1: Box((0,), (24,))}),
            TensorLayout(second, {0: Box((8,), (12,)), 1: Box((0,), (8,))}),
        )
    )
    made = plan(source, Manifest.whole([first, second]), bucket_bytes=1024)
    arena = Arena(Manifest.whole([first, second]), rank=0, wire_dtypes=made.wire_dtypes)
    assert arena.run(made.streams[0, 0][0]) is None  # both pieces are as far apart here as in the bucket


def test_missing_names_are_listed():
    specs = [spec(f"w{i}") for i in range(8)]
    with pytest.raises(LayoutError, match=r"source lacks w1, w2, w3, w4, w5 and 2 more"):
        plan(Manifest.whole(specs[:1]), Manifest.whole(specs), bucket_bytes=64)


def test_unexpected_names_are_listed():
    specs = [spec("w0"), spec("w1")]
    with pytest.raises(LayoutError, match="target lacks w1"):
        plan(Manifest.whole(specs), Manifest.whole(specs[:1]), bucket_bytes=64)


def test_a_shape_mismatch_names_tensor_shapes_and_ranks():
    with pytest.raises(LayoutError, match=r"w: shape \(8, 6\) .* \(6, 8\) .*ranks \[0\].*ranks \[2\]"):
        plan(Manifest.whole([spec()]), Manifest.whole([spec(shape=(6, 8))], rank=2), bucket_bytes=64)


def test_an_integer_is_never_cast_to_a_float():
    with pytest.raises(LayoutError, match="w: dtype int64 at the source, float32 at the target"):
        plan(Manifest.whole([spec(dtype="int64")]), Manifest.whole([spec()]), bucket_bytes=64)


def test_a_box_nobody_holds_is_an_error():
    source = Manifest((TensorLayout(spec(), {0: Box((0, 0), (4, 6)), 1: Box((5, 0), (3, 6))}),))
    with pytest.raises(LayoutError, match=r"w: no source rank of \[0, 1\] holds offset \(4, 0\) shape \(1, 6\)"):
        plan(source, Manifest.whole([spec()]), bucket_bytes=64)


def test_a_plan_has_bytes_bounds_and_the_reason_why_nothing_is_relayed():
    made = plan(Manifest.whole([spec()]), Manifest.whole([spec()]), bucket_bytes=64)
    assert made.total_bytes == made.lower_bound == made.egress_bound == 192
    assert made.relay_reason == "no two target ranks want the same boxes"


def test_streams_are_made_when_asked_for_and_only_once():
    made = plan(Manifest.whole([spec()]), Manifest.whole([spec()], rank=1), bucket_bytes=64)
    assert not made.replicas[0].streams
    assert made.stream(0, 1) is made.streams[0, 1]
    assert made.stream(0, 7) == () and (0, 7) not in made.streams


def test_a_tensor_the_target_unties_is_fed_twice_from_one():
    source = Manifest((TensorLayout(spec("embed"), {0: whole_box((8, 6))}),), {"head": "embed"})
    made = plan(source, Manifest.whole([spec("embed"), spec("head")]), bucket_bytes=1024)
    assert [p.name for b in made.stream(0, 0) for p in b.pieces] == ["embed", "head"]
    assert made.total_bytes == 2 * 192
    assert made.wire_dtypes == {"embed": "float32", "head": "float32"}


def test_a_tensor_both_sides_tie_travels_once():
    tied = Manifest((TensorLayout(spec("embed"), {0: whole_box((8, 6))}),), {"head": "embed"})
    assert plan(tied, tied, bucket_bytes=1024).total_bytes == 192


def test_an_alias_the_target_does_not_know_is_no_error():
    source = Manifest((TensorLayout(spec("embed"), {0: whole_box((8, 6))}),), {"head": "embed"})
    assert plan(source, Manifest.whole([spec("embed")]), bucket_bytes=1024).total_bytes == 192


def test_the_target_may_know_a_tensor_by_its_alias_alone():
    source = Manifest((TensorLayout(spec("embed"), {0: whole_box((8, 6))}),), {"head": "embed"})
    made = plan(source, Manifest.whole([spec("head")]), bucket_bytes=1024)
    assert [p.name for b in made.stream(0, 0) for p in b.pieces] == ["head"]


def test_a_tensor_that_only_the_target_ties_may_be_listed_twice_by_the_source():
    target = Manifest((TensorLayout(spec("embed"), {0: whole_box((8, 6))}),), {"head": "embed"})
    assert plan(Manifest.whole([spec("embed"), spec("head")]), target, bucket_bytes=1024).total_bytes == 192


def test_peak_memory_does_not_depend_on_the_model():
    sizes = (
        plan(Manifest.whole(specs), Manifest.whole(specs), bucket_bytes=4096).peak_extra_bytes
        for specs in ([spec()], [spec(shape=(4096, 4096))])
    )
    assert set(sizes) == {2 * 4096}


def test_a_bucket_must_hold_an_element():
    with pytest.raises(LayoutError, match="bucket_bytes = 7 is smaller than one element"):
        plan(Manifest.whole([spec()]), Manifest.whole([spec()]), bucket_bytes=7)


def test_nothing_is_planned_for_a_model_without_tensors():
    made = plan(Manifest(()), Manifest(()), bucket_bytes=64)
    assert made.pairs == () and made.total_bytes == made.egress_bound == 0 and made.ratio == 1.0


def test_a_tensor_without_elements_needs_nobody():
    empty = spec("empty", (0, 4))
    made = plan(Manifest((TensorLayout(empty, {}),)), Manifest.whole([empty]), bucket_bytes=64)
    assert made.pairs == () and made.total_bytes == 0
