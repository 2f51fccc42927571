"""Bytes between all ranks of a replica, beside the training's own collectives.

    ranks = RankGroup.of_all()                  # every rank, at the same time
    texts = ranks.gather(b"my message")         # every rank gets all, in the order of ranks

It has a gloo group of its own, so that a background thread may use it while another one trains.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(hours=6)
"""Longest wait for a rank that writes a large file to a slow store; a rank that dies ends the wait at once."""


class RankGroup:
    """The ranks of a replica, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def of_all(cls) -> RankGroup:
        """Make the group out of all ranks of the default one; this process alone where there is none."""
        if not dist.is_initialized():
            return cls()
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        return cls(group)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of every rank, in the order of ranks."""
        if self._group is None:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = max(1, *(int(size) for size in sizes))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(padded, mine, group=self._group)
        return [everything[: int(size)].numpy().tobytes() for everything, size in zip(padded, sizes)]

    def meet(self) -> None:
        """Return once every rank is here."""
        self.gather(b"")
