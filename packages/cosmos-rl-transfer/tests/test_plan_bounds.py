"""Balance: the bound is exact, and plans reach it."""

from collections import Counter
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_oracle import random_case

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.layout import spread
from cosmos_rl_transfer.layout.manifest import Box, Manifest, TensorLayout
from cosmos_rl_transfer.planning.plan import plan
from cosmos_rl_transfer.planning.sharing import balance
from cosmos_rl_transfer.planning.topology import Port, Topology

linprog = pytest.importorskip("scipy.optimize", reason="linear programs to compare with").linprog

LIMIT = 1.01
RANKS = range(6)


@st.composite
def problems(draw):
    """Bytes by owner sets that overlap anyhow, and speeds."""
    sets = st.sets(st.sampled_from(RANKS), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    demand = draw(st.dictionaries(sets, st.integers(0, 10**6), min_size=1, max_size=8))
    return demand, {rank: draw(st.integers(1, 5)) for rank in RANKS}


def by_linear_program(demand, speed):
    """min t  with  sum_i x_si = D_s,  sum_s x_si <= t beta_i,  x >= 0."""
    pairs = [(s, rank) for s in demand for rank in s]
    equal = np.array([[float(s == owners) for s, _ in pairs] + [0.0] for owners in demand])
    upper = np.array([[float(rank == r) for _, r in pairs] + [-float(speed[rank])] for rank in speed])
    found = linprog(
        [0.0] * len(pairs) + [1.0],
        A_ub=upper,
        b_ub=np.zeros(len(speed)),
        A_eq=equal,
        b_eq=np.array(list(demand.values()), float),
    )
    assert found.success
    return found.fun


def by_subsets(demand, speed):
    subsets = chain.from_iterable(combinations(speed, n) for n in range(1, len(speed) + 1))
    return max(
        sum(size for owners, size in demand.items() if set(owners) <= set(subset)) / sum(speed[r] for r in subset)
        for subset in subsets
    )


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_bound_is_the_optimum_of_the_linear_program_and_the_densest_subset(problem):
    bound = float(balance(*problem).busiest)
    assert bound == pytest.approx(by_linear_program(*problem), abs=1e-3)
    assert bound == pytest.approx(by_subsets(*problem))


@given(problems())
def test_shares_reach_the_bound(problem):
    demand, speed = problem
    found = balance(demand, speed)
    load = dict.fromkeys(speed, 0)
    for owners, shares in found.shares.items():
        assert demand[owners] - len(owners) <= sum(shares.values()) <= demand[owners]  # rounded down
        for rank, size in shares.items():
            load[rank] += size
    assert all(load[rank] <= found.busiest * speed[rank] for rank in speed)


@pytest.mark.parametrize("seed", range(25))
def test_a_plans_bound_is_the_optimum_of_its_linear_program(seed):
    case = random_case(seed)
    made = plan(case.source, case.target, bucket_bytes=1 << 20, relay="off")
    demand = {}
    for part in made.replicas:
        for lot in part.lots:
            demand[lot.owners] = demand.get(lot.owners, 0) + lot.num_bytes * sum(lot.counts)
    optimum = by_linear_program(demand, dict.fromkeys(case.source.ranks, 1))
    assert made.egress_bound == pytest.approx(np.ceil(optimum - 1e-6), abs=1)
    assert max(made.bytes_out.values()) >= made.egress_bound


def llama(num_layers=32, hidden=4096, inner=14336, kv=1024, vocab=128256):
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(num_layers):
        p = f"model.layers.{i}."
        shapes |= {f"{p}self_attn.{n}_proj.weight": (hidden, hidden) for n in "qo"}
        shapes |= {f"{p}self_attn.{n}_proj.weight": (kv, hidden) for n in "kv"}
        shapes |= {f"{p}mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes |= {f"{p}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{p}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return [WeightSpec(name=name, shape=shape, dtype="bfloat16") for name, shape in shapes.items()]


LLAMA = llama()
CASES = {
    "fsdp8 -> tp4 x 4": (spread.mesh(LLAMA, dp_shard=8), spread.mesh(LLAMA, tp=4), 4),
    "hsdp4x8 -> tp4 x 4": (spread.mesh(LLAMA, dp_replicate=4, dp_shard=8), spread.mesh(LLAMA, tp=4), 4),
    "hsdp4x8 -> tp4": (spread.mesh(LLAMA, dp_replicate=4, dp_shard=8), spread.mesh(LLAMA, tp=4), 1),
    "hsdp2x16 -> tp8 x 3": (spread.mesh(LLAMA, dp_replicate=2, dp_shard=16), spread.mesh(LLAMA, tp=8), 3),
    "ddp8 -> tp1": (spread.mesh(LLAMA, dp_replicate=8), spread.mesh(LLAMA, tp=1), 1),
    "ddp7 -> tp2 x 3": (spread.mesh(LLAMA, dp_replicate=7), spread.mesh(LLAMA, tp=2), 3),
    "pp4 ddp3 tp2 -> tp4 x 2": (spread.mesh(LLAMA, pp=4, dp_replicate=3, tp=2), spread.mesh(LLAMA, tp=4), 2),
    "hsdp3x5 -> pp2 tp2": (spread.mesh(LLAMA, dp_replicate=3, dp_shard=5), spread.mesh(LLAMA, pp=2, tp=2), 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("relay", ["off", "on"])
def test_the_busiest_nic_is_within_a_percent_of_the_bound(name, relay):
    source, target, count = CASES[name]
    made = plan(source, spread.replicas(target, count), bucket_bytes=8 << 20, relay=relay)
    assert made.ratio <= LIMIT
    assert made.total_bytes == made.lower_bound


def bytes_of_layers(made, first, last):
    """Bytes each source rank sends of layers [first, last)."""
    prefixes = tuple(f"model.layers.{i}." for i in range(first, last))
    sent = Counter()
    for (source, _), buckets in made.streams.items():
        sent[source] += sum(p.box.numel * 2 for b in buckets for p in b.pieces if p.name.startswith(prefixes))
    return [size for size in sent.values() if size]


@pytest.mark.parametrize(
    ("name", "limit"),
    [("hsdp4x8 -> tp4", 1.01), ("pp4 ddp3 tp2 -> tp4 x 2", 1.01), ("ddp8 -> tp1", 1.05), ("hsdp3x5 -> pp2 tp2", 1.15)],
)
def test_every_quarter_of_the_layers_is_balanced_among_those_that_hold_it(name, limit):
    source, target, count = CASES[name]
    made = plan(source, spread.replicas(target, count), bucket_bytes=8 << 20, relay="off")
    for first in range(0, 32, 8):
        sent = bytes_of_layers(made, first, first + 8)
        assert max(sent) <= limit * sum(sent) / len(sent)


def test_the_rows_of_a_tensor_too_big_for_one_owner_are_shared():
    specs = [WeightSpec(name="embed", shape=(1000, 1024), dtype="bfloat16")]
    made = plan(spread.mesh(specs, dp_replicate=4), Manifest.whole(specs), bucket_bytes=1 << 20)
    assert made.ratio <= LIMIT
    assert len(made.pairs) == 4


def test_units_are_not_split_where_balance_is_good_anyway():
    specs = [WeightSpec(name=f"w{i}", shape=(512, 512), dtype="bfloat16") for i in range(40)]
    made = plan(spread.mesh(specs, dp_replicate=4), Manifest.whole(specs), bucket_bytes=1 << 30)
    assert {p.box.shape for stream in made.streams.values() for b in stream for p in b.pieces} == {(512, 512)}


def test_tiny_tensors_are_never_split():
    specs = [WeightSpec(name="norm", shape=(4096,), dtype="bfloat16")]
    made = plan(spread.mesh(specs, dp_replicate=4), Manifest.whole(specs), bucket_bytes=1 << 20)
    assert [len(b.pieces) for stream in made.streams.values() for b in stream] == [1]


def test_a_faster_nic_sends_more():
    specs = [WeightSpec(name=f"w{i}", shape=(64, 64), dtype="bfloat16") for i in range(300)]
    slow, fast = Port(egress=10), Port(egress=20)
    made = plan(
        spread.mesh(specs, dp_replicate=2),
        Manifest.whole(specs),
        Topology(sources={0: slow, 1: fast}),
        bucket_bytes=1 << 20,
    )
    assert made.bytes_out[1] == 2 * made.bytes_out[0]
    assert made.ratio == pytest.approx(1.0)


def test_owners_on_the_targets_host_are_preferred_at_no_cost_to_balance():
    specs = [WeightSpec(name=f"w{i}", shape=(64, 64), dtype="bfloat16") for i in range(40)]
    source, fleet = spread.mesh(specs, dp_replicate=2), spread.replicas(Manifest.whole(specs), 1)
    target = Manifest(tuple(TensorLayout(s, {0: Box((0, 0), (32, 64)), 1: Box((32, 0), (32, 64))}) for s in specs))
    made = plan(source, target, Topology.from_hosts(["a", "b"], ["b", "a"]), bucket_bytes=1 << 20)
    assert made.pairs == ((0, 1), (1, 0))
    assert made.ratio == 1.0
    assert plan(source, fleet, bucket_bytes=1 << 20).ratio == 1.0


def test_distance_counts_host_then_island_then_rail():
    here = Port(host="a", island="x", rail="0")
    others = [here, Port(host="b", island="x"), Port(host="b", rail="0"), Port(), Port(host="b", island="y", rail="1")]
    topology = Topology(sources={0: here}, targets=dict(enumerate(others)))
    assert [topology.distance(0, i) for i in range(5)] == [0, 1, 2, 3, 3]
