"""The parts of a recipe that the controller acts on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from cosmos_rl_core.control import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The run, as the controller sees it."""

    config_toml: str
    run_dir: Path
    resume_from: str
    supervised: bool
    """True: rows go straight to the policy; there are no rollout replicas."""
    max_steps: int | None
    eval_every_steps: int
    eval_by: tuple[str, ...]
    """Columns of the held-out rows whose values are told apart."""
    group_size: int

    def welcome(self, message: p.Welcome, *, kept: list[str]) -> p.Welcome:
        """Return the ledger's welcome with the recipe. `kept`: files in the replica's spool that are still needed."""
        return msgspec.structs.replace(
            message,
            config=self.config_toml,
            run_dir=str(self.run_dir),
            resume_from=self.resume_from,
            last_step=self.max_steps or 0,
            kept=kept,
        )
