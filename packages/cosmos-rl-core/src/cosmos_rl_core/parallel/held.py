"""What a process of a run holds in memory, part by part. No torch, nothing is loaded.

Parts are held from the start on, or at certain times, such as "a step is computed"; the fullest time has to fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

START = "the model is loaded"
"""The time before all others: what is held from the start on does not yet count."""
STEP = "a step is computed"
"""The time of a policy's forward and backward passes."""
NOT_COUNTED = "the device's own context, workspaces of kernels, the allocator's fragmentation, buffers between ranks"
"""What no estimate has: it depends on the device and its libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A part of what a process holds."""

    name: str
    bytes: int | None
    """None: not known before the run, and so not counted."""
    at: tuple[str, ...] = ()
    """Times at which it is held; none: always after `START`."""
    host: bool = False
    """In the host's memory; on a CPU it is the same memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """All parts of one process."""

    process: str
    """What it is, such as "a policy rank"."""
    parts: tuple[Held, ...]

    @property
    def device(self) -> int:
        """Most bytes that it holds on its own device at a time, as far as they are known."""
        return max(self._device_at(time) for time in self._times)

    @property
    def fullest(self) -> str:
        """The time at which it holds them; "" where it always holds the same."""
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


def _is_held(part: Held, time: str) -> bool:
    return time in part.at or (not part.at and time != START)
