"""The manifests of common shardings of a model, from plain specs: no process, no tensor, no GPU.

    pp            layers are cut into stages                          ranks count with pp outermost ...
    dp_replicate  copies (DDP, HSDP)
    dp_shard, cp  dim 0 is cut (FSDP2)
    tp            matrices are cut by `Rules`                         ... and tp innermost
    ep            experts go to neighbours among the dp_shard x cp x tp ranks; the other ranks cut them (FSDP2).
                  It divides their number, as in `core/parallel/mesh.py`; a recipe's ep divides dp_shard x cp too

A tensor is an expert's if its name has "experts.N."; one of all experts, "experts.", has them in dim 0 and is cut by
ep alone: fused gate and up projections would give a tp rank two boxes.

`parse_side` reads a sharding as text:

    fsdp8                 8 ranks, every parameter cut among them          (also dp_shard8)
    hsdp4x8               4 copies of that                                 (also dp_replicate4 dp_shard8)
    pp2 fsdp4 cp2 tp2     axes in any order; ranks count as in a recipe, pp outermost, tp innermost
    tp8 ep8 x 3           3 replicas of 8 ranks, experts spread over all of them
"""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from cosmos_rl_core.parallel.dims import AXES
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.box import Box
from cosmos_rl_transfer.layout.manifest import Manifest, TensorLayout
from cosmos_rl_transfer.layout.placement import Placement, Replicate, Shard, StridedShard

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(?:(\d+)\.)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which dim tensor parallelism cuts, by patterns of Hugging Face's names; what matches none is copied."""

    rows: str = r"(q|k|v|gate|up)_proj\.(weight|bias)$"
    """Cut along dim 0, the outputs."""
    columns: str = r"(o|down)_proj\.weight$"
    """Cut along dim 1, the inputs."""
    vocabulary: str = r"(embed_tokens|lm_head|wte)\.weight$"
    """Cut along dim 0, padded to `vocab_multiple`."""
    vocab_multiple: int = 1
    """vLLM: 64."""
    heads: str = r"(k|v)_proj\.(weight|bias)$"
    """Cut along dim 0 by whole KV heads; with more ranks than heads, neighbours hold the same one."""
    kv_heads: int | None = None
    """None: at least as many as ranks."""

    def placement(self, name: str, tp: int) -> Placement:
        """Return how an axis of `tp` ranks places a tensor."""
        if re.search(self.heads, name) and self.kv_heads and tp > self.kv_heads:
            if tp % self.kv_heads:
                raise LayoutError(f"tp = {tp} is no multiple of {self.kv_heads} KV heads")
            return Shard(0, copies=tp // self.kv_heads)
        if re.search(self.rows, name):
            return Shard(0)
        if re.search(self.columns, name):
            return Shard(1)
        if re.search(self.vocabulary, name):
            return Shard(0, multiple=self.vocab_multiple)
        return Replicate()


def mesh(
    specs: Sequence[WeightSpec],
    *,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
    ep: int = 1,
    kv_heads: int | None = None,
    vocab_multiple: int = 1,
    rules: Rules | None = None,
    first_rank: int = 0,
) -> Manifest:
    """Describe one copy of a model, or dp_replicate of them, over a mesh of ranks counted from `first_rank`.

    `rules` replaces the default ones, with `kv_heads` and `vocab_multiple`. Raises LayoutError for sizes that do not
    fit together.
    """
    rules = rules or Rules(kv_heads=kv_heads, vocab_multiple=vocab_multiple)
    shards = Side(dp_shard=dp_shard, cp=cp, tp=tp, ep=ep).dp_shard * cp
    stage_ranks = dp_replicate * shards * tp
    parts: list[Manifest] = []
    for stage, members in enumerate(stages(specs, pp)):
        first = first_rank + stage * stage_ranks
        spread = {s.name for s in members if ep > 1 and _EXPERT.search(s.name)}
        dense = [s for s in members if s.name not in spread]
        placements = {s.name: _dense(s, tp, rules) for s in dense}
        parts.append(
            Manifest.sharded(dense, mesh_shape=(dp_replicate, shards, tp), placements=placements, first_rank=first)
        )
        experts = [s for s in members if s.name in spread]
        parts.append(_experts(experts, (dp_replicate, shards * tp // ep, ep), first_rank=first))
    return _in_order(specs, parts)


def stages(specs: Sequence[WeightSpec], count: int) -> list[list[WeightSpec]]:
    """Cut a model into `count` runs of layers; what stands before the layers is in the first, the rest in the last.

    Raises LayoutError for fewer layers than stages.
    """
    layers = [int(match[1]) if (match := _LAYER.search(s.name)) else None for s in specs]
    known = [layer for layer in layers if layer is not None]
    num_layers = max(known, default=-1) + 1
    if count > max(num_layers, 1):
        raise LayoutError(f"{num_layers} layers cannot be cut into {count} stages")
    by_stage: list[list[WeightSpec]] = [[] for _ in range(count)]
    begun = False
    for spec, layer in zip(specs, layers):
        begun = begun or layer is not None
        place = (count - 1 if begun else 0) if layer is None else layer * count // num_layers
        by_stage[place].append(spec)
    return by_stage


def replicas(manifest: Manifest, count: int) -> Manifest:
    """Describe `count` copies of what `manifest` describes, one after the other: rollout replicas."""
    span = max(manifest.ranks, default=0) + 1 - min(manifest.ranks, default=0)
    layouts = _mapped(
        manifest, lambda boxes: {rank + i * span: box for i in range(count) for rank, box in boxes.items()}
    )
    groups = (tuple(rank + i * span for rank in group) for i in range(count) for group in manifest.copies)
    return Manifest(layouts, manifest.tied, tuple(groups))


def _dense(spec: WeightSpec, tp: int, rules: Rules) -> tuple[Placement, ...]:
    """[dp_replicate, dp_shard x cp, tp]: FSDP2 cuts dim 0 of what tensor parallelism left."""
    placed = rules.placement(spec.name, tp) if spec.shape and tp > 1 else Replicate()
    if not spec.shape:
        return Replicate(), Replicate(), placed
    fsdp = StridedShard(0, tp) if isinstance(placed, Shard) and placed.dim == 0 else Shard(0)
    return Replicate(), fsdp, placed


def _experts(specs: Sequence[WeightSpec], shape: tuple[int, int, int], *, first_rank: int) -> Manifest:
    """[dp_replicate, efsdp, ep]: each ep rank has its experts, cut along dim 0 over efsdp."""
    copies, parts, ep = shape
    groups: defaultdict[int, list[WeightSpec]] = defaultdict(list)
    stacked: list[WeightSpec] = []
    numbers = [int(match[1]) for s in specs if (match := _EXPERT.search(s.name)) and match[1]]
    count = max(numbers, default=-1) + 1
    for spec in specs:
        match = _EXPERT.search(spec.name)
        assert match is not None
        if match[1]:
            groups[int(match[1]) * ep // count].append(spec)
        else:
            stacked.append(spec)
    cut = {s.name: (Replicate(), StridedShard(0, ep), Shard(0)) for s in stacked}
    manifests = [Manifest.sharded(stacked, mesh_shape=shape, placements=cut, first_rank=first_rank)]
    for place, members in groups.items():
        placements = {s.name: (Replicate(), Shard(0)) for s in members}
        part = Manifest.sharded(members, mesh_shape=(copies, parts), placements=placements)
        manifests.append(Manifest(_mapped(part, _strided(first_rank + place, ep))))
    return Manifest(tuple(layout for part in manifests for layout in part.layouts))


def _strided(first: int, step: int) -> Callable[[dict[int, Box]], dict[int, Box]]:
    """Rank r becomes first + r * step."""
    return lambda boxes: {first + rank * step: box for rank, box in boxes.items()}


def _mapped(manifest: Manifest, change: Callable[[dict[int, Box]], dict[int, Box]]) -> tuple[TensorLayout, ...]:
    """Change every distinct cut once."""
    changed = [change(boxes) for boxes in manifest.cuts]
    return tuple(TensorLayout(layout.spec, changed[manifest.cut_of[layout.spec.name]]) for layout in manifest.layouts)


def _in_order(specs: Sequence[WeightSpec], parts: Iterable[Manifest]) -> Manifest:
    """All tensors of the parts, which share none, in the order of `specs`."""
    layouts = {layout.spec.name: layout for part in parts for layout in part.layouts}
    assert len(layouts) == len(specs), "names are unique, and every tensor is in one stage"
    return Manifest(tuple(layouts[spec.name] for spec in specs))


_MEANING = {
    **{axis: (axis,) for axis in (*AXES, "ep")},
    "fsdp": ("dp_shard",),
    "ddp": ("dp_replicate",),
    "hsdp": ("dp_replicate", "dp_shard"),
}
"""Names that may be written, and the axes they set."""

_KNOWN = "fsdpN (or dp_shardN), ddpN (or dp_replicateN), hsdpNxM, ppN, cpN, tpN, epN, and 'x N' for N replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The axes of one replica, and how many replicas there are."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if zero := [name for name, size in asdict(self).items() if size < 1]:
            raise LayoutError(f"{zero[0]} = {getattr(self, zero[0])}: must be at least 1")
        around = self.dp_shard * self.cp * self.tp
        if around % self.ep:
            raise LayoutError(
                f"ep = {self.ep} does not divide dp_shard x cp x tp = {self.dp_shard} x {self.cp} x {self.tp} = "
                f"{around}: experts are spread over those ranks"
            )

    @property
    def ranks(self) -> int:
        """Ranks of one replica."""
        return math.prod(size for _, size in self)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield (axis, size) in the order of ranks."""
        return ((axis, getattr(self, axis)) for axis in AXES)

    def __str__(self) -> str:
        """Return the text that parses to this."""
        used = [f"{axis}{size}" for axis, size in (*self, ("ep", self.ep)) if size > 1]
        times = [f"x {self.replicas}"] if self.replicas > 1 else []
        return " ".join([*(used or ["tp1"]), *times])


def parse_side(text: str) -> Side:
    """Read "pp2 fsdp4 tp2 x 3". Raises LayoutError that says what is known."""
    match = re.fullmatch(r"\s*(.*?)(?:\s+x\s*(\d+))?\s*", text.lower())
    assert match is not None  # the first group takes anything
    sizes: dict[str, int] = {}
    for word in match[1].split():
        for axis, size in _read(word, text):
            if axis in sizes:
                raise LayoutError(f"{text!r}: {axis} is given twice")
            sizes[axis] = size
    if not sizes:
        raise LayoutError(f"{text!r} names no axis; known: {_KNOWN}")
    try:
        return Side(**sizes, replicas=int(match[2] or 1))
    except LayoutError as error:
        raise LayoutError(f"{text!r}: {error}") from error


def _read(word: str, text: str) -> Iterator[tuple[str, int]]:
    """Yield the axes that one word sets."""
    match = re.fullmatch(r"([a-z_]+)(\d+(?:x\d+)?)", word)
    name, numbers = (match[1], match[2].split("x")) if match else (word.rstrip("0123456789x") or word, [])
    axes = _MEANING.get(name)
    if axes is None:
        close = difflib.get_close_matches(name, _MEANING, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise LayoutError(f"{text!r}: {word!r} is no axis{hint}; known: {_KNOWN}")
    if len(numbers) != len(axes):
        example = name + "x".join("NM"[: len(axes)])
        raise LayoutError(f"{text!r}: write {word!r} as {example}, and replicas as 'x N' after a space")
    return zip(axes, map(int, numbers))
