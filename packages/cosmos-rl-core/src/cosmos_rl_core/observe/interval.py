"""Standard error and confidence interval of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over independent values."""

    mean: float
    standard_error: float
    """s / sqrt(n), s with n - 1; NaN for a single value."""
    low: float
    """Lower end of the 95 % confidence interval, by Student's t, or by Wilson's score if all values are 0 or 1; NaN
    for a single value."""
    high: float
    """Upper end."""
    count: int
    """n."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate the mean of the distribution from n >= 1 values."""
        array = np.asarray(values, np.float64)
        count, mean = len(array), float(array.mean())
        error = float(array.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        if count > 1 and set(array.tolist()) <= {0.0, 1.0}:
            low, high = wilson(mean, count)
            return cls(mean=mean, standard_error=error, low=low, high=high, count=count)
        half = t_quantile(count - 1) * error if count > 1 else math.nan
        return cls(mean=mean, standard_error=error, low=mean - half, high=mean + half, count=count)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion in `count` trials (Wilson, 1927), valid also for small counts."""
    z = 1.959963984540054
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    # without min and max, rounding could put the ends for 0 and 1 slightly inside or beyond the proportion
    return min((middle - half) / scale, share), max((middle + half) / scale, share)


def t_quantile(df: int) -> float:
    """Return the 97.5 % quantile of Student's t with df >= 1 degrees of freedom, to 0.2 %.

    Closed form for 1 and 2; above, the expansion in 1 / df (Abramowitz and Stegun 26.7.5).
    """
    if df == 1:
        return math.tan(math.pi * 0.475)
    if df == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = 1.959963984540054
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / df**power for power, term in enumerate(terms))
