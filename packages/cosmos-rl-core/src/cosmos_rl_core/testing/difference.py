"""How far two arrays are from one another, for tests that compare ranks with one process."""

from __future__ import annotations

import math

import numpy as np


def largest_difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest absolute difference of two elements; inf where there is a NaN, which `max` passes over."""
    largest = float(np.abs(found - wanted).max(initial=0.0))
    return math.inf if math.isnan(largest) else largest
