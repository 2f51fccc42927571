"""Plans checked by brute force: layouts at random, and a reshard that moves bytes as the plan says and nothing else.

    whole tensors --cut--> parts of source ranks --buckets--> parts of target ranks   ==   whole tensors --cut-->

Used by the tests and by benchmarks/transfer_plan.py. Numpy only; elements are unsigned integers of their width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.layout import spread
from cosmos_rl_transfer.layout.box import Box
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Manifest, TensorLayout
from cosmos_rl_transfer.layout.placement import Placement, Replicate, Shard
from cosmos_rl_transfer.planning.bucket import Bucket
from cosmos_rl_transfer.planning.plan import TransferPlan

Array = np.ndarray[Any, Any]
Parts = dict[tuple[int, str], Array]
"""What each rank holds of each tensor: [*box.shape] by (rank, name)."""
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_UNTOUCHED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two layouts of one model."""

    text: str
    source: Manifest
    target: Manifest


def wrong_parts(made: TransferPlan, source: Manifest, target: Manifest, seed: int = 0) -> list[tuple[int, str]]:
    """Return the (target rank, tensor) that a transfer by this plan gets wrong; empty for a right plan.

    Raises AssertionError where bytes are sent twice, overlap in a bucket, or are not the sender's to send.
    """
    whole = whole_tensors(source, seed)
    wanted = {name: whole[source.canonical(name)] for name in target.specs}
    sent = cut(source, whole)
    received = {key: np.full_like(part, _UNTOUCHED) for key, part in cut(target, wanted).items()}
    for bucket in (bucket for stream in made.streams.values() for bucket in stream):
        data = _packed(bucket, source, sent)
        _unpack(bucket, data, target, received)
    expected = cut(target, wanted)
    return [key for key, part in received.items() if not np.array_equal(part, expected[key])]


def whole_tensors(manifest: Manifest, seed: int) -> dict[str, Array]:
    """Return random tensors whose elements are never `_UNTOUCHED`."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(1, 250, spec.shape).astype(_WIDTHS[ITEM_BYTES[spec.dtype]])
        for name, spec in manifest.specs.items()
    }


def cut(manifest: Manifest, whole: Mapping[str, Array]) -> Parts:
    """Give every rank its boxes of whole tensors."""
    return {
        (rank, layout.spec.name): whole[layout.spec.name][box.slices()].copy()
        for layout in manifest.layouts
        for rank, box in layout.boxes.items()
    }


def _packed(bucket: Bucket, source: Manifest, parts: Parts) -> Array:
    """The bytes of a bucket, as its sender packs them."""
    data = np.full(bucket.num_bytes, _UNTOUCHED, np.uint8)
    end = 0
    for piece in bucket.pieces:
        name = source.canonical(piece.name)
        held = source.box(name, bucket.source)
        assert held is not None and held.contains(piece.box), f"rank {bucket.source} does not hold {piece}"
        values = parts[bucket.source, name][(*piece.box.within(held).slices(), ...)]
        assert piece.at >= end, f"{piece} overlaps the piece before it"
        end = piece.at + values.nbytes
        data[piece.at : end] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    assert end == bucket.num_bytes
    return data


def _unpack(bucket: Bucket, data: Array, target: Manifest, parts: Parts) -> None:
    for piece in bucket.pieces:
        held = target.box(piece.name, bucket.target)
        assert held is not None and held.contains(piece.box), f"rank {bucket.target} does not want {piece}"
        place = parts[bucket.target, piece.name][(*piece.box.within(held).slices(), ...)]
        assert (place == _UNTOUCHED).all(), f"{piece} is sent to rank {bucket.target} twice"
        size = place.size * place.itemsize
        place[...] = data[piece.at : piece.at + size].view(place.dtype).reshape(place.shape)


def bytes_held(manifest: Manifest) -> int:
    """Return the bytes of all boxes of all ranks: what must arrive, counted one by one."""
    return sum(
        box.numel * ITEM_BYTES[layout.spec.dtype] for layout in manifest.layouts for box in layout.boxes.values()
    )


def random_case(seed: int) -> Case:
    """Return a small model and two ways to spread it: by meshes, by unrelated cuts, tied or not."""
    draw = Random(seed)
    kv_heads = draw.choice((1, 2, 4))
    specs = _model(draw, kv_heads)
    source_axes, source = _source(draw, specs)
    target_axes, target = _target(draw, specs, kv_heads)
    tie = draw.choice(("", "", "both", "source", "target"))
    source, target = _tied(source, tie in ("both", "source")), _tied(target, tie in ("both", "target"))
    target = spread.replicas(target, draw.choice((1, 1, 2, 3)))
    text = f"{source_axes} -> {target_axes} x {len(target.copies)}" + (f", tied at {tie}" if tie else "")
    return Case(text=text, source=source, target=target)


def _model(draw: Random, kv_heads: int) -> list[WeightSpec]:
    """A transformer of odd sizes: 1 to 3 layers, dense, with experts, or with stacked experts."""
    hidden, inner, head, vocab = draw.randint(5, 24), draw.randint(3, 33), draw.randint(2, 5), draw.randint(20, 90)
    mlp, num_experts = draw.choice(("dense", "experts", "stacked")), draw.choice((4, 8))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(draw.randint(1, 3)):
        layer = f"model.layers.{i}."
        heads = {"q": 2 * kv_heads, "k": kv_heads, "v": kv_heads}
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (h * head, hidden) for n, h in heads.items()}
        shapes |= {f"{layer}self_attn.{n}_proj.bias": (h * head,) for n, h in heads.items()}
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, 2 * kv_heads * head)
        shapes[f"{layer}input_layernorm.weight"] = (hidden,)
        if mlp == "stacked":
            shapes[f"{layer}mlp.experts.gate_up"] = (num_experts, hidden, 2 * inner)
            shapes[f"{layer}mlp.experts.down"] = (num_experts, inner, hidden)
            continue
        for part in [""] if mlp == "dense" else [f"experts.{e}." for e in range(num_experts)]:
            shapes |= {f"{layer}mlp.{part}{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
            shapes[f"{layer}mlp.{part}down_proj.weight"] = (hidden, inner)
    shapes |= {"model.norm.weight": (hidden,), "model.step": (), "lm_head.weight": (vocab, hidden)}
    widths = {"model.embed_tokens.weight": "bfloat16", "lm_head.weight": "bfloat16", "model.step": "int64"}
    return [
        WeightSpec(name=name, shape=shape, dtype=widths.get(name) or draw.choice(("bfloat16", "float32")))
        for name, shape in shapes.items()
    ]


def _source(draw: Random, specs: list[WeightSpec]) -> tuple[str, Manifest]:
    num_layers = len({s.name for s in specs if s.name.endswith("input_layernorm.weight")})
    kind = draw.choice(("mesh", "mesh", "mesh", "cuts", "ragged"))
    if kind == "cuts":
        return kind, _unrelated(draw, specs)
    if kind == "ragged":
        return kind, _ragged(draw, specs)
    axes: dict[str, int] = {
        "pp": draw.choice((1, 1, min(2, num_layers))),
        "dp_replicate": draw.choice((1, 1, 2, 3)),
        "dp_shard": draw.choice((1, 2, 3, 4)),
        "cp": draw.choice((1, 1, 2)),
        "tp": draw.choice((1, 1, 2, 3)),
    }
    around = axes["dp_shard"] * axes["cp"] * axes["tp"]
    axes["ep"] = draw.choice([n for n in (1, 1, 2, 4) if around % n == 0])
    return _text(axes), _mesh(specs, axes)


def _target(draw: Random, specs: list[WeightSpec], kv_heads: int) -> tuple[str, Manifest]:
    num_layers = len({s.name for s in specs if s.name.endswith("input_layernorm.weight")})
    if draw.random() < 0.15:
        return "cuts", _unrelated(draw, specs)
    axes = {"pp": draw.choice((1, 1, min(2, num_layers))), "tp": draw.choice((1, 2, 4, 8))}
    axes["ep"] = draw.choice([n for n in (1, 1, 2, 4) if axes["tp"] % n == 0])
    multiple = draw.choice((1, 8, 64))
    made = _mesh(specs, axes, spread.Rules(kv_heads=kv_heads, vocab_multiple=multiple))
    return f"{_text(axes)}, {kv_heads} KV heads, vocabulary padded to {multiple}", made


def _mesh(specs: list[WeightSpec], axes: Mapping[str, int], rules: spread.Rules | None = None) -> Manifest:
    return spread.mesh(
        specs,
        pp=axes["pp"],
        dp_replicate=axes.get("dp_replicate", 1),
        dp_shard=axes.get("dp_shard", 1),
        cp=axes.get("cp", 1),
        tp=axes["tp"],
        ep=axes["ep"],
        rules=rules,
    )


def _text(axes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "one rank"


def _unrelated(draw: Random, specs: list[WeightSpec]) -> Manifest:
    """Every tensor cut along dims of its own over a mesh of two axes."""

    def placement(spec: WeightSpec) -> Placement:
        return Shard(draw.randrange(len(spec.shape))) if spec.shape and draw.random() < 0.7 else Replicate()

    mesh_shape = (draw.randint(1, 4), draw.randint(1, 3))
    placements = {spec.name: [placement(spec) for _ in mesh_shape] for spec in specs}
    return Manifest.sharded(specs, mesh_shape=mesh_shape, placements=placements)


def _ragged(draw: Random, specs: list[WeightSpec]) -> Manifest:
    """Rows cut at random places over four ranks, each part on one or two of them."""
    made = []
    for spec in specs:
        if not spec.shape:
            made.append(TensorLayout(spec, {draw.randrange(4): Box((), ())}))
            continue
        cuts = [0, *sorted(draw.randint(0, spec.shape[0]) for _ in range(3)), spec.shape[0]]
        whole = Box((0,) * len(spec.shape), spec.shape)
        parts = [whole.cut(0, low, high) for low, high in pairwise(cuts)]
        copied = {4: parts[draw.randrange(4)], **dict(enumerate(parts))}
        made.append(TensorLayout(spec, {rank: box for rank, box in sorted(copied.items()) if box.numel}))
    return Manifest(tuple(made))


def _tied(manifest: Manifest, tied: bool) -> Manifest:
    """Leave out the head where it is tied to the embedding."""
    if not tied:
        return manifest
    kept = tuple(layout for layout in manifest.layouts if layout.spec.name != "lm_head.weight")
    return Manifest(kept, {"lm_head.weight": "model.embed_tokens.weight"}, manifest.replicas)
