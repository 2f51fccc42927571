"""Moving weights between processes of this machine: speed, memory, proof, faults, pauses.

    python benchmarks/transfer_move.py [--quick]

Metrics are numbered from 3; 1 and 2, the planner's, are in transfer_plan.py. Sides take turns in every round; values
are medians.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence

import _move_faults
import _move_memory
import _move_pauses
import _move_proof
import _move_speed
import torch
from _metrics import Figure, report

PARTS = ("3", "4", "5", "6", "7")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer rounds, within a minute")
    parser.add_argument("--only", nargs="*", choices=PARTS, help="metrics to measure")
    given = parser.parse_args(arguments)
    quick, wanted = given.quick, given.only or PARTS
    logging.disable(logging.WARNING)  # a flipped bit is worth one
    torch.set_num_threads(1)
    parts = {
        "3": lambda: _move_speed.metrics(64 if quick else 512, 7, install=not quick),
        "4": lambda: _move_memory.metrics((64, 128) if quick else (128, 512)),
        "5": lambda: _move_proof.metrics(200 if quick else 1000, 20 if quick else 200),
        "6": lambda: _move_faults.metrics(10 if quick else 200),
        "7": lambda: _move_pauses.metrics(64 if quick else 512, 7),
    }
    metrics = [metric for number in wanted for metric in parts[number]()]
    cores = Figure(metric="cores", value=len(os.sched_getaffinity(0)), unit="")
    report("transfer_move", [cores, *metrics])


if __name__ == "__main__":
    main()
