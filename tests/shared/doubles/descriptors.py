"""Let this process run out of open files, for a while."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """Lower the soft limit of open files so that `number` more may be opened. Linux only."""
    "localhost".encode("idna")  # a codec in files of its own, which the first connection would read
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    listed = os.listdir("/proc/self/fd")  # the folder's own descriptor is among them, and closed again
    used = {int(name) for name in listed if os.path.exists(f"/proc/self/fd/{name}")}
    free = islice((descriptor for descriptor in count() if descriptor not in used), number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
