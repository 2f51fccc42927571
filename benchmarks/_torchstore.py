"""torchstore, a peer that keeps weights in actors, in an environment of its own: .cache/torchstore.

    python _torchstore.py NUM_BYTES ROUNDS      there: put and get one tensor, seconds of each round on a line

Its wheel pins torch 2.9.0 and torchmonarch 0.1.2, which requires CUDA's libcuda.so.1 even for its import. So it is
installed without its dependencies, beside our torch and a monarch that runs without a GPU.
"""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

PINS = ("torchstore==0.1.2", "torchmonarch==0.7.0")
NEEDS = ("cloudpickle", "lark", "numpy", "opentelemetry-api", "pygtrie", "pyre-extensions", "pyzmq", "requests")
ALSO = ("tabulate", "torchx-nightly")
ROOT = Path(__file__).resolve().parent.parent / ".cache" / "torchstore"
TIMEOUT_S = 120
WARM_UP = 2


@dataclass(frozen=True)
class Stored:
    """The result."""

    seconds: float
    """Of a put and a get; NaN where there is none."""
    note: str


def torchstore_seconds(num_bytes: int, rounds: int, *, install: bool) -> Stored:
    """Measure it if it is installed, or if `install` is set and it can be."""
    if not (ROOT / ".installed").exists():
        if not install:
            return Stored(math.nan, f"torchstore is not installed in {ROOT.name}; run without --quick")
        if failure := _install():
            return Stored(math.nan, f"{PINS[0]} could not be installed: {failure}")
    command = [str(ROOT / "bin" / "python"), __file__, str(num_bytes), str(rounds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Stored(math.nan, f"{' with '.join(PINS)} did not finish within {TIMEOUT_S} s")
    if done.returncode != 0:
        return Stored(math.nan, f"{' with '.join(PINS)} does not start: {_last(done.stderr)}")
    times = [float(line) for line in done.stdout.split()]
    return Stored(median(times), f"{' with '.join(PINS)}: put and get, medians")


def _install() -> str:
    """Make the environment; return why it could not be made, or ""."""
    print(f"installing {' and '.join(PINS)} into {ROOT} (once) ...", flush=True)
    pip = [str(ROOT / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(ROOT)],
        [*pip, f"torch=={version('torch').partition('+')[0]}"],
        [*pip, "--no-deps", *PINS],
        [*pip, *NEEDS, *ALSO],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return _last(done.stderr)
    (ROOT / ".installed").touch()
    return ""


def _last(text: str, most: int = 200) -> str:
    return (text.strip().splitlines() or ["no word"])[-1][:most]


async def _put_and_get(num_bytes: int, rounds: int) -> None:
    import torch
    import torchstore  # pyright: ignore[reportMissingImports]

    await torchstore.initialize()
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    for index in range(WARM_UP + rounds):
        started = time.perf_counter()
        await torchstore.put("weights", source)
        await torchstore.get("weights", target)
        if index >= WARM_UP:
            print(time.perf_counter() - started, flush=True)
    await torchstore.shutdown()


if __name__ == "__main__":
    asyncio.run(_put_and_get(int(sys.argv[1]), int(sys.argv[2])))
