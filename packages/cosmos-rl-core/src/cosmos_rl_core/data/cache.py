"""Memory that is bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


V = TypeVar("V", bound=_Sized)


class ByteCache(Generic[V]):
    """Arrays by key. Any thread may use it."""

    def __init__(self, max_bytes: int, *, evict: bool = True) -> None:
        """evict: the least recently used make room; without it the first ones stay and later ones are not kept."""
        self._max_bytes = max_bytes
        self._evict = evict
        self._held: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Held now."""

    def get(self, key: Hashable) -> V | None:
        """Return what is held under a key."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: Hashable, array: V) -> None:
        """Keep an array, unless it is larger than all the memory it may use."""
        with self._lock:
            room = self._max_bytes if self._evict else self._max_bytes - self.num_bytes
            if key in self._held or array.nbytes > room:
                return
            self._held[key] = array
            self.num_bytes += array.nbytes
            while self.num_bytes > self._max_bytes:
                _, oldest = self._held.popitem(last=False)
                self.num_bytes -= oldest.nbytes
