"""Saves checkpoints: in the background of training, and at its end.

    compute thread   step 11 | copy | step 12 | step 13 | step 14 | (wait) copy | ...
    writing thread           |---- write, hash, rename: step_11 ----|           |---- ...

All ranks of a replica do the same at the same time. A failed save is reported, and leaves training and the earlier
checkpoints untouched; after [checkpoint] max_failures in a row, and at the end of the run, it is the run's error.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from cosmos_rl_core.checkpoint.capture import Snapshot, SnapshotPlanner
from cosmos_rl_core.checkpoint.manifest import Origin, TrainState, has_all_files, list_steps
from cosmos_rl_core.checkpoint.restore import live_tensors
from cosmos_rl_core.checkpoint.retention import surplus
from cosmos_rl_core.checkpoint.weights_name import weights_name
from cosmos_rl_core.checkpoint.writer import CheckpointWriter, SaveFailed
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Policy
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.parallel.device import use_device
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.recipe.sections import CheckpointSection
from cosmos_rl_core.storage.folder import Folder, store_errors
from cosmos_rl_core.train.trainer import Trainer


class SavingRun:
    """The run around a saver: its scores, and the receiver of its reports. The defaults are for a saver that is alone.

    Called in the compute thread and in the writing thread; in rank 0, unless a method says otherwise.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        """timeline: gets a span "save" for the time in which a save keeps training waiting."""
        self.timeline = timeline or Timeline("saver")

    def scores(self) -> Mapping[int, float]:
        """Return step -> metric, higher better, for keep_best."""
        return {}

    def healthy(self) -> int | None:
        """Return the last step that the monitor found healthy, whose checkpoint is kept; None: none is kept for it."""
        return None

    def saved(self, step: int, folder: str) -> None:
        """Receive each checkpoint that is written during training."""

    def failed(self, text: str) -> None:
        """Receive an error, for the user."""

    def readable(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return live tensors with values that can be read now. Called in every rank."""
        return tensors


class CheckpointSaver:
    """Saves when a step is due, and at the end. Every method is called in every rank, in the compute thread.

    saver = CheckpointSaver(section, root=folder, trainer=trainer, ranks=RankGroup.of_all(), state=state)
    saver.after_step(state)         # after each step
    folder = saver.finish()         # once, at the end
    """

    def __init__(
        self,
        section: CheckpointSection,
        *,
        root: Folder,
        trainer: Trainer,
        state: TrainState,
        ranks: RankGroup | None = None,
        origin: Origin | None = None,
        resumed_from: str = "",
        run: SavingRun | None = None,
    ) -> None:
        """Start at `state`, which was read from the checkpoint `resumed_from` where that is not empty."""
        self._section = section
        self._trainer = trainer
        self._state = state
        self._ranks = ranks or RankGroup()
        self._run = run or SavingRun()
        beside = files_beside(trainer.policy) if self._ranks.leads else {}
        self._writer = CheckpointWriter(root, ranks=self._ranks, origin=origin or Origin(), beside=beside)
        self._planner = SnapshotPlanner(self._ranks, weights_file=f"policy/{weights_name(beside)}.safetensors")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=use_device)
        self._writing: Future[None] | None = None
        self._saved_step = state.step if resumed_from == str(root / f"step_{state.step}") else -1
        self._failures = 0
        """Saves in a row that failed."""
        self._last_error = ""
        self._kept: set[int] = set()
        """Steps of the checkpoints that were there after the last save."""

    def after_step(self, state: TrainState, *, leads: bool = True, now: bool = False) -> None:
        """Record the run's position, and save if it is time: copy now and write during the next steps.

        leads: whether this replica saves for all; the others keep their position alone. now: save in any case.

        Raises UserError if [checkpoint] max_failures saves in a row have failed.
        """
        self._state = state
        due = self._section.every_steps > 0 and state.step % self._section.every_steps == 0
        if not leads or not (due or now):
            return
        with self._run.timeline.span("save", step=state.step):
            self.settle()
            self._must_go_on()
            snapshot = self._snapshot(copy=self._section.asynchronous)
            if self._section.asynchronous:
                self._writing = self._thread.submit(self._try_to_write, snapshot)
            else:
                self._try_to_write(snapshot)
                self._must_go_on()

    def _must_go_on(self) -> None:
        """Raise UserError after too many failures. All ranks have counted the same."""
        if 0 < self._section.max_failures <= self._failures:
            raise UserError(
                f"{self._failures} saves in a row have failed ([checkpoint] max_failures); the last error is "
                f"{self._last_error}. {self._newest_whole()}"
            )

    def _newest_whole(self) -> str:
        """A sentence with the checkpoint to continue from."""
        try:
            steps = list_steps(self._writer.root)
        except store_errors():
            return f"Continue with --resume auto when {self._writer.root} can be written to."
        newest = f"step {steps[-1]}" if steps else "none"
        return f"The newest whole checkpoint is {newest}, in {self._writer.root}; continue with --resume auto."

    def settle(self) -> None:
        """Wait for the previous save. Its SaveFailed is reported already; any other error is a bug and raised here."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self, *, leads: bool = True) -> Folder | None:
        """Save the last whole step, if it is not saved yet, and return its folder; None unless this replica `leads`.

        None too in the middle of a step, where weights and stream position do not agree, and where others are further.
        Raises UserError when it cannot be written.
        """
        self.settle()
        self._thread.shutdown()
        if not leads or self._trainer.version != self._state.step or self._is_outdated():
            return None
        final = self._writer.root / f"step_{self._state.step}"
        if self._saved_step != self._state.step or self._was_removed(final):
            try:
                self._write(self._snapshot(copy=False))
            except SaveFailed as error:
                raise UserError(f"cannot write the checkpoint {final}: {error}. {self._newest_whole()}") from error
        else:
            self._drop_surplus(self._state.step)  # the last evaluation may have come since
        return final

    def _is_outdated(self) -> bool:
        """Whether another replica has saved a later step, and this one, which joined no mesh, none. As `_was_removed`.

        To save here would drop the later ones, as those of an abandoned attempt.
        """
        later = False
        if self._ranks.leads and not self._kept:
            with contextlib.suppress(*store_errors()):  # out of reach: the save says so
                later = any(step > self._state.step for step in list_steps(self._writer.root))
        return self._ranks.gather(b"later" if later else b"")[0] == b"later"

    def _was_removed(self, folder: Folder) -> bool:
        """Whether somebody has removed a checkpoint, or files of it. All ranks call it; rank 0 decides."""
        gone = self._ranks.leads and folder.is_local and not has_all_files(folder)
        return self._ranks.gather(b"gone" if gone else b"")[0] == b"gone"

    def _snapshot(self, *, copy: bool) -> Snapshot:
        tensors = live_tensors(self._trainer.policy, self._trainer.optimizer, rank=self._ranks.rank)
        return self._planner.take(self._run.readable(tensors), self._state, copy=copy)

    def _try_to_write(self, snapshot: Snapshot) -> None:
        step = snapshot.state.step
        try:
            folder = self._write(snapshot)
            if self._ranks.leads:
                self._run.saved(step, str(folder))
        except SaveFailed as error:
            self._failures, self._last_error = self._failures + 1, str(error)
            if self._ranks.leads:
                row = f", the save before failed too ({self._failures} in a row)" if self._failures > 1 else ""
                self._run.failed(
                    f"step {step} could not be saved: {error}{row}; training goes on, earlier checkpoints are untouched"
                )

    def _write(self, snapshot: Snapshot) -> Folder:
        folder = self._writer.write(snapshot)
        self._saved_step, self._failures = snapshot.state.step, 0
        self._drop_surplus(snapshot.state.step)
        return folder

    def _drop_surplus(self, newest: int) -> None:
        if not self._ranks.leads:
            return
        root, section = self._writer.root, self._section
        scores = self._run.scores() if section.keep_best else {}
        try:
            steps = list_steps(root)
            if gone := sorted((self._kept | {newest}) - set(steps)):
                self._run.failed(f"somebody has removed {', '.join(f'step_{step}' for step in gone)} from {root}")
            dropped = []
            if newest in steps:  # it is not where the run's directory was renamed right after the save
                dropped = surplus(
                    steps,
                    newest=newest,
                    keep=section.keep,
                    keep_best=section.keep_best,
                    scores=scores,
                    healthy=self._run.healthy(),
                )
            for step in dropped:
                (root / f"step_{step}").remove()
            self._kept = set(steps) - set(dropped)
        except store_errors() as error:
            self._run.failed(f"an old checkpoint could not be removed: {error}")


def files_beside(policy: Policy) -> dict[str, bytes]:
    """Return the files of `Policy.save_config` by name."""
    with tempfile.TemporaryDirectory() as folder:
        policy.save_config(Path(folder))
        files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
