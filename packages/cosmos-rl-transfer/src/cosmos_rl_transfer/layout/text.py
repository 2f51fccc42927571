"""The sharding of a side, as people write it.

fsdp8                 8 ranks, every parameter cut among them          (also dp_shard8)
hsdp4x8               4 copies of that                                 (also dp_replicate4 dp_shard8)
pp2 fsdp4 cp2 tp2     axes in any order; ranks count as in a recipe, pp outermost, tp innermost
tp8 ep8 x 3           3 replicas of 8 ranks, experts spread over all of them
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from cosmos_rl_transfer.errors import LayoutError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""In the order of ranks, outermost first. `ep` borrows ranks of dp_shard x cp x tp and is no axis of its own."""

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
    found = re.fullmatch(r"\s*(.*?)(?:\s+x\s*(\d+))?\s*", text.lower())
    assert found is not None  # the first group takes anything
    sizes: dict[str, int] = {}
    for word in found[1].split():
        for axis, size in _read(word, text):
            if axis in sizes:
                raise LayoutError(f"{text!r}: {axis} is given twice")
            sizes[axis] = size
    if not sizes:
        raise LayoutError(f"{text!r} names no axis; known: {_KNOWN}")
    try:
        return Side(**sizes, replicas=int(found[2] or 1))
    except LayoutError as error:
        raise LayoutError(f"{text!r}: {error}") from error


def _read(word: str, text: str) -> Iterator[tuple[str, int]]:
    """Yield the axes that one word sets."""
    found = re.fullmatch(r"([a-z_]+)(\d+(?:x\d+)?)", word)
    name, numbers = (found[1], found[2].split("x")) if found else (word.rstrip("0123456789x") or word, [])
    axes = _MEANING.get(name)
    if axes is None:
        close = difflib.get_close_matches(name, _MEANING, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise LayoutError(f"{text!r}: {word!r} is no axis{hint}; known: {_KNOWN}")
    if len(numbers) != len(axes):
        wanted = name + "x".join("NM"[: len(axes)])
        raise LayoutError(f"{text!r}: write {word!r} as {wanted}, and replicas as 'x N' after a space")
    return zip(axes, map(int, numbers))
