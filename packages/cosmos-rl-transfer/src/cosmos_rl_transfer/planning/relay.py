"""Target ranks with the same boxes relay buckets to one another: striped chains.

    ring of R members, bucket k:     trainer -> member k mod R -> the next -> ... -> the one before member k mod R

Bucket k enters the ring at member k mod R, so that every member reads 1/R of the stream from the trainers and the rest
from the one before it: all links of the ring are busy at once, unlike in one chain that starts at one member.
Each byte leaves the trainers once, and each member's NIC sends and receives every byte at most once. That is faster if
the rollouts' NICs together are faster than the trainers'; otherwise reading from the trainers is as fast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from cosmos_rl_transfer.layout.box import Box
from cosmos_rl_transfer.layout.manifest import Manifest

Relay = Literal["auto", "on", "off"]


def predecessor(bucket_index: int, position: int, ring_size: int) -> int | None:
    """Return the position that sends bucket `bucket_index` of a stream to `position`; None: the trainer does."""
    return None if bucket_index % ring_size == position else (position - 1) % ring_size


def successor(bucket_index: int, position: int, ring_size: int) -> int | None:
    """Return the position that receives the bucket from `position`; None: it is the last."""
    after = (position + 1) % ring_size
    return None if bucket_index % ring_size == after else after


def rings(target: Manifest) -> list[tuple[int, ...]]:
    """Return the ranks of `target` grouped by equal boxes, each rank in one group, ascending."""
    groups: defaultdict[tuple[Box | None, ...], list[int]] = defaultdict(list)
    for rank in target.ranks:
        groups[tuple(boxes.get(rank) for boxes in target.cuts)].append(rank)
    return [tuple(group) for group in groups.values()]


def pays(relay: Relay, groups: Sequence[Sequence[int]], *, trainer_speed: int, rollout_speed: int) -> bool:
    """Return whether to relay: speeds are the sums over all NICs, out of trainers and into rollouts."""
    if relay == "off" or all(len(group) == 1 for group in groups):
        return False
    return relay == "on" or rollout_speed > trainer_speed
