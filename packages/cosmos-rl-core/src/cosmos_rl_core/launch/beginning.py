"""The state that a run begins with: the initial model, a checkpoint, or the journal of a controller that died.

beginning = Beginning.of(config, directory, resume="auto", overwrite=False)
ledger = beginning.ledger(settings, journal)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cosmos_rl_core.checkpoint.resume import Resumption, claim_root, find_resumption, notes_of_resumption
from cosmos_rl_core.control.journal import Journal
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.records import Position
from cosmos_rl_core.control.ledger.state import LedgerConfig
from cosmos_rl_core.launch.secrets import Secrets, make_secrets, read_secrets
from cosmos_rl_core.launch.takeover import Takeover, position_of, replay, take_over
from cosmos_rl_core.recipe.load import dump_resolved
from cosmos_rl_core.recipe.run import RunConfig
from cosmos_rl_core.workers.directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The state that a controller goes on from."""

    config: RunConfig
    resumption: Resumption | None = None
    """The checkpoint; None for the initial model."""
    takeover: Takeover | None = None
    """The run whose controller died; its policies may be ahead of the checkpoint."""

    @classmethod
    def of(cls, config: RunConfig, directory: RunDirectory, *, resume: str | None, overwrite: bool) -> Beginning:
        """Find the checkpoint or the dead controller; a new run clears its [checkpoint] path. Raises UserError."""
        path = directory.path
        takeover = take_over(path.resolve(), dump_resolved(config)) if directory.is_orphaned else None
        resumption = find_resumption(config, path, resume or "auto") if resume or takeover else None
        if resume is None and takeover is None:
            claim_root(config, path, overwrite=overwrite)
        return cls(config=config, resumption=resumption, takeover=takeover)

    @property
    def is_new(self) -> bool:
        """Whether the run has no rows and no steps of its own yet."""
        return self.resumption is None and self.takeover is None

    @property
    def checkpoint(self) -> str:
        """Location of the checkpoint; empty for the initial model."""
        return "" if self.resumption is None else str(self.resumption.folder)

    @property
    def step(self) -> int:
        """The step after which the run's own steps count: a run that is taken over has made all of them."""
        return 0 if self.takeover is not None or self.resumption is None else self.resumption.state.step

    def notes(self, max_steps: int) -> tuple[str, ...]:
        """Return the notes on the checkpoint. Raises UserError if it is beyond the run's steps."""
        return () if self.takeover is not None else notes_of_resumption(self.resumption, max_steps)

    def secrets(self, directory: Path) -> Secrets:
        """Return the run's secrets: workers of a run that is taken over have them already."""
        return (make_secrets if self.takeover is None else read_secrets)(directory, self.config.tls)

    def ledger(self, settings: LedgerConfig, journal: Journal) -> Ledger:
        """Return the ledger, at the checkpoint or replayed from the journal."""
        if self.takeover is not None:
            return replay(settings, journal)
        if self.resumption is None:
            return Ledger(settings)
        ledger, record = Ledger.resume(settings, position_of(self.resumption.state))
        journal.append(record)
        return ledger

    def evaluated_from(self, version: int, *, last: int) -> int:
        """Return the first version that the run evaluates, where the ledger is at `version`; earlier ones are kept."""
        if self.takeover is not None:
            return self.takeover.evaluated_from(version)
        return version if self.config.eval.due(version, last=last) else version + 1

    def newest(self, directory: Path) -> tuple[Position, str]:
        """Return position and location of a new policy's checkpoint; without one the start of the stream, and ""."""
        checkpoint = find_resumption(self.config, directory, "auto") or self.resumption
        return (Position(0, 0), "") if checkpoint is None else (position_of(checkpoint.state), str(checkpoint.folder))
