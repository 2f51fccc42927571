"""Figure 6: a receiver, a source or a coordinator is killed at a random bucket, in many trials."""

from __future__ import annotations

import _support  # noqa: F401  (makes transfer_* importable)
from _metrics import Figure
from transfer_faults.trials import MOST_WAIT_S, run_trials


def metrics(count: int) -> list[Figure]:
    """Run the trials and summarise them."""
    found = run_trials(count)
    killed = ", ".join(f"{number} x {victim}" for victim, number in sorted(found.killed.items()))
    note = f"SIGKILL of {killed}; {found.committed} survivors had the new version then, {found.kept} the one before"
    return [
        Figure(metric="6 processes killed", value=found.trials, unit="", note=note),
        Figure(metric="6 longest wait", value=found.slowest_wait_s, unit="s", target=f"<= {MOST_WAIT_S:g}"),
        Figure(metric="6 survivors with a mixed version", value=found.mixed, unit="", target="<= 0"),
        Figure(metric="6 trials that broke a promise", value=len(found.faults), unit="", target="<= 0"),
    ]
