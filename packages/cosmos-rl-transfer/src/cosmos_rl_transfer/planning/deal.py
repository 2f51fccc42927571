"""Equal copies dealt to the ranks that may send them, so that each ends at its share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def deal(count: int, size: int, room: Sequence[int], *, turn: int) -> list[int]:
    """Return how many of `count` copies of `size` bytes each owner takes: one by one to who has most room left.

    The same as doing so, in closed form: all owners end at one level, the odd copies go to those above it. Equal
    owners are asked from place `turn` on, so that replicas that plan alone do not all choose the first.
    """
    if count % len(room) == 0 and min(room) == max(room):
        return [count // len(room)] * len(room)
    ranked = sorted(range(len(room)), key=lambda i: (-room[i], (i - turn) % len(room)))
    total, num_active = -count * size, 0
    for i in ranked:  # the level, total / num_active, is below the room of those that take anything
        if num_active and room[i] * num_active <= total:
            break
        total, num_active = total + room[i], num_active + 1
    counts = [0] * len(room)
    for i in ranked[:num_active]:
        counts[i] = (room[i] * num_active - total) // (num_active * size)
    if odd := count - sum(counts):  # less than one copy an owner
        above = sorted(ranked, key=lambda i: counts[i] * size - room[i])
        for i in above[:odd]:
            counts[i] += 1
    return counts


def deal_near(count: int, size: int, room: Sequence[int], distance: Sequence[int], *, turn: int) -> list[int]:
    """As `deal`, but whole copies that fit into the room of nearer owners go there first."""
    counts = [0] * len(room)
    for near in sorted(set(distance))[:-1]:
        places = [i for i, far in enumerate(distance) if far == near]
        fits = sum(max(0, room[i] // size) for i in places)
        taken = deal(min(count, fits), size, [room[i] for i in places], turn=turn)
        for i, number in zip(places, taken):
            counts[i] = number
        count -= sum(taken)
    rest = deal(count, size, [free - number * size for free, number in zip(room, counts)], turn=turn)
    return [near + far for near, far in zip(counts, rest)]


def interleave(counts: Sequence[int], turn: int) -> np.ndarray[Any, Any]:
    """Return [sum(counts)]: the owner of each copy, every owner's spread evenly, so that every window is balanced.

    In any window, an owner of the share s of all copies has s of the window's, give or take (1 - s) + s * (others that
    have copies). `turn` rotates the sequence.
    """
    if len(set(counts)) == 1:
        return (np.arange(sum(counts)) + turn) % len(counts)
    owners = np.repeat(np.arange(len(counts)), counts)
    middles = np.concatenate([(2 * np.arange(n) + 1) / (2 * n) for n in counts if n] or [np.zeros(0)])
    return np.roll(owners[np.argsort(middles, kind="stable")], -turn)
