"""rollouts/*.jsonl by byte offsets: a page of groups reads only its own lines, however large the files are."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cosmos_rl_core.ops.dashboard.lines import as_object, short

NAME = re.compile(r"(?P<kind>[a-z]+)_(?P<step>\d+)\.jsonl")
KEPT_FILES = 16
"""Files whose index is kept."""
BINS = 20
MOST_POINTS = 400
"""Of one prompt through time."""


class _Line(msgspec.Struct):
    """The part of a line that the index needs."""

    sample: int
    prompt: str | None = None
    prompt_media: dict[str, str] = {}
    reward: float | None = None
    num_terms: int = 0
    response: str = ""
    advantage: float | None = None
    finish_reason: str = ""


_decode = msgspec.json.Decoder(_Line).decode


@dataclass(slots=True)
class StoredGroup:
    """The rollouts of one prompt in a file."""

    sample: int
    rollouts: list[int] = field(default_factory=list)
    """Their numbers in the file."""


class RolloutFile:
    """Index of one file: 40 bytes a rollout."""

    def __init__(self, path: Path) -> None:
        self._path = path
        data = path.read_bytes()
        offsets, rewards, terms, advantages, truncated = [], [], [], [], []
        self.groups: list[StoredGroup] = []
        at = 0
        for line in data.splitlines(keepends=True):
            begin, at = at, at + len(line)
            try:
                rollout = _decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # the end of a file that is being written
            if not self.groups or self.groups[-1].sample != rollout.sample:
                self.groups.append(StoredGroup(rollout.sample))
            self.groups[-1].rollouts.append(len(offsets))
            offsets.append(begin)
            rewards.append(np.nan if rollout.reward is None else rollout.reward)
            advantages.append(np.nan if rollout.advantage is None else rollout.advantage)
            terms.append(rollout.num_terms)
            truncated.append(rollout.finish_reason == "length")
        self._offsets = np.array([*offsets, at], np.int64)
        self.rewards = np.array(rewards, np.float64)
        self.advantages = np.array(advantages, np.float64)
        self.terms = np.array(terms, np.int64)
        self.truncated = np.array(truncated, bool)

    def lines(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Return these rollouts, as they are in the file."""
        rows = []
        with self._path.open("rb") as file:
            for number in numbers:
                file.seek(self._offsets[number])
                row = as_object(file.read(self._offsets[number + 1] - self._offsets[number]).splitlines()[0])
                rows.append(row or {})
        return rows

    def histogram(self) -> dict[str, Any]:
        """Return the counts of rewards in BINS equal bins between the lowest and the highest."""
        rewards = self.rewards[np.isfinite(self.rewards)]
        if not rewards.size:
            return {"low": 0.0, "high": 0.0, "bins": []}
        low, high = float(rewards.min()), float(rewards.max())
        counts, _ = np.histogram(rewards, BINS, (low, high if high > low else low + 1.0))
        return {"low": short(low), "high": short(high), "bins": counts.tolist()}

    def matching(self, *, low: float, high: float, text: str) -> np.ndarray:
        """Return which rollouts have a reward between two values, and a text in prompt or response.

        text: without case; empty: any. It is no pattern: those of a regular expression can take for ever.
        """
        rewards = self.rewards
        keep = (rewards >= low) & (rewards <= high)
        if low == -np.inf and high == np.inf:
            keep |= ~np.isfinite(rewards)
        if not text:
            return keep
        sought = text.casefold()
        for group in self.groups:
            rows = self.lines(group.rollouts)
            in_prompt = sought in str(rows[0].get("prompt", "")).casefold()
            for number, row in zip(group.rollouts, rows, strict=True):
                answers = [row.get("response", ""), *row.get("exchanges", ())]
                keep[number] &= in_prompt or any(sought in str(answer).casefold() for answer in answers)
        return keep

    def page(self, *, keep: np.ndarray, sort: str, at: int, count: int) -> dict[str, Any]:
        """Return `count` groups from place `at` on, of those with a rollout in `keep`, in an order of SORTS."""
        chosen = [group for group in self.groups if keep[group.rollouts].any()]
        chosen.sort(key=lambda group: SORTS[sort](self, group))
        listed = []
        for group in chosen[at : at + count]:
            rows = self.lines(group.rollouts)
            rewards = self.rewards[group.rollouts]
            listed.append(
                {
                    "sample": group.sample,
                    "prompt": rows[0].get("prompt", ""),
                    "prompt_media": rows[0].get("prompt_media", {}),
                    "turns": rows[0].get("turns", []),
                    "mean": short(float(np.nanmean(rewards))) if np.isfinite(rewards).any() else None,
                    "rollouts": [
                        {**row, "shown": bool(keep[number])} for number, row in zip(group.rollouts, rows, strict=True)
                    ],
                }
            )
        return {"groups": listed, "total_groups": len(chosen), "total": int(keep.sum()), "of": len(keep)}


def _mean(file: RolloutFile, group: StoredGroup) -> float:
    rewards = file.rewards[group.rollouts]
    return float(np.nanmean(rewards)) if np.isfinite(rewards).any() else 0.0


SORTS: dict[str, Callable[[RolloutFile, StoredGroup], float]] = {
    "file": lambda file, group: group.rollouts[0],
    "worst": _mean,
    "best": lambda file, group: -_mean(file, group),
    "mixed": lambda file, group: -float(np.nan_to_num(file.rewards[group.rollouts]).std()),
    "longest": lambda file, group: -float(file.terms[group.rollouts].max()),
}
"""Orders of groups, by name."""


class Rollouts:
    """The rollout files of a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: OrderedDict[str, tuple[tuple[int, int], RolloutFile]] = OrderedDict()
        self._prompts: dict[bytes, list[tuple[str, int]]] = {}
        """Digest of a prompt -> (file, its first rollout) of each group."""
        self._indexed: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def files(self) -> dict[str, list[int]]:
        """Return the steps by kind: "step" for training, "eval" for evaluations."""
        steps_of: dict[str, list[int]] = {}
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if match := NAME.fullmatch(path.name):
                    steps_of.setdefault(match["kind"], []).append(int(match["step"]))
        return {kind: sorted(steps) for kind, steps in sorted(steps_of.items(), reverse=True)}

    def file(self, kind: str, step: int) -> RolloutFile:
        """Return the index of a file. Raises FileNotFoundError."""
        name = f"{kind}_{step:06d}.jsonl"
        path = self._directory / name
        if not NAME.fullmatch(name):
            raise FileNotFoundError(name)
        status = path.stat()
        state = (status.st_mtime_ns, status.st_size)
        with self._lock:
            kept = self._kept.get(name)
            if kept is None or kept[0] != state:
                kept = self._kept[name] = (state, RolloutFile(path))
            self._kept.move_to_end(name)
            while len(self._kept) > KEPT_FILES:
                self._kept.popitem(last=False)
        return kept[1]

    def through_time(self, prompt: str, media: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Return the groups of one prompt in all files, in the order of steps, evenly thinned to MOST_POINTS.

        media: locations of the prompt's pictures and videos, as in the file.
        """
        self._index_prompts()
        places = self._prompts.get(_digest(prompt, media or {}), [])
        places = sorted(places, key=lambda place: (int(place[0].rpartition("_")[2][:-6]), place[0]))
        groups = []
        for name, offset in places[:: -(-len(places) // MOST_POINTS) or 1]:
            with suppress(FileNotFoundError):  # removed since it was read
                groups.append(self._group_at(name, offset))
        return groups

    def _group_at(self, name: str, offset: int) -> dict[str, Any]:
        kind, _, step = name.removesuffix(".jsonl").rpartition("_")
        rollouts: list[dict[str, Any]] = []
        with (self._directory / name).open("rb") as file:
            file.seek(offset)
            for line in file:
                row = as_object(line)
                if row is None or (rollouts and row.get("sample") != rollouts[0]["sample"]):
                    break
                rollouts.append({key: row.get(key) for key in ("sample", "response", "reward")})
        return {"kind": kind, "step": int(step), "rollouts": rollouts}

    def _index_prompts(self) -> None:
        """Read the files that are new or have changed; the index has one entry a group."""
        with self._lock:
            for path in sorted(self._directory.glob("*.jsonl")):
                status = path.stat()
                state = (status.st_mtime_ns, status.st_size)
                if self._indexed.get(path.name) == state or not NAME.fullmatch(path.name):
                    continue
                if path.name in self._indexed:
                    for places in self._prompts.values():
                        places[:] = [place for place in places if place[0] != path.name]
                self._indexed[path.name] = state
                for digest, offset in _groups_of(path):
                    self._prompts.setdefault(digest, []).append((path.name, offset))


def _groups_of(path: Path) -> list[tuple[bytes, int]]:
    """Return the digest of the prompt and the offset of each group in a file."""
    groups, at, sample = [], 0, None
    for line in path.read_bytes().splitlines(keepends=True):
        begin, at = at, at + len(line)
        try:
            row = _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if row.sample != sample and row.prompt is not None:
            groups.append((_digest(row.prompt, row.prompt_media), begin))
        sample = row.sample
    return groups


def _digest(prompt: str, media: Mapping[str, str]) -> bytes:
    return blake2b(msgspec.json.encode([prompt, sorted(media.items())]), digest_size=8).digest()
