"""A row for each number that can be guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def rows() -> Sequence[Mapping[str, Any]]:
    return [{"secret": str(secret)} for secret in range(3)]
