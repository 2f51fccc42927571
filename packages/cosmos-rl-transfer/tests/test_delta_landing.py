"""What a publisher's copy says has changed, landed without a connection between the two."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_samples import sync

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer import Manifest, Shard, TransferError
from cosmos_rl_transfer.content.delta import Extent, decode
from cosmos_rl_transfer.content.digest import tensor_sum
from cosmos_rl_transfer.planning.plan import plan
from cosmos_rl_transfer.publish.memory import LiveWeights
from cosmos_rl_transfer.publish.outgoing import Outgoing
from cosmos_rl_transfer.pull.landing import InPlace, Shadow


class Wire:
    """A publisher's copy and a landing of one rank each, joined by a loop."""

    def __init__(self, source, target, weights, live, *, kind, bucket_bytes=512):
        made = plan(source, target, bucket_bytes=bucket_bytes)
        self.buckets = made.stream(0, 0)
        self.outgoing = Outgoing(LiveWeights(source, rank=0), settings=sync(full_every=1000))
        self.outgoing.want(made.wire_dtypes)
        self.outgoing.adapt()
        self.landing = kind(target, live, rank=0, wire_dtypes=made.wire_dtypes)
        self.weights, self.pool = weights, ThreadPoolExecutor(1)
        self.held = self.num_deltas = -1

    def send(self, version):
        self.outgoing.begin(version)
        self.outgoing.refresh(self.weights)
        self.landing.begin(self.held)
        self.num_deltas = 0
        for bucket in self.buckets:
            delta = self.outgoing.delta(bucket, base=self.held, version=version)
            if delta is None:
                out = np.zeros(bucket.num_bytes, np.uint8)
                self.outgoing.pack(bucket, out)
                assert self.landing.write(bucket, out, self.sums(bucket))
            else:
                self.num_deltas += 1
                assert delta.sums == self.sums(bucket)
                assert self.landing.write_delta(bucket, self.decoded(bucket, delta), delta.sums)
        self.held = version

    def decoded(self, bucket, delta):
        places = self.outgoing.arena.places
        return decode(delta.data, [Extent(p.box.numel, places[p.name].item_bytes) for p in bucket.pieces])

    def sums(self, bucket):
        arena = self.outgoing.arena
        return tuple(tensor_sum(arena.piece(p), p.box, arena.places[p.name].shape) for p in bucket.pieces)

    def apply(self):
        self.landing.apply(pool=self.pool)


def cut(specs, dim):
    """Rank 0 of two, or everything."""
    if dim is None:
        return Manifest.whole(specs)
    return Manifest.sharded(specs, mesh_shape=(2,), placements={s.name: [Shard(dim)] for s in specs})


def part(manifest, whole):
    return {spec.name: whole[spec.name][box.slices()] for spec, box in manifest.held_by(0)}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1, max_size=3),
    st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([Shadow, InPlace]),
    st.booleans(),
    st.lists(st.sampled_from([0.0, 0.02, 0.2, 0.6, 1.0]), min_size=2, max_size=5),
    st.integers(0, 99),
)
def test_any_changes_of_any_boxes_land_exactly(shapes, dtype, dim, kind, turned, densities, seed):
    kind_of = getattr(torch, dtype)
    draw = torch.Generator().manual_seed(seed)
    specs = [WeightSpec(name=f"t{i}", shape=shape, dtype=dtype) for i, shape in enumerate(shapes)]
    whole = {s.name: torch.randint(0, 99, s.shape, generator=draw).to(kind_of) for s in specs}
    target = cut(specs, dim)
    live = {n: torch.zeros(t.shape[::-1] if turned else t.shape, dtype=kind_of) for n, t in part(target, whole).items()}
    live = {name: tensor.T if turned else tensor for name, tensor in live.items()}
    wire = Wire(Manifest.whole(specs), target, whole, live, kind=kind)
    for version, density in enumerate(densities):
        for tensor in whole.values():
            chosen = torch.rand(tensor.shape, generator=draw) < density
            tensor[chosen] = torch.randint(0, 99, tensor.shape, generator=draw).to(kind_of)[chosen]
        wire.send(version)
        wire.apply()
        for name, wanted in part(target, whole).items():
            assert torch.equal(live[name], wanted)
        if density == 0.0 and version:
            assert wire.num_deltas >= sum(bucket.num_bytes > 64 for bucket in wire.buckets)


@pytest.fixture
def wire():
    """One matrix that was sent once and of which a few elements have changed since."""
    draw = torch.Generator().manual_seed(0)
    whole = {"w": torch.randn(64, 64, generator=draw)}
    manifest = Manifest.whole([WeightSpec(name="w", shape=(64, 64), dtype="float32")])
    wire = Wire(manifest, manifest, whole, {"w": torch.zeros(64, 64)}, kind=Shadow, bucket_bytes=4096)
    wire.send(0)
    whole["w"][::9, ::9] += 1
    wire.outgoing.begin(1)
    wire.outgoing.refresh(whole)
    wire.landing.begin(0)
    return wire


def test_a_delta_on_other_elements_than_the_publisher_had_is_refused_and_nothing_is_written(wire):
    bucket = wire.buckets[0]
    wire.landing.memory[0] ^= 1  # an element that the delta changes
    before = wire.landing.memory.copy()
    delta = wire.outgoing.delta(bucket, base=0, version=1)
    assert not wire.landing.write_delta(bucket, wire.decoded(bucket, delta), delta.sums)
    assert np.array_equal(wire.landing.memory, before)


def test_a_delta_may_be_landed_once_only(wire):
    bucket = wire.buckets[0]
    delta = wire.outgoing.delta(bucket, base=0, version=1)
    changes = wire.decoded(bucket, delta)
    assert wire.landing.write_delta(bucket, changes, delta.sums)
    assert wire.landing.write_delta(bucket, changes, delta.sums)  # absolute values: the same again is no change


def test_there_is_no_delta_from_another_version_than_the_one_before(wire):
    bucket = wire.buckets[0]
    assert wire.outgoing.delta(bucket, base=0, version=1) is not None
    assert wire.outgoing.delta(bucket, base=-1, version=1) is None
    assert wire.outgoing.delta(bucket, base=1, version=1) is None
    assert wire.outgoing.delta(bucket, base=0, version=2) is None


def test_what_changes_everywhere_is_copied_less_and_less_often_until_it_changes_less():
    whole = {"w": torch.zeros(4096)}
    manifest = Manifest.from_tensors(whole)
    wire = Wire(manifest, manifest, whole, {"w": torch.zeros(4096)}, kind=Shadow)
    copied = []
    for version in range(200):
        whole["w"] += version < 150
        if wire.outgoing.wants_bypass:
            wire.outgoing.start_bypass(version)
        else:
            wire.outgoing.begin(version)
            wire.outgoing.refresh(whole)
            copied.append(version)
    pauses = [after - before - 1 for before, after in pairwise(copied)]
    dense = [pause for pause in pauses if pause]
    assert dense == [1, 2, 4, 8, 16, 32, 32, 32, 32]
    assert pauses[-10:] == [0] * 10


class Unreadable:
    """Weights whose second tensor cannot be read."""

    def __init__(self, first):
        self.first = first

    def __getitem__(self, name):
        if name == "a":
            return self.first
        raise RuntimeError("no such memory")


def test_a_version_that_cannot_be_copied_is_an_error_for_readers_and_the_next_one_is_sent_whole():
    whole = {"a": torch.ones(8), "b": torch.ones(8)}
    manifest = Manifest.from_tensors(whole)
    wire = Wire(manifest, manifest, whole, {n: torch.zeros(8) for n in whole}, kind=Shadow)
    wire.send(0)
    wire.outgoing.begin(1)
    with pytest.raises(RuntimeError, match="no such memory"):
        wire.outgoing.refresh(Unreadable(whole["a"]))
    with pytest.raises(TransferError, match="version 1 could not be copied"):
        wire.outgoing.delta(wire.buckets[0], base=0, version=1)
    wire.held = 1
    wire.send(2)
    assert wire.num_deltas == 0
