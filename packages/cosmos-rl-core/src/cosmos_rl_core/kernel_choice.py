"""Choose the fastest of several implementations by a measurement of milliseconds on this processor.

name = fastest("matrix products of 128 x 512", {"mkl": run_mkl, "onednn": run_onednn})

A kernel that wins on one processor loses on another. The first candidate is the plain one; another is chosen only if
it takes `MIN_GAIN` less time, so that noise of the measurement does not choose it. Choices are cached by processor:
a run that is resumed, and the processes of a run, must compute with the same kernels to agree bit by bit.
`COSMOS_RL_CACHE` names the folder, ~/.cache/cosmos-rl by default; delete it to measure again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cosmos_rl_core.hardware_log import log_choice

log = logging.getLogger(__name__)

MIN_GAIN = 0.05
"""Least share of the plain implementation's time that another one must save."""
_ROUNDS = 7
_ROUND_S = 0.5e-3
"""Time of one candidate in a round, at least one call; the candidates alternate."""
_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
    *("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"),
)
"""Environment variables that make libraries use fewer instructions than the processor has."""
_LIBRARIES = ("torch", "numpy", "numba")

_lock = threading.Lock()
_choices: dict[str, str] = {}


def fastest(name: str, candidates: Mapping[str, Callable[[], object]], *, code: Sequence[str] = ()) -> str:
    """Return the key of the fastest candidate; the first one is the plain implementation.

    name: the operation, its shape class and its number of threads. A name that was measured on this processor before is
    not measured again, unless one of the files `code`, which have our own kernels, has changed since. Candidates are
    called some ten times each and must not have side effects.
    """
    digest = _digest(tuple(code))
    with _lock:
        if name not in _choices:
            with _shared() as choices:
                kept = choices.get(name, {})
                if kept.get("kernel") not in candidates or kept.get("code") != digest:
                    choices[name] = {**measure(candidates), "code": digest}
                _choices[name] = choices[name]["kernel"]
            log_choice(f"{name}: {_choices[name]} ({_times(choices[name]['us'])})")
        return _choices[name]


def measure(candidates: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
    """Return the chosen `kernel` and the fastest call of each candidate in `us`."""
    calls = {}
    for name, run in candidates.items():
        run()
        calls[name] = max(1, int(_ROUND_S / _seconds(run, 1)))
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(_ROUNDS):
        for name, run in candidates.items():
            best[name] = min(best[name], _seconds(run, calls[name]) / calls[name])
    plain, fast = next(iter(best)), min(best, key=best.__getitem__)
    chosen = fast if best[fast] < (1 - MIN_GAIN) * best[plain] else plain
    return {"kernel": chosen, "us": {name: round(1e6 * seconds, 1) for name, seconds in best.items()}}


@cache
def _digest(files: tuple[str, ...]) -> str:
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]


@cache
def processor() -> Mapping[str, str]:
    """Return the processor, the variables that limit its instructions, and the versions of numeric libraries."""
    found = {"machine": platform.machine(), "name": platform.processor(), "flags": ""}
    with contextlib.suppress(OSError):  # Linux alone has this file
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "flags"):
                found["name" if key.startswith("model") else "flags"] = value.strip()
    found |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    for library in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[library] = version(library)
    return found


def cache_file() -> Path:
    """Return the file with this processor's choices."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cosmos-rl"
    digest = hashlib.sha256(json.dumps(processor(), sort_keys=True).encode()).hexdigest()[:16]
    return Path(os.environ.get("COSMOS_RL_CACHE") or root) / f"kernels-{digest}.json"


@contextlib.contextmanager
def _shared() -> Iterator[dict[str, dict[str, Any]]]:
    """The choices of all processes on this processor; one process at a time reads, measures and writes."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        log.warning("kernels are measured in each process anew, as %s cannot be written: %s", path.parent, error)
        yield {}
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        choices = _read(path)
        before = len(choices), list(choices.values())
        yield choices
        if before != (len(choices), list(choices.values())):
            new = path.with_suffix(".new")
            new.write_text(json.dumps({"processor": processor(), "choices": choices}, indent=1))
            new.replace(path)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return dict(json.loads(path.read_text())["choices"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is not a file of kernel choices (%s): they are measured again", path, error)
        return {}


def _seconds(run: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return max(time.perf_counter() - started, 1e-9)


def _times(us: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,.0f} us" for name, value in us.items())
