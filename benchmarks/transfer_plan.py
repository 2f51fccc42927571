"""The planner of weight transfers: bytes and balance against their lower bounds, and planning time.

    .venv/bin/python benchmarks/transfer_plan.py [--quick]

Bytes: random pairs of layouts, each plan executed in numpy and compared byte for byte with cutting the whole tensors.
Balance: the busiest trainer NIC over the bound that max-flow proves, on Llama-3-8B and on realistic clusters, beside
the rules other systems choose owners by. Time: manifests as received, planned without caches, beside a bare loop in
Python that visits each part of the same manifests once.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import _support  # noqa: F401  (makes transfer_* importable)
from _metrics import Figure, report
from transfer_oracle import bytes_held, random_case, wrong_parts

from cosmos_rl_transfer.layout import spread
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.layout.shapes import read_shapes
from cosmos_rl_transfer.planning.plan import TransferPlan, plan

BUCKET_BYTES = 8 << 20
SMALL_BUCKETS = (64, 200, 1000, 1 << 20)
NUM_PAIRS, NUM_PAIRS_QUICK = 2000, 200
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Trainers and rollouts: the arguments of `spread.mesh`, and the number of replicas."""

    source: dict[str, int]
    target: dict[str, int]
    replicas: int = 1

    def __str__(self) -> str:
        times = f" x {self.replicas}" if self.replicas > 1 else ""
        return f"{_text(self.source)} -> {_text(self.target)}{times}"


def _text(axes: dict[str, int]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in axes.items()) or "one rank"


SECTION_2_3 = (
    Pair(source={"dp_shard": 8}, target={"tp": 4}, replicas=4),
    Pair(source={"dp_replicate": 4, "dp_shard": 8}, target={"tp": 4}, replicas=4),
    Pair(source={"dp_replicate": 4, "dp_shard": 8}, target={"tp": 4}),
    Pair(source={"dp_replicate": 2, "dp_shard": 16}, target={"tp": 8}, replicas=3),
    Pair(source={"dp_replicate": 8}, target={}),
)
"""The five cases that the survey compares systems on."""
LLAMA_PAIRS = (
    *SECTION_2_3,
    Pair(source={"dp_replicate": 7}, target={"tp": 2}, replicas=3),
    Pair(source={"pp": 4, "dp_replicate": 3, "tp": 2}, target={"tp": 4}, replicas=2),
    Pair(source={"dp_replicate": 3, "dp_shard": 5}, target={"pp": 2, "tp": 2}),
    Pair(source={"dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}, target={"tp": 8}, replicas=5),
)
SOURCES_64 = (
    {"dp_shard": 64},
    {"dp_replicate": 2, "dp_shard": 32},
    {"dp_shard": 64, "ep": 8},
    {"pp": 4, "dp_shard": 8, "tp": 2},
    {"dp_replicate": 64},
)
TARGETS_32 = (({"tp": 4}, 8), ({"tp": 8, "ep": 8}, 4), ({"pp": 2, "tp": 4}, 4), ({"tp": 32, "ep": 32}, 1))
MOE_PAIRS = tuple(Pair(source=s, target=t, replicas=n) for s in SOURCES_64 for t, n in TARGETS_32)


class Model:
    """A preset's shapes, spread as pairs say."""

    def __init__(self, name: str) -> None:
        self.name, self.shapes = name, read_shapes(name)

    def source(self, pair: Pair) -> Manifest:
        """Return the trainers' manifest, as received."""
        return _received(spread.mesh(self.shapes.specs, **pair.source))  # type: ignore[arg-type]

    def replica(self, pair: Pair, *, first_rank: int = 0) -> Manifest:
        """Return one replica's manifest."""
        axes = pair.target
        made = spread.mesh(
            self.shapes.specs,
            pp=axes.get("pp", 1),
            tp=axes.get("tp", 1),
            ep=axes.get("ep", 1),
            kv_heads=self.shapes.kv_heads,
            vocab_multiple=64,
            first_rank=first_rank,
        )
        return _received(made)

    def fleet(self, pair: Pair) -> Manifest:
        """Return the manifest of all replicas."""
        return _received(spread.replicas(self.replica(pair), pair.replicas))


def _received(manifest: Manifest) -> Manifest:
    return Manifest.decode(manifest.encode())


def bytes_figures(count: int) -> Iterator[Figure]:
    """Plan, execute and compare `count` generated pairs, without and with relay."""
    worst, wrong = 0.0, 0
    for seed in range(count):
        case = random_case(seed)
        for relay in ("off", "on"):
            made = plan(case.source, case.target, bucket_bytes=SMALL_BUCKETS[seed % 4], relay=relay)
            wrong += len(wrong_parts(made, case.source, case.target, seed))
            worst = max(worst, made.total_bytes / bytes_held(case.target))
    note = (
        f"{count} layout pairs of small models, direct and relayed; every target part compared with the whole tensor's"
    )
    yield Figure(metric="planned bytes / lower bound, worst", value=worst, unit="x", target="<= 1.000", note=note)
    yield Figure(metric="parts that differ from a brute-force reshard", value=wrong, unit="parts", target="<= 0")


def balance_figures(model: Model) -> Iterator[Figure]:
    """Busiest NIC over its bound: ours on all pairs, other rules on the five."""
    for pair in LLAMA_PAIRS:
        made = _direct(model.source(pair), model.fleet(pair))
        name = f"busiest NIC / bound, {model.name}, {pair}"
        yield Figure(metric=name, value=made.ratio, unit="x", target="<= 1.01")
        if pair in SECTION_2_3:
            for rule, choose in RULES.items():
                note = (
                    "other rules: re-implemented, on the same units; first owner: the lowest rank that holds a part; "
                )
                note += "replica modulo: replica i reads from owner i modulo the owners"
                value = _busiest(made, choose) / made.egress_bound
                yield Figure(metric=f"  the same, {rule}", value=value, unit="x", note=note)


def relay_figures(model: Model) -> Iterator[Figure]:
    """Bytes that leave the trainers where replicas relay, over the bytes of one copy of the weights."""
    pair = Pair(source={"dp_shard": 4}, target={"tp": 4}, replicas=8)
    source, fleet = model.source(pair), model.fleet(pair)
    alone = _direct(source, fleet.only(fleet.replicas[0]))
    for relay in ("auto", "off"):
        made = plan(source, fleet, bucket_bytes=BUCKET_BYTES, relay=relay)
        value = sum(made.bytes_out.values()) / alone.total_bytes
        target = "<= 1.000" if relay == "auto" else ""
        name = f"trainer bytes / one copy, {pair}, relay {relay}"
        yield Figure(metric=name, value=value, unit="x", target=target)


def _direct(source: Manifest, target: Manifest) -> TransferPlan:
    return plan(source, target, bucket_bytes=BUCKET_BYTES, relay="off")


RULES: dict[str, Callable[[int, int], int]] = {
    "first owner": lambda replica, owners: 0,
    "replica modulo": lambda replica, owners: replica % owners,
}
"""Which of so many owners serves a replica."""


def _busiest(made: TransferPlan, choose: Callable[[int, int], int]) -> int:
    """Bytes the busiest source sends where `choose` names the owner."""
    sent = Counter[int]()
    for replica, part in enumerate(made.replicas):
        for lot in part.lots:
            sent[lot.owners[choose(replica, len(lot.owners))]] += lot.num_bytes * lot.copies
    return max(sent.values())


def time_figures(model: Model, pairs: Sequence[Pair], *, rounds: int, target: str) -> Iterator[Figure]:
    """Time planning a fleet, hashing the plan and making all streams of one rollout rank, beside visiting its parts."""
    note = (
        f"{model.name}: {len(model.shapes.specs):,} tensors; plan, digest, and all streams of one rollout rank; "
        "CPU seconds of its one thread, median, manifests freshly decoded; visit: a loop over all parts of both"
    )
    worst = 0.0
    for pair in pairs:
        seconds, visits, ratios = zip(*(_planned(model, pair) for _ in range(rounds)))
        worst = max(worst, *ratios)
        took = statistics.median(seconds)
        yield Figure(metric=f"plan {pair}", value=took, unit="s", note=note)
        relative = took / statistics.median(visits)
        yield Figure(metric="  over visiting each part", value=relative, unit="x", target=target, note=note)
    yield Figure(metric="busiest NIC / bound, the worst of these", value=worst, unit="x", target="<= 1.01")


def _planned(model: Model, pair: Pair) -> tuple[float, float, float]:
    """Seconds to plan, seconds to visit all parts, and the plan's balance."""
    visited = _visit(model.source(pair), model.fleet(pair))
    source, fleet = model.source(pair), model.fleet(pair)
    gc.collect()
    started = time.process_time()
    made = _direct(source, fleet)
    assert made.digest
    assert sum(len(made.stream(rank, fleet.ranks[-1])) for rank in source.ranks)
    return time.process_time() - started, visited, made.ratio


def _visit(*manifests: Manifest) -> float:
    """CPU seconds of a loop over every part of the manifests."""
    gc.collect()
    started = time.process_time()
    assert sum(box.numel for one in manifests for rank in one.ranks for _, box in one.held_by(rank))
    return time.process_time() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 generated pairs instead of 2,000, fewer layouts")
    quick = parser.parse_args(arguments).quick
    metrics = list(bytes_figures(NUM_PAIRS_QUICK if quick else NUM_PAIRS))
    llama = Model("llama-8b")
    metrics += [*balance_figures(llama), *relay_figures(llama)]
    moe, pairs = Model("qwen3-30b-a3b"), MOE_PAIRS[:4] if quick else MOE_PAIRS
    metrics += time_figures(moe, pairs, rounds=ROUNDS, target="<= 2.5")
    if not quick:
        large = Pair(source={"pp": 4, "dp_shard": 64, "ep": 8}, target={"tp": 16, "ep": 16}, replicas=8)
        metrics += time_figures(Model("kimi-k2"), [large], rounds=ROUNDS, target="<= 2.5")
    if not report("transfer_plan", metrics):
        sys.exit(1)


if __name__ == "__main__":
    main()
