"""Rewards of places in a picture: boxes by their overlap, points by their distance.

    "<answer>[{"bbox_2d": [10, 20, 110, 220]}]</answer>"       boxes [x1, y1, x2, y2]: every list of four numbers
    "<point>(40, 60)</point>", "[40, 60]"                      points [x, y]: every pair of numbers

The last <answer>...</answer> of the response is read, or else all that follows its thought.
"""

from __future__ import annotations

import re
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.storage.json_files import shown
from cosmos_rl_core.types import Rollout, RolloutGroup
from cosmos_rl_llm.rewards.rules import tagged
from cosmos_rl_llm.rewards.thoughts import answer_part

_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_BOX = re.compile(rf"[\[(]{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}[\])]")
_POINT = re.compile(rf"[\[(]{_NUMBER},{_NUMBER}[\])]|\bx=\"{_NUMBER}\"\s*y=\"{_NUMBER}\"")

_MOST_BOXES = 1000
"""Boxes of a response that are compared with those of any row: a response that repeats itself has more."""


class _Places(Strict):
    """The units of places in a response."""

    scale: float | None = Field(default=None, gt=0)
    """The response's unit is the picture's side divided by this, and the row's the pixel: 1000 for Qwen3-VL. Not set:
    both have the same unit."""
    patch: int | None = Field(default=None, ge=1)
    """The response's unit is a pixel of the first picture as the model sees it, resized to patches of this side, and
    the row's one of the picture itself: 14 for Qwen2-VL and Qwen2.5-VL. Not set: see `scale`."""

    @model_validator(mode="after")
    def _has_one_unit(self) -> Self:
        if self.scale is not None and self.patch is not None:
            raise ValueError("scale and patch are two units of the same numbers; remove one")
        return self

    def units(self, rollout: Rollout) -> np.ndarray:
        """Return the picture's pixels in a unit of the response along x, y, x, y [4]."""
        if self.scale is None and self.patch is None:
            return np.ones(4)
        if "image" not in rollout.media:
            raise UserError("the options scale and patch need the prompt's picture, and this prompt has none")
        height, width = rollout.media["image"].shape[:2]
        if self.patch is None:
            return np.array([width, height, width, height]) / self.scale
        _, rows, columns = rollout.arrays["item_grid"][0]
        return np.array([width / columns, height / rows] * 2) / self.patch


class IouReward(_Places):
    """Intersection over union of the response's boxes with those of the row, in [0, 1]; 0 without a box, and with more
    than 1000 boxes that are also more than twice as many as the row has.

    Boxes are matched one to one, largest overlap first. The reward is the sum over the matches divided by the number of
    boxes, of the response or of the row, whichever is larger.
    """

    column: str = "boxes"
    """Column of the row with its box [x1, y1, x2, y2], or a list of boxes."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """Count a match with at least this overlap as 1, and any other as 0. Not set: the overlap itself."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        expected = _numbers_of_row(group, self.column, sizes=(4,))
        return [self._score(rollout, _answer(group, rollout), expected) for rollout in group.rollouts]

    def _score(self, rollout: Rollout, answer: str, expected: np.ndarray) -> float:
        boxes = np.array([match.groups() for match in _BOX.finditer(answer)], np.float64).reshape(-1, 4)
        if not len(boxes) or len(boxes) > max(_MOST_BOXES, 2 * len(expected)):
            return 0.0
        overlap = overlaps(boxes * self.units(rollout), expected)
        total = 0.0
        for _ in range(min(overlap.shape)):
            row, column = np.unravel_index(int(overlap.argmax()), overlap.shape)
            best = float(overlap[row, column])
            total += best if self.threshold is None else float(best >= self.threshold)
            overlap[row], overlap[:, column] = -1.0, -1.0
        return total / max(overlap.shape)


class PointReward(_Places):
    """1 for a point in the row's box, or by its distance to the row's point; 0 without a point, or with several.

    With a point in the row the reward is max(0, 1 - distance / radius).
    """

    column: str = "point"
    """Column of the row with its point [x, y], or a box [x1, y1, x2, y2]."""
    radius: float = Field(default=50.0, gt=0)
    """Distance at which the reward is 0, in the row's unit."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        expected = _numbers_of_row(group, self.column, sizes=(2, 4))
        if len(expected) != 1:
            raise UserError(f"column {self.column!r} of a row must have one point or one box; it has {len(expected)}")
        return [self._score(rollout, _answer(group, rollout), expected[0]) for rollout in group.rollouts]

    def _score(self, rollout: Rollout, answer: str, expected: np.ndarray) -> float:
        matches = _POINT.finditer(answer)
        points = {tuple(float(number) for number in match.groups() if number is not None) for match in matches}
        if len(points) != 1:
            return 0.0
        point = np.array(points.pop()) * self.units(rollout)[:2]
        if len(expected) == 4:
            return float(bool(((point >= expected[:2]) & (point <= expected[2:])).all()))
        return max(0.0, 1.0 - float(np.linalg.norm(point - expected)) / self.radius)


def _answer(group: RolloutGroup, rollout: Rollout) -> str:
    return tagged(answer_part(group, rollout))


def overlaps(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the intersection over union [n, m] of boxes [n, 4] and [m, 4]; a box without an area has none."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    common = np.clip(high - low, 0, None).prod(axis=-1)
    areas, of_others = (np.clip(each[:, 2:] - each[:, :2], 0, None).prod(axis=-1) for each in (boxes, others))
    union = areas[:, None] + of_others[None, :] - common
    return np.divide(common, union, out=np.zeros_like(common), where=union > 0)


def _numbers_of_row(group: RolloutGroup, column: str, *, sizes: tuple[int, ...]) -> np.ndarray:
    """Return the row's places [n, 2 or 4]. Raises UserError for a column of another form."""
    row = group.prompt.row
    if column not in row:
        raise UserError(f"the row has no column {column!r}; name the column of its places in the reward's options")
    value: Any = row[column]
    try:
        places = np.atleast_2d(np.asarray(value, np.float64))
    except (TypeError, ValueError):
        places = np.zeros((0, 0))
    if places.ndim != 2 or not len(places) or places.shape[1] not in sizes or not np.isfinite(places).all():
        counts = " or ".join(str(size) for size in sizes)
        raise UserError(f"column {column!r} must have {counts} numbers, or a list of these, not {shown(value)}")
    return places
