"""One program in the sandbox beside the same program in a plain interpreter, in turns.

.venv/bin/python benchmarks/code_sandbox.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from _metrics import Figure, report

from cosmos_rl_llm.sandbox.sandbox import Sandbox

PROGRAM = "print(1)"


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    runs = 50 if parser.parse_args().quick else 200
    sandbox = Sandbox()
    start = milliseconds(sandbox.started)
    plain_command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    ours: list[float] = []
    plain: list[float] = []
    for _ in range(runs):
        ours.append(milliseconds(lambda: sandbox.run_blocking(PROGRAM)))
        plain.append(milliseconds(lambda: subprocess.run(plain_command, capture_output=True, check=True)))
    layers = ", ".join(line.name.removeprefix("sandbox: ") for line in sandbox.started().checks() if line.level == "ok")
    note = f"medians of {runs} in turns at a load of {os.getloadavg()[0]:.1f}; layers: {layers}"
    metrics = [
        Figure(metric="a run in the sandbox", value=median(ours), unit="ms", note=note),
        Figure(metric="a run of python -I -S -c", value=median(plain), unit="ms"),
        Figure(metric="sandbox / plain", value=median(ours) / median(plain), unit="x", target="<= 1.5"),
        Figure(metric="fastest run in the sandbox", value=min(ours), unit="ms"),
        Figure(metric="fastest run of python -I -S -c", value=min(plain), unit="ms"),
        Figure(metric="start of the fork server", value=start, unit="ms"),
    ]
    return 0 if report("code_sandbox", metrics) else 1


if __name__ == "__main__":
    sys.exit(main())
