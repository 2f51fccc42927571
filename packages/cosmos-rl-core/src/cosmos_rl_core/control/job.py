"""The parts of a recipe that the controller uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from cosmos_rl_core.control import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parameters of the run for the controller."""

    config_toml: str
    run_dir: Path
    resume_from: str
    supervised: bool
    """True: rows are sent directly to the policy; there are no rollout replicas."""
    max_steps: int | None
    eval_every_steps: int
    eval_by: tuple[str, ...]
    """Columns of the held-out rows to group rewards by."""
    group_size: int

    def welcome(self, message: p.Welcome, *, kept: list[str]) -> p.Welcome:
        """Return the ledger's welcome completed with the recipe. `kept`: files of the replica's spool still needed."""
        return msgspec.structs.replace(
            message,
            config=self.config_toml,
            run_dir=str(self.run_dir),
            resume_from=self.resume_from,
            last_step=self.max_steps or 0,
            kept=kept,
        )
