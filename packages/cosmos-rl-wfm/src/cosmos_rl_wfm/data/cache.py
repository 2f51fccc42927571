"""A folder of bounded size that caches tensors in files, named by a hash of the inputs they were computed from.

    cache = TensorCache(folder, max_bytes=50 * 2**30)
    key = key_of(identity, size, model)
    if (latents := cache.get(key)) is None:
        cache.put(key, {"latents": model.encode(video)})

Processes share the folder without locks: a file is written under another name and renamed, so that it is complete or
absent; two processes that compute the same tensors write the same file. The least recently read files are evicted
first.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from cosmos_rl_wfm.data.storage import PARTIAL, is_remote, open_store, reaching, write_atomic

SUFFIX = ".safetensors"

SLACK = 0.05
"""Fraction of the bound that a process may add before it measures the folder again."""

ABANDONED_S = 3600.0
"""Age at which a partial file is removed: its writer is assumed dead."""

Tensors = Mapping[str, Tensor]


def key_of(*parts: Any) -> str:
    """Return the key of tensors computed from `parts`, JSON-like: file identity, size, fingerprint of the model, ..."""
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def code_of(*modules: ModuleType) -> str:
    """Return a hash of the source of modules: tensors that other code computed have another key."""
    return sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()


def identity(row: Mapping[str, Any], *, timeout_s: float = 60.0) -> list[Any]:
    """Return a JSON-like identity of a row's clip, which changes with the file's content.

    Raises:
        OSError: there is no such file.
        UserError: a store refuses or does not answer.
    """
    location, part = row["video"], row.get("video_at")
    if location.startswith("mock:"):
        return [location]
    files, path = open_store(location, timeout_s=timeout_s)
    with reaching(location):
        info = files.info(path)
    changed = [str(info[name]) for name in ("ETag", "etag", "mtime", "LastModified") if name in info]
    return [location if is_remote(location) else path, info["size"], changed, part]


class TensorCache:
    """A folder of tensors by key. Safe in any number of threads and processes."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._added = self._max_bytes  # the folder is not measured yet: measure it before the first file

    def get(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of a key, or None. A damaged file is removed."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:  # never written, or evicted
            return None
        try:
            return load(data)
        except SafetensorError:
            path.unlink(missing_ok=True)
            return None

    def put(self, key: str, tensors: Tensors) -> None:
        """Keep tensors under a key. Tensors larger than the whole bound are not kept."""
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        if len(data) > self._max_bytes:
            return
        with self._lock:
            self._added += len(data)
            if self._added > SLACK * self._max_bytes:
                self._make_room(len(data))
                self._added = 0
        write_atomic(self._path(key), data)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}{SUFFIX}"

    def _make_room(self, num_bytes: int) -> None:
        """Remove files until `num_bytes` and the slack of this process fit, the least recently read first."""
        entries: list[tuple[float, int, Path]] = []
        for path in self._folder.glob("*/*"):
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process evicts too
                continue
            if path.name.endswith(PARTIAL):
                if stat.st_mtime < time.time() - ABANDONED_S:
                    path.unlink(missing_ok=True)
            else:
                entries.append((stat.st_mtime, stat.st_size, path))
        excess = sum(size for _, size, _ in entries) + num_bytes - int((1 - SLACK) * self._max_bytes)
        for _, size, path in sorted(entries, key=lambda entry: entry[0]):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size
