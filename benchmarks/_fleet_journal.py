"""The journal of a run of controller.py, read from its files, and the speed of its disk."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cosmos_rl_core.control.journal import read_segment, segment_firsts, segment_path
from cosmos_rl_core.control.ledger import records


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Numbers of samples, after the restart of the controller."""

    lost: int
    """That were leased or delivered before it, and had to be generated again."""
    trained_twice: int
    """Of the whole run."""


def journal_of(directory: Path) -> Losses:
    """Read the journal of a run, which may be active."""
    decoder = msgspec.msgpack.Decoder(records.AnyRecord)
    firsts = segment_firsts(directory / "journal")
    restarted, lost = False, 0
    assigned: tuple[int, ...] = ()
    trained: Counter[int] = Counter()
    for first in firsts:
        path = segment_path(directory / "journal", first)
        for body, _ in read_segment(path, first=first, is_last=first == firsts[-1]):
            match decoder.decode(body):
                case records.Restarted():
                    restarted = True
                case records.Assigned(samples=samples):
                    assigned = samples
                case records.Commit():
                    trained.update(assigned)
                case records.Returned():
                    lost += restarted
                case records.Unheld(samples=samples) | records.PayloadsLost(samples=samples):
                    lost += len(samples) * restarted
    return Losses(lost=lost, trained_twice=sum(count > 1 for count in trained.values()))


async def sync_latencies(folder: Path, seconds: float) -> list[float]:
    """Return the seconds of a small write and fdatasync on the disk of `folder`, 20 of them a second."""

    def write() -> float:
        began = time.perf_counter()
        os.write(file.fileno(), bytes(512))
        os.fdatasync(file.fileno())
        return time.perf_counter() - began

    found: list[float] = []
    with tempfile.TemporaryFile(dir=folder) as file:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found.append(await asyncio.to_thread(write))
            await asyncio.sleep(0.05)
    return found
