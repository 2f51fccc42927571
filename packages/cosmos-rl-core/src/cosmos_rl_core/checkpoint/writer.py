"""Writes a snapshot so that a checkpoint is complete or absent.

disk          .step_12.partial/ in all ranks -> manifest.json -> renamed to step_12/
object store  step_12/ in all ranks          -> manifest.json, whose presence makes it a checkpoint
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict

import msgspec

from cosmos_rl_core.checkpoint.capture import Snapshot
from cosmos_rl_core.checkpoint.contents import CONTENTS
from cosmos_rl_core.checkpoint.manifest import STATE, Origin, write_json, write_manifest
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.storage.folder import Folder, store_errors, sync


class SaveFailed(Exception):
    """At least one rank could not write its part of a checkpoint; nothing is left of it. Names ranks and causes."""


class CheckpointWriter:
    """Called in every rank of the replica alike; rank 0 does the parts that are done once."""

    def __init__(self, root: Folder, *, ranks: RankGroup, origin: Origin, beside: Mapping[str, bytes]) -> None:
        """`beside` are the files of policy/ that are no weights, by name."""
        self.root = root
        self._ranks = ranks
        self._origin = origin
        self._beside = beside

    def write(self, snapshot: Snapshot) -> Folder:
        """Write `root/step_N` and return it; all ranks call this. Raises SaveFailed, in all of them."""
        final = f"step_{snapshot.state.step}"
        target = self.root / (f".{final}.partial" if self.root.is_local else final)
        try:
            self._together(lambda: self._clear(target) if self._ranks.leads else {})
            digests = self._together(lambda: self._write_tensors(target, snapshot))
            self._together(lambda: self._complete(target, final, snapshot, digests) if self._ranks.leads else {})
        except SaveFailed:
            if self._ranks.leads:
                with contextlib.suppress(*store_errors()):  # out of reach; without a manifest it is no checkpoint
                    target.remove()
            raise
        return self.root / final

    def _clear(self, target: Folder) -> dict[str, str]:
        """Remove the remains of killed saves; on an object store that is a folder without a manifest."""
        for name in self.root.folders():
            if name.startswith(".step_") and self.root.is_local:
                (self.root / name).remove()
        target.remove()
        return {}

    def _write_tensors(self, target: Folder, snapshot: Snapshot) -> dict[str, str]:
        return {file: target.write(file, snapshot.bytes_of(file)) for file in snapshot.files}

    def _complete(self, target: Folder, final: str, snapshot: Snapshot, digests: dict[str, str]) -> dict[str, str]:
        """Add the files that rank 0 alone writes, and make it a checkpoint; the files of all ranks must be here."""
        if missing := sorted(set(digests) - set(target.walk())):
            raise FileNotFoundError(
                errno.ENOENT,
                f"{missing[0]} is not in {target}: [checkpoint] path must be a folder that all ranks reach",
            )
        for name, data in self._beside.items():
            digests[f"policy/{name}"] = target.write(f"policy/{name}", [data])
        digests[CONTENTS] = target.write(CONTENTS, [msgspec.json.encode(snapshot.contents)])
        state = asdict(snapshot.state) | {"successes": snapshot.state.successes.hex()}
        digests[STATE] = write_json(target, STATE, {**state, "origin": asdict(self._origin)})
        write_manifest(target, digests)
        if target.is_local:
            for path in [*filter(lambda path: path.is_dir(), target.path.rglob("*")), target.path]:
                sync(path)
            self._remove_existing(final)
            target.rename(final)
        return {}

    def _remove_existing(self, final: str) -> None:
        """Remove a checkpoint of this step that is damaged, or of an abandoned attempt of the run."""
        if self.root.has(final):
            replaced = (self.root / final).rename(f".{final}.replaced")
            replaced.remove()

    def _together(self, work: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Run `work` in every rank and return the digests of all; raises SaveFailed in all when it failed in one."""
        try:
            result = {"done": work()}
        except store_errors() as error:
            result = {"failed": _cause(error)}
        results = [json.loads(text) for text in self._ranks.gather(json.dumps(result).encode())]
        failed = [f"rank {rank}: {each['failed']}" for rank, each in enumerate(results) if "failed" in each]
        if failed:
            raise SaveFailed("; ".join(failed) if self._ranks.size > 1 else failed[0].removeprefix("rank 0: "))
        return {name: digest for each in results for name, digest in each["done"].items()}


def _cause(error: Exception) -> str:
    """The store's error message, without our temporary names."""
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
