"""SIGKILL of a rollout replica that nobody starts again: from the kill until others hold its leases."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from _elastic_runs import PROGRAM, end, log_of, started, wait_until, write_recipe

from cosmos_rl_core.control.journal import read_segment, segment_firsts, segment_path
from cosmos_rl_core.control.ledger import records

ROLLOUTS = 3
TERMS, TERM_S = 4, 0.5
"""A group takes their product to generate."""

_decoder = msgspec.msgpack.Decoder(records.AnyRecord)


def recipe() -> dict[str, Any]:
    return {
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "name": "elastic", "max_steps": 1_000_000},
        "algorithm": {"name": "grpo"},
        "policy": {"prompts_per_step": 6, "threads": 1},
        "rollout": {
            "group_size": 4,
            "threads": 1,
            "sampling": {"max_tokens": TERMS},
            "options": {"delay_s": TERM_S},
        },
        "reward": {"functions": [{"name": "hits"}]},
        "logging": {"sinks": ["jsonl"]},
    }


def kill_rollouts(kills: int, draw: random.Random) -> list[float]:
    """Return the seconds from each kill until others hold the leases of the killed replica."""
    path, run_dir = write_recipe("leases", recipe())
    log = log_of("leases")
    found = []
    with ExitStack() as stack:

        def start(*arguments: str) -> Any:
            return stack.enter_context(started([PROGRAM, *arguments], log))

        def start_rollout(name: str) -> Any:
            return start("worker", "--role", "rollout", "--run", str(run_dir), "--name", name)

        controller = start("controller", str(path))
        wait_until((run_dir / "controller.json").exists, "the controller", log=log)
        start("worker", "--role", "policy", "--run", str(run_dir))
        living = {f"rollout-{number}": start_rollout(f"rollout-{number}") for number in range(ROLLOUTS)}
        try:
            for number in range(kills):
                wait_until(lambda: living.keys() <= set(_holders(run_dir).values()), "leases of all", log=log)
                time.sleep(draw.random() * TERMS * TERM_S)
                victim = draw.choice(sorted(living))
                wait_until(lambda victim=victim: victim in _holders(run_dir).values(), f"a lease of {victim}", log=log)
                living.pop(victim).kill()
                killed_at = time.monotonic()
                wait_until(lambda victim=victim: _regranted(run_dir, victim), "another holder", log=log)
                found.append(time.monotonic() - killed_at)
                name = f"rollout-{ROLLOUTS + number}"
                living[name] = start_rollout(name)
        finally:
            end(controller)  # it dismisses the workers
    return found


def _journal(run_dir: Path) -> Iterator[records.Record]:
    directory = run_dir / "journal"
    for first in segment_firsts(directory):
        for body, _ in read_segment(segment_path(directory, first), first=first, is_last=True):
            yield _decoder.decode(body)


def _holders(run_dir: Path) -> dict[int, str]:
    """Return the holder of each leased sample."""
    holders: dict[int, str] = {}
    for record in _journal(run_dir):
        match record:
            case records.Leased():
                holders[record.sample] = record.replica
            case records.Returned() | records.Delivered() | records.Dropped():
                holders.pop(record.sample, None)
    return holders


def _regranted(run_dir: Path, victim: str) -> bool:
    """Return whether every lease that the victim did not finish is held by another replica, or delivered by one."""
    last: dict[int, str] = {}
    open_, lost = set(), set()
    for record in _journal(run_dir):
        match record:
            case records.Leased():
                last[record.sample] = record.replica
                (open_ if record.replica == victim else lost).discard(record.sample)
                if record.replica == victim:
                    open_.add(record.sample)
            case records.Delivered() | records.Dropped():
                open_.discard(record.sample)
                lost.discard(record.sample)
            case records.Returned() if last.get(record.sample) == victim:
                open_.discard(record.sample)
                lost.add(record.sample)
    return not open_ and not lost
