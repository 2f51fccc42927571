"""Messages between a pool and the process of a group: msgspec frames, arrays as their bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from cosmos_rl_vla.sims.base import SimSpec
from cosmos_rl_vla.sims.pool.chunk import ChunkResult


class Make(msgspec.Struct, frozen=True, tag=True):
    """Build the simulators of this process. The reply is Made."""

    simulator: str
    options: dict[str, Any]
    slots: int


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Map the memory. No reply."""

    spec: SimSpec
    group: int
    groups: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """Begin an episode. The reply is Outcomes of one slot."""

    slot: int
    """Index within the group, as in all messages."""
    task: str
    init: int


class Run(msgspec.Struct, frozen=True, tag=True):
    """Execute a chunk in some slots. The reply is Outcomes of them, in this order."""

    slots: list[int]
    horizon: int
    actions: bytes
    """float32 [len(slots), horizon, action_dim]"""


class Made(msgspec.Struct, frozen=True, tag=True):
    """The simulators are built."""

    spec: SimSpec


class Chunked(msgspec.Struct, frozen=True, tag=True):
    """A ChunkResult."""

    rewards: bytes
    valid: bytes
    terminated: bool
    truncated: bool
    success: bool

    @staticmethod
    def of(result: ChunkResult) -> Chunked:
        return Chunked(
            rewards=result.rewards.tobytes(),
            valid=result.valid.tobytes(),
            terminated=result.terminated,
            truncated=result.truncated,
            success=result.success,
        )

    def result(self) -> ChunkResult:
        return ChunkResult(
            rewards=np.frombuffer(self.rewards, np.float32),
            valid=np.frombuffer(self.valid, np.bool_),
            terminated=self.terminated,
            truncated=self.truncated,
            success=self.success,
        )


class Began(msgspec.Struct, frozen=True, tag=True):
    """An episode has its first observation."""


class Broke(msgspec.Struct, frozen=True, tag=True):
    """An episode is lost; the slot can begin another."""

    reason: str


class Outcomes(msgspec.Struct, frozen=True, tag=True):
    """Results of the slots of one command, in its order. Observations are in the shared memory."""

    slots: list[Began | Chunked | Broke]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A UserError. The process continues, unless it was building its simulators."""

    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The simulators raised another exception. The process ends after this message."""

    reason: str


Command = Make | Attach | Start | Run
Reply = Made | Outcomes | Refused | Failed
