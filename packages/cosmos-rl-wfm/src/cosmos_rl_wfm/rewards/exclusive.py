"""A model shared by threads: loaded at its first use, used by one thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Exclusive(Generic[T]):
    """Makes a value at its first use, and gives one thread at a time access to it. Retries `make` after a failure.

    model = Exclusive(load)         # nothing is loaded
    with model.use() as loaded:     # loads; others wait: tokenizers and readers are not safe for two threads at once
        ...
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._turn = Lock()
        self._made: tuple[T] | None = None

    @contextmanager
    def use(self) -> Iterator[T]:
        with self._turn:
            if self._made is None:
                self._made = (self._make(),)
            yield self._made[0]
