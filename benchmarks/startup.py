"""Start-up time of the packages and the command, against a bare interpreter in alternating runs.

.venv/bin/python benchmarks/startup.py [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from _metrics import Figure, report

COMMAND = str(Path(sys.executable).with_name("cosmos-rl"))
BARE = [sys.executable, "-c", "pass"]
CORE = [sys.executable, "-c", "import cosmos_rl_core"]
HELP = [COMMAND, "--help"]
TORCH = [sys.executable, "-c", "import torch"]
LOADED = "import cosmos_rl_core, sys; sys.exit('torch' in sys.modules)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 15
    commands = {"bare": BARE, "core": CORE, "help": HELP, "torch": TORCH}
    for command in commands.values():
        seconds(command)  # files into the cache
    taken = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            taken[name].append(seconds(command))
    middle = {name: median(values) for name, values in taken.items()}
    bare = middle["bare"]
    without_torch = subprocess.run([sys.executable, "-c", LOADED]).returncode == 0
    report(
        "startup",
        [
            Figure(metric="bare interpreter", value=bare, unit="s"),
            Figure(metric="import cosmos_rl_core, whole process", value=middle["core"], unit="s"),
            Figure(metric="  over the bare interpreter", value=middle["core"] / bare, unit="x", target="<= 3"),
            Figure(metric="import cosmos_rl_core leaves torch out", value=float(without_torch), unit="", target=">= 1"),
            Figure(metric="cosmos-rl --help, whole process", value=middle["help"], unit="s"),
            Figure(metric="  over the bare interpreter", value=middle["help"] / bare, unit="x", target="<= 7"),
            Figure(metric="import torch, whole process", value=middle["torch"], unit="s", note="for comparison"),
        ],
    )


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
