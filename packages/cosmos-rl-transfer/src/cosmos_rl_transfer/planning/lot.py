"""Equal copies of one unit: what is dealt to owners.

A lot is n copies: a unit (overlay.py) of each tensor of a class, for one target rank. All a plan decides is how many of
them each owner sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.box import Box
from cosmos_rl_transfer.layout.overlay import Owners
from cosmos_rl_transfer.planning.bucket import split
from cosmos_rl_transfer.planning.match import Match, TensorClass

LEAST_SPLIT_BYTES = 64 << 10
"""Smaller runs cost more than balance gains."""
LONE_SHARE = 16
"""A unit fewer in number than its owners is split among them if it is more than this part of what each sends: else its
sender would send little of all other layers, and idle while they are read."""


class Lot(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """n equal copies and who sends them."""

    kind: int
    """Place of the tensors' class."""
    box: Box
    num_bytes: int
    """Of one copy."""
    copies: int
    """One a tensor of the class."""
    slot: int
    """The target rank."""
    owners: Owners
    """Source ranks that hold the box."""
    counts: tuple[int, ...] = ()
    """How many copies each owner sends."""
    turn: int = 0
    """Where the owners' sequence over the tensors begins."""


def cut_lots(match: Match, classes: Sequence[TensorClass]) -> list[Lot]:
    """Cut what the slots want into lots; those with one owner are dealt already.

    Raises LayoutError where nobody holds a part.
    """
    lots = []
    for number, kind in enumerate(classes):
        copies = len(kind.tensors)
        alone = (copies,)
        for slot, wanted in kind.wanted.items():
            for box, owners in match.source.overlays[kind.source_cut].units(wanted):
                if not owners:
                    name, holders = match.names[kind.tensors[0]], sorted(match.source.cuts[kind.source_cut])
                    raise LayoutError(
                        f"{name}: no source rank of {holders} holds offset {box.offset} shape {box.shape}, "
                        f"which target rank {slot} needs"
                    )
                size, counts = box.numel * kind.item_bytes, alone if len(owners) == 1 else ()
                lots.append(
                    Lot(kind=number, box=box, num_bytes=size, copies=copies, slot=slot, owners=owners, counts=counts)
                )
    return lots


def split_shared(lots: Sequence[Lot], most_bytes: int | None) -> Iterator[Lot]:
    """Yield lots that several ranks own, in parts of whole rows where they are above `most_bytes` or lone and big."""
    total, number = demand(lots), Counter[tuple[int, Owners]]()
    for lot in lots:
        number[lot.kind, lot.owners] += lot.copies
    for lot in lots:
        width, limit = len(lot.owners), most_bytes or lot.num_bytes
        part = -(-lot.num_bytes // width)
        lone = number[lot.kind, lot.owners] < width and lot.num_bytes * LONE_SHARE * width > total[lot.owners]
        if lone and part >= LEAST_SPLIT_BYTES:
            limit = min(limit, part)
        if lot.num_bytes <= limit:
            yield lot
            continue
        item_bytes = lot.num_bytes // lot.box.numel
        for box in split(lot.box, item_bytes, limit):
            yield msgspec.structs.replace(lot, box=box, num_bytes=box.numel * item_bytes)


def demand(lots: Iterable[Lot]) -> Counter[Owners]:
    """Bytes by the ranks that may send them."""
    total = Counter[Owners]()
    for lot in lots:
        total[lot.owners] += lot.num_bytes * lot.copies
    return total


def loads(lots: Iterable[Lot]) -> Counter[int]:
    """Bytes each source rank sends."""
    sent = Counter[int]()
    for lot in lots:
        for owner, count in zip(lot.owners, lot.counts):
            sent[owner] += count * lot.num_bytes
    return sent
