"""The journal of a run of controller.py, read from its files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cosmos_rl_core.control.journal.files import read_segment, segment_firsts, segment_path
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
