"""The memory of a process of a run, part by part. No torch, nothing is loaded.

A part occupies memory from the start on, or in certain phases, such as "a step is computed". The phase with the most
memory has to fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREPARE = "the negative prompt is embedded"
START = "the model is loaded"
"""The two phases of the start-up, in this order. Only parts that list a phase occupy memory in it."""
STEP = "a step is computed"
"""The time of a policy's forward and backward passes."""
REDUCED = "gradients of embedding and head are summed"
"""The time at the end of a backward pass over ranks."""
UPDATE = "the optimizer takes a step"
"""The time after a backward pass: gradients are summed and applied."""
NOT_COUNTED = "workspaces of kernels, the allocator's fragmentation"
"""Memory that no estimate includes, as it depends on the device and its libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """A part of a process's memory."""

    name: str
    bytes: int | None
    """None: not known before the run, and so not counted."""
    share: float | None = None
    """Share of the device that the process fills with this part and its weights; `bytes` is not known without it."""
    at: tuple[str, ...] = ()
    """Times at which it is held; none: always after the start-up."""
    host: bool = False
    """In the host's memory; on a CPU it is the same memory."""
    away: bool = False
    """With [run] colocate in the host's memory between the turns of its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """All parts of one process."""

    process: str
    """The process's noun, such as "a policy rank"."""
    parts: tuple[MemoryPart, ...]

    @property
    def device(self) -> int:
        """Peak bytes on its own device, of the parts whose size is known."""
        return max(self._device_at(time) for time in self._times)

    @property
    def fullest(self) -> str:
        """The time of that peak; "" where the memory is always the same."""
        return max(self._times, key=self._device_at)

    @property
    def host(self) -> int:
        """Bytes in the host's memory."""
        return sum(part.bytes or 0 for part in self.parts if part.host)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Parts whose size is not known."""
        return tuple(part.name for part in self.parts if part.bytes is None)

    @property
    def _times(self) -> Sequence[str]:
        return list(dict.fromkeys(time for part in self.parts for time in part.at)) or [""]

    def _device_at(self, time: str) -> int:
        parts = (part for part in self.parts if not part.host and _is_held(part, time))
        return sum(part.bytes or 0 for part in parts)


def _is_held(part: MemoryPart, time: str) -> bool:
    return time in part.at or (not part.at and time not in (PREPARE, START))
