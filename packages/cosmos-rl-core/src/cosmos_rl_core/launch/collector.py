"""Python's garbage collector, paused while a worker imports libraries and builds models.

Both make a million objects that stay. Looking through them again and again for garbage takes a quarter of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage inside. What was made counts as old afterwards, and is looked through with the old."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # to the oldest generation: the youngest, looked through first, would hold all of it
        if running:
            gc.enable()
