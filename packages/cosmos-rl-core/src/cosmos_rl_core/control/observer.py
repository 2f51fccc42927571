"""The receiver of a run's progress and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cosmos_rl_core.types import RolloutGroup


class Observer(Protocol):
    """Writes to console, files or dashboards. Called from the controller's event loop: it must return quickly."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluated(self, version: int, metrics: Mapping[str, float], groups: list[RolloutGroup]) -> None: ...
