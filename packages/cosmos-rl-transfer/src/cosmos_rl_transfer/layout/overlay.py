"""The atomic units of a tensor: a target's box cut at the edges of the source's boxes, each part with its owners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise, product

import numpy as np

from cosmos_rl_transfer.layout.box import Box

Owners = tuple[int, ...]
"""Ranks that hold the same bytes, ascending."""


class Overlay:
    """The boxes of one tensor's source ranks, ready to be laid over wanted boxes."""

    def __init__(self, boxes: Mapping[int, Box]) -> None:
        """Take the boxes by source rank."""
        owners: defaultdict[Box, list[int]] = defaultdict(list)
        for rank, box in boxes.items():
            if box.numel:
                owners[box].append(rank)
        self._owners = [tuple(sorted(ranks)) for ranks in owners.values()]
        self._low = np.array([box.offset for box in owners], np.int64)  # [distinct boxes, dims]
        self._high = np.array([box.end for box in owners], np.int64)
        self._found: dict[Box, list[tuple[Box, Owners]]] = {}

    def units(self, wanted: Box) -> list[tuple[Box, Owners]]:
        """Return disjoint parts that cover `wanted`, row-major, each with the ranks that hold all of it, maybe none."""
        if wanted not in self._found:
            self._found[wanted] = list(self._cut(wanted))
        return self._found[wanted]

    def _cut(self, wanted: Box) -> Iterator[tuple[Box, Owners]]:
        if not self._owners:
            yield wanted, ()
            return
        low, high = np.maximum(self._low, wanted.offset), np.minimum(self._high, wanted.end)
        touching = np.flatnonzero((low < high).all(axis=1))
        low, high = low[touching], high[touching]
        intervals = [
            list(pairwise(sorted({first, last, *low[:, dim].tolist(), *high[:, dim].tolist()})))
            for dim, (first, last) in enumerate(zip(wanted.offset, wanted.end))
        ]
        cells = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*intervals)]
        first = np.array([cell.offset for cell in cells], np.int64)[:, None]  # [cells, 1, dims]
        last = np.array([cell.end for cell in cells], np.int64)[:, None]
        holds = np.logical_and.reduce((low <= first) & (high >= last), axis=2)  # [cells, boxes that touch]
        for cell, row in zip(cells, holds):
            found = touching[row].tolist()
            if len(found) == 1:
                yield cell, self._owners[found[0]]
            else:
                yield cell, tuple(sorted(rank for i in found for rank in self._owners[i]))
