"""Distribution of the values of a vector, and the affine map that brings them to about [-1, 1].

    normalised = (values - centre) / scale
    quantile   centre = (q01 + q99) / 2            scale = (q99 - q01) / 2
    mean_std   centre = mean                       scale = std

A dimension that moves in so few frames that its percentiles are equal has another interval (`widened`); one that never
moves has one value, before and after the map.

No torch here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cosmos_rl_core.errors import UserError

Kind = Literal["quantile", "mean_std"]
_KINDS = ("quantile", "mean_std")
_ARRAYS = ("q01", "q99", "mean", "std")
_LEAST_SCALE = 1e-6
_FAR = 100.0
"""Normalised values that are logged: outliers, or rare values beside noise, whose squares are most of the loss."""

log = logging.getLogger(__name__)


def narrowest(values: np.ndarray) -> np.ndarray:
    """Return half the width [n] of an interval around each value that float32 can still resolve."""
    spacing = np.spacing(np.abs(values).astype(np.float32))
    return np.exp2(np.ceil(np.log2(np.maximum(16 * spacing, _LEAST_SCALE))))


Bounds = tuple[np.ndarray, np.ndarray]
"""Lower and upper ends [n] of an interval by dimension."""


def widened(percentiles: Bounds, instead: Bounds, *, mask: np.ndarray | bool = True, name: str) -> Bounds:
    """Replace intervals without width by those of `instead`: divided by no width, a rare value would be a million.

    instead: of the range or the deviation; without width for a dimension that never moves, which stays as it is.
    name: of the quantity, in the line that is logged.
    """
    least = 2 * narrowest(percentiles[0])
    rare = mask & (percentiles[1] - percentiles[0] <= least) & (instead[1] - instead[0] > 2 * least)
    for dimension in np.flatnonzero(rare):
        log.warning(
            "%s: dimension %d moves in less than 2 %% of the frames, so that its percentiles are equal (%g): "
            "%g .. %g is normalised to -1 .. 1 instead",
            name,
            dimension,
            *(float(bound[dimension]) for bound in (percentiles[0], *instead)),
        )
    low, high = np.where(rare, instead, percentiles)
    return low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Statistics of one quantity by dimension. A dimension that is masked out is not normalised."""

    kind: Kind
    q01: np.ndarray
    """[n] float32: 1st percentile."""
    q99: np.ndarray
    """[n] float32."""
    mean: np.ndarray
    """[n] float32."""
    std: np.ndarray
    """[n] float32."""
    mask: np.ndarray
    """[n] bool: dimensions that are normalised."""

    @classmethod
    def of(
        cls, values: np.ndarray, *, kind: Kind = "quantile", mask: np.ndarray | None = None, name: str = "values"
    ) -> Spread:
        """Measure `values` [N, n] of demonstrations; `name`: of them in the log."""
        if values.ndim != 2 or not len(values):
            raise ValueError(f"statistics of an array of shape {values.shape}: needs [N, dimensions], N at least 1")
        if not np.isfinite(values).all():
            raise ValueError("statistics of values that are not all finite: check the demonstrations for NaN")
        mask = np.ones(values.shape[1], dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
        low, high = np.quantile(values, (0.01, 0.99), axis=0)
        if kind == "quantile":
            low, high = widened((low, high), (values.min(axis=0), values.max(axis=0)), mask=mask, name=name)
        spread = cls(
            kind=kind,
            q01=low.astype(np.float32),
            q99=high.astype(np.float32),
            mean=values.mean(axis=0, dtype=np.float64).astype(np.float32),
            std=values.std(axis=0, dtype=np.float64).astype(np.float32),
            mask=mask,
        )
        furthest = np.abs(spread.normalise(values)).max(axis=0)
        for dimension in np.flatnonzero(mask & (furthest > _FAR)):
            log.warning("%s: dimension %d is normalised to up to %g", name, dimension, furthest[dimension])
        return spread

    @classmethod
    def between(cls, low: np.ndarray | Sequence[float], high: np.ndarray | Sequence[float]) -> Spread:
        """Use the bounds of an action space as percentiles, where there are no demonstrations."""
        low, high = np.asarray(low, dtype=np.float32), np.asarray(high, dtype=np.float32)
        if not (np.isfinite(low) & np.isfinite(high)).all():
            raise ValueError(f"bounds {low.tolist()} .. {high.tolist()} are not finite: give action statistics")
        return cls(
            kind="quantile",
            q01=low,
            q99=high,
            mean=(low + high) / 2,
            std=(high - low) / 2,
            mask=np.ones(len(low), dtype=bool),
        )

    def __len__(self) -> int:
        return len(self.q01)

    def normalise(self, values: np.ndarray) -> np.ndarray:
        """[..., n] in the simulator's units -> [..., n] float32, about [-1, 1].

        The image of a dimension that never moved is that of its one value, as in training.
        """
        centre, scale = self.affine()
        values = np.where(self.still, self.mean, values)
        return ((values - centre) / scale).astype(np.float32)

    def unnormalise(self, values: np.ndarray) -> np.ndarray:
        """Invert `normalise`."""
        centre, scale = self.affine()
        return (values * scale + centre).astype(np.float32)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        arrays = {name: getattr(self, name).tolist() for name in (*_ARRAYS, "mask")}
        return {"kind": self.kind, **arrays}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], *, origin: str) -> Spread:
        """Read statistics; raises UserError that names `origin` and the key."""
        missing = [name for name in ("kind", *_ARRAYS) if name not in stored]
        if missing:
            raise UserError(f"{origin}: no {', '.join(missing)}; needs {', '.join(('kind', *_ARRAYS))}")
        if stored["kind"] not in _KINDS:
            raise UserError(f"{origin}: kind {stored['kind']!r}: must be one of {', '.join(_KINDS)}")
        arrays = {name: np.asarray(stored[name], dtype=np.float32) for name in _ARRAYS}
        mask = np.asarray(stored.get("mask", [True] * arrays["q01"].size), dtype=bool)
        shapes = {name: array.shape for name, array in (*arrays.items(), ("mask", mask))}
        if len(set(shapes.values())) != 1 or arrays["q01"].ndim != 1:
            raise UserError(f"{origin}: arrays of unequal shapes {shapes}: needs one number per dimension")
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise UserError(f"{origin}: numbers that are not finite; measure the demonstrations again")
        if stored["kind"] == "quantile":
            low, high, std = (arrays[name] for name in ("q01", "q99", "std"))
            wide = widened((low, high), (low - std, low + std), mask=mask, name=origin)
            arrays |= dict(zip(("q01", "q99"), wide, strict=True))
        return cls(kind=stored["kind"], mask=mask, **arrays)

    @property
    def still(self) -> np.ndarray:
        """[n] bool: dimensions that never moved; their one value is the mean."""
        centre, scale = self.affine()
        return self.mask & (scale <= 2 * narrowest(centre))

    def affine(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the centre and scale, [n] float32 each: 0 and 1 where nothing is normalised."""
        if self.kind == "quantile":
            centre, scale = (self.q01 + self.q99) / 2, (self.q99 - self.q01) / 2
        else:
            centre, scale = self.mean, self.std
        # a dimension that is constant in the demonstrations stays constant
        centre, scale = np.where(self.mask, centre, 0), np.where(self.mask, np.maximum(scale, _LEAST_SCALE), 1)
        return centre.astype(np.float32), scale.astype(np.float32)
