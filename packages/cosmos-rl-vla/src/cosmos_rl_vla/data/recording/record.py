"""Records demonstrations of a simulator's scripted expert as a dataset in LeRobot's format.

    Series (task, initial states) --> slots of a SimulatorPool, a step at a time --> successes in order --> DemoWriter

The dataset does not depend on the number of processes.

    python -m cosmos_rl_vla.data.recording.record --simulator reach --tasks red,green --episodes 20 --out demos
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_vla.data.recording.expert import EXPERT, ScriptedExpert
from cosmos_rl_vla.data.recording.writer import Demonstration, DemoWriter, Stored
from cosmos_rl_vla.sims.pool.group import Lost, SlotReady
from cosmos_rl_vla.sims.pool.pool import SimulatorPool

PRIVILEGED = "privileged"
"""Column of numbers that the policy does not get; for [data] aux_columns."""

_ATTEMPTS = 5
"""Initial states tried per requested episode, before a task fails."""


@dataclass(eq=False, slots=True)
class Recording:
    """One episode in progress."""

    task: str
    init: int
    losses: int = 0
    """Number of restarts after its process was lost."""
    success: bool = False
    images: list[dict[str, np.ndarray]] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    """States of `ScriptedExpert`."""
    actions: list[np.ndarray] = field(default_factory=list)
    """[D] each, without noise; empty for a look."""

    def forget(self) -> None:
        """Discard all frames."""
        for frames in (self.images, self.states, self.actions):
            frames.clear()

    def demonstration(self, expert: ScriptedExpert, *, instruction: str) -> Demonstration:
        """Return the episode to write."""
        shown = expert.split(np.stack(self.states))
        none = np.zeros_like(shown.actions)
        return Demonstration(
            task=instruction,
            images={camera: np.stack([frame[camera] for frame in self.images]) for camera in self.images[0]},
            states=shown.states,
            actions=np.stack(self.actions) if self.actions else none,
            has_action=np.full(len(none), bool(self.actions)),
            columns={PRIVILEGED: shown.privileged} if shown.privileged.shape[1] else {},
        )


class Series:
    """The episodes of one task: the requested number of successes, from the first initial states that succeed.

    A further state is begun only after a failure, so the selection is independent of the number of concurrent episodes.
    """

    def __init__(self, task: str, *, num_successes: int, first_init: int, look: bool = False) -> None:
        """look: record initial observations alone, each of which is a success."""
        self.task, self.look, self.num_successes = task, look, num_successes
        self.kept = 0
        """Number of successes returned."""
        self._first = first_init
        self._begun = self._emitted = 0
        self._ended: dict[int, Recording] = {}

    @property
    def attempts(self) -> int:
        """Number of episodes begun."""
        return self._begun

    @property
    def done(self) -> bool:
        """Whether all requested successes were returned."""
        return self.kept == self.num_successes and self._emitted == self._begun

    def next(self) -> Recording | None:
        """Begin another episode; None if enough are running or have succeeded.

        Raises UserError if too many have failed.
        """
        failed = sum(not recording.success for recording in self._ended.values()) + self._emitted - self.kept
        if self._begun - failed >= self.num_successes:
            return None
        if self._begun >= _ATTEMPTS * self.num_successes:
            if self._begun > self._emitted + len(self._ended):
                return None  # the running ones may succeed
            raise UserError(
                f"the expert failed in {failed} of {self._begun} episodes of {self.task!r}: give it more time (options "
                "max_steps), more speed or less noise"
            )
        recording = Recording(task=self.task, init=self._first + self._begun)
        self._begun += 1
        return recording

    def end(self, recording: Recording) -> None:
        """Add a finished episode."""
        self._ended[recording.init] = recording

    def successes(self) -> Iterator[Recording]:
        """Yield successes in the order of their initial states, up to the first unfinished episode."""
        while (recording := self._ended.pop(self._first + self._emitted, None)) is not None:
            self._emitted += 1
            if recording.success:
                self.kept += 1
                yield recording


LOOKS = 1_000_000
"""Offset of the initial states of looks (first frames without an action), apart from those of demonstrations."""
_LOSSES = 3
"""Maximum restarts of an episode whose process was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Counts of a recorded dataset."""

    episodes: int
    frames: int
    attempts: Mapping[str, int]
    """Number of episodes run, failures included, by task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """Changes of the expert's actions."""

    speed: float | Sequence[float] = 1.0
    """Factor of the action, one or one per dimension: below 1 the demonstrator is slow, and reinforcement learning
    can improve on its imitator."""
    noise: float = 0.0
    """Standard deviation of noise added to executed actions, in the simulator's units. Recorded actions are the
    expert's, without noise (DART, Laskey et al. 2017)."""
    seed: int = 0


def record(
    path: str | Path,
    *,
    simulator: str,
    tasks: Sequence[str],
    episodes_per_task: int,
    looks_per_task: int = 0,
    options: Mapping[str, Any] | None = None,
    manner: Manner | None = None,
    first_init: int = 0,
    processes: int = 2,
    slots: int = 4,
    stored: Stored = "auto",
    progress: Callable[[str], None] | None = None,
) -> Recorded:
    """Write `episodes_per_task` episodes of each task in which the expert succeeds.

    Args:
        path: a directory that does not exist yet.
        looks_per_task: number of further initial observations without an action, which train auxiliary targets.
        options: of the simulator, such as the size of its images.
        first_init: first initial state.
        processes: number of simulator processes, with `slots` episodes each.
        progress: called with a line of text about ten times per task; for example `print`.

    Raises UserError if the simulator has no expert or no such task, the expert fails too often, or `path` exists;
    WorkerFailed if the simulator fails repeatedly.
    """
    options = dict(options or {})
    expert = ScriptedExpert(simulator=simulator, options=options)
    instructions = {task: expert.instruction(task) for task in tasks}
    series = [Series(task, num_successes=episodes_per_task, first_init=first_init) for task in tasks]
    looks = [Series(task, num_successes=looks_per_task, first_init=first_init + LOOKS, look=True) for task in tasks]
    wrapped = {"simulator": simulator, "options": options}
    with (
        _writer(path, expert, stored=stored, robot=simulator) as writer,
        SimulatorPool(EXPERT, options=wrapped, groups=processes, slots_per_group=slots) as pool,
    ):
        stage = ExpertRecorder(pool, expert, manner=manner or Manner())
        waiting = deque((*series, *looks))
        while waiting:
            stage.play(waiting)
            while waiting:  # series are written in order
                for recording in waiting[0].successes():
                    writer.add(recording.demonstration(expert, instruction=instructions[recording.task]))
                    if progress is not None and _is_due(waiting[0]):
                        progress(_line(waiting[0]))
                if not waiting[0].done:
                    break
                waiting.popleft()
    expert.close()
    attempts = {each.task: each.attempts for each in series}
    return Recorded(episodes=writer.num_episodes, frames=writer.num_frames, attempts=attempts)


def _is_due(series: Series) -> bool:
    """Whether the last success completed another tenth of a series."""
    return series.kept * 10 // series.num_successes > (series.kept - 1) * 10 // series.num_successes


def _line(series: Series) -> str:
    if series.look:
        return f"{series.task}: {series.kept} of {series.num_successes} initial observations"
    return f"{series.task}: {series.kept} of {series.num_successes} episodes, {series.attempts} begun"


class ExpertRecorder:
    """Plays the expert's episodes in the slots of a pool."""

    def __init__(self, pool: SimulatorPool, expert: ScriptedExpert, *, manner: Manner) -> None:
        """Raises UserError for a number of speeds other than one, or one per dimension."""
        self._pool, self._expert, self._manner = pool, expert, manner
        self._speed = np.atleast_1d(np.asarray(manner.speed, np.float32))
        if len(self._speed) not in (1, expert.inner.action_dim):
            raise UserError(f"{len(self._speed)} speeds for {expert.inner.action_dim} dimensions of an action")
        self._playing: dict[int, tuple[Series, Recording, np.random.Generator]] = {}

    def play(self, series: Sequence[Series]) -> None:
        """Begin episodes of `series` in free slots, in order, and process the next events.

        Waits for the pool; unblocked by a step, the beginning or the loss of any episode.
        """
        for slot in range(self._pool.num_slots):
            if slot not in self._playing:
                begun = next(((each, recording) for each in series if (recording := each.next()) is not None), None)
                if begun is None:
                    break
                self._begin(slot, *begun)
        for event in self._pool.wait():
            if isinstance(event, Lost):
                self._lost(event)
            else:
                self._go_on(event)

    def _begin(self, slot: int, series: Series, recording: Recording) -> None:
        rng = np.random.default_rng([self._manner.seed, recording.init, *recording.task.encode()])
        self._playing[slot] = series, recording, rng
        self._pool.start(slot, task=recording.task, init=recording.init)

    def _lost(self, event: Lost) -> None:
        series, recording, _ = self._playing[event.slot]
        if event.final:
            raise UserError(event.reason)
        recording.losses += 1
        if recording.losses > _LOSSES:
            raise WorkerFailed(
                f"{recording.task!r} from initial state {recording.init} was lost {_LOSSES} times: {event.reason}"
            )
        recording.forget()
        self._begin(event.slot, series, recording)

    def _go_on(self, event: SlotReady) -> None:
        """Record a slot's observation, and act or end the episode."""
        series, recording, rng = self._playing[event.slot]
        recording.success = series.look or (event.result is not None and event.result.success)
        over = event.result is not None and event.result.done
        if not over:
            recording.images.append({camera: images[event.slot].copy() for camera, images in self._pool.images.items()})
            recording.states.append(self._pool.states[event.slot].copy())
        if over or series.look:
            del self._playing[event.slot]
            series.end(recording)
            return
        action = self._speed * self._expert.split(recording.states[-1]).actions
        recording.actions.append(action)
        executed = action + self._manner.noise * rng.standard_normal(len(action), np.float32)
        self._pool.submit([event.slot], executed[None, None].astype(np.float32))


def _writer(path: str | Path, expert: ScriptedExpert, *, stored: Stored, robot: str) -> DemoWriter:
    sizes = expert.inner
    privileged = expert.spec.state_dim - sizes.state_dim - sizes.action_dim
    return DemoWriter(
        path,
        fps=max(1, round(sizes.control_hz)),
        cameras=sizes.cameras,
        state_dim=sizes.state_dim,
        action_dim=sizes.action_dim,
        columns={PRIVILEGED: privileged} if privileged else {},
        stored=stored,
        robot=robot,
    )


def main(
    *,
    simulator: Annotated[str, typer.Option(help="Simulator with an expert: metaworld, reach, or module:attribute.")],
    tasks: Annotated[str, typer.Option(help="Comma-separated task names.")],
    episodes: Annotated[int, typer.Option(min=1, help="Successful episodes per task.")],
    out: Annotated[Path, typer.Option(help="Directory of the dataset.")],
    looks: Annotated[int, typer.Option(min=0, help="Initial observations per task, without actions.")] = 0,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=JSON", help="Of the simulator.")] = None,
    speed: Annotated[
        str, typer.Option(help="Factor of the expert's action; comma-separated, one per dimension.")
    ] = "1",
    noise: Annotated[float, typer.Option(min=0, help="Standard deviation of noise on executed actions.")] = 0.0,
    first_init: Annotated[int, typer.Option(min=0, help="First initial state.")] = 0,
    processes: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Record a scripted expert's episodes as a dataset in LeRobot's format."""
    speeds = [float(part) for part in speed.split(",")]
    try:
        recorded = record(
            out,
            simulator=simulator,
            tasks=tuple(tasks.split(",")),
            episodes_per_task=episodes,
            looks_per_task=looks,
            options=_options(option or ()),
            manner=Manner(speed=speeds, noise=noise),
            first_init=first_init,
            processes=processes,
            progress=typer.echo,
        )
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{out}: {recorded.episodes} episodes, {recorded.frames} frames")
    for task, attempts in recorded.attempts.items():
        typer.echo(f"{task}: the expert succeeded in {episodes} of {attempts}")


def _options(given: Sequence[str]) -> dict[str, Any]:
    """Parse options such as `image_size=64`; a value that is not JSON is a string."""
    options: dict[str, Any] = {}
    for pair in given:
        key, _, value = pair.partition("=")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


if __name__ == "__main__":
    typer.run(main)
