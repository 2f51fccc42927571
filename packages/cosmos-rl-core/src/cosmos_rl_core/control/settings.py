"""The parts of a recipe that the controller uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.control.ledger.records import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Passed whole to the parts of the controller."""

    config_toml: str
    run_dir: Path
    resume_from: str
    supervised: bool
    """True: rows are sent directly to the policy; there are no rollout replicas."""
    max_steps: int | None
    eval_every_steps: int
    """0: only before the first step and after the last."""
    eval_by: tuple[str, ...]
    """Columns of the held-out rows to group rewards by."""
    group_size: int
    sync_interval: int = 1
    newest_checkpoint: Callable[[], tuple[Position, str]] = lambda: (Position(0, 0), "")
    """Returns stream position and location of the newest whole checkpoint; (0, "") is the initial model. Called in a
    thread."""
    policy_wait_s: float = 0.0
    """Maximum wait for another policy after the loss of all; 0: the run fails at once."""
    external: bool = False
    """Whether workers are started by others."""

    def ends_at(self, version: int) -> bool:
        """Return whether this is the version at which the run ends."""
        return self.max_steps is not None and version >= self.max_steps
