"""Parallel instances of an engine for generation and evaluation: num_gpus = total_shard * tp_size.

    --num-gpus 8                  8 instances of one GPU each
    --num-gpus 8 --tp-size 2      4 instances of two GPUs each

On a machine without GPUs the numbers count processes instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import VISIBLE_GPUS

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Number and size of the instances. Raises UserError for numbers that do not divide."""

    num_gpus: int = 1
    """Total GPUs of all instances."""
    tp_size: int = 1
    """Tensor-parallel GPUs of one instance."""

    def __post_init__(self) -> None:
        for name, value in (("--num-gpus", self.num_gpus), ("--tp-size", self.tp_size)):
            if value < 1:
                raise UserError(f"{name} {value}: must be at least 1")
        if self.num_gpus % self.tp_size:
            raise UserError(
                f"--num-gpus {self.num_gpus} cannot be divided into instances of --tp-size {self.tp_size}: num_gpus = "
                f"total_shard * tp_size. Use {self.num_gpus - self.num_gpus % self.tp_size or self.tp_size} GPUs, or "
                "a tp_size that divides them."
            )

    @property
    def total_shard(self) -> int:
        """Number of instances, each with a part of the rows."""
        return self.num_gpus // self.tp_size

    def allot(self, gpus: Sequence[str]) -> list[list[str]]:
        """Return the GPUs of each instance; empty lists on a machine without GPUs.

        Raises UserError if the machine has fewer GPUs than requested.
        """
        if not gpus:
            return [[] for _ in range(self.total_shard)]
        if self.num_gpus > len(gpus):
            raise UserError(
                f"--num-gpus {self.num_gpus}: this machine has {len(gpus)} ({', '.join(gpus)}); use at most "
                f"{len(gpus)}, or set {VISIBLE_GPUS} to nothing to run on the CPU"
            )
        return [list(gpus[first : first + self.tp_size]) for first in range(0, self.num_gpus, self.tp_size)]

    def deal(self, rows: Sequence[T]) -> list[list[T]]:
        """Distribute the rows round-robin over the instances."""
        return [list(rows[index :: self.total_shard]) for index in range(self.total_shard)]
