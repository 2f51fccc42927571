"""Records demonstrations of a simulator's scripted expert as a dataset in LeRobot's format.

    Series (task, initial states) --> slots of a SimulatorPool, a step at a time --> successes in order --> DemoWriter

What is recorded does not depend on the number of processes.

    python -m cosmos_rl_vla.data.recording.record --simulator reach --tasks red,green --episodes 20 --out demos
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cosmos_rl_core.errors import UserError, WorkerFailed
from cosmos_rl_vla.data.recording.expert import EXPERT, Expert
from cosmos_rl_vla.data.recording.takes import PRIVILEGED, Series, Take
from cosmos_rl_vla.data.recording.writer import DemoWriter, Stored
from cosmos_rl_vla.sims.pool.group import Lost, Ready
from cosmos_rl_vla.sims.pool.pool import SimulatorPool

LOOKS = 1_000_000
"""Added to the first initial state for looks, so that no demonstration begins from one of theirs."""
_LOSSES = 3
"""Times an episode is begun again after its process was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What came of it."""

    episodes: int
    frames: int
    attempts: Mapping[str, int]
    """Episodes the expert played for those it succeeded in, by task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the expert's actions are changed."""

    speed: float | Sequence[float] = 1.0
    """Times the action, one factor or one a dimension: below 1 a slow demonstrator, whose imitator leaves something
    to reinforcement learning."""
    noise: float = 0.0
    """Deviation of what is added to actions that are executed, in the simulator's units. Those that are recorded are
    what the expert wanted there (DART, Laskey et al. 2017)."""
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
        path: a directory that is not there yet.
        looks_per_task: pictures of further beginnings, without an action, to learn from what there is to see.
        options: of the simulator, such as the size of its pictures.
        first_init: initial states from here on.
        processes: that simulate side by side, with `slots` episodes each.
        progress: called with a line for people, for each task about ten times, such as `print`.

    Raises UserError where the simulator has no expert or not such a task, the expert fails too often, or `path` is
    taken; WorkerFailed where the simulator breaks again and again.
    """
    options = dict(options or {})
    expert = Expert(simulator=simulator, options=options)
    told = {task: expert.instruction(task) for task in tasks}
    series = [Series(task, wanted=episodes_per_task, first_init=first_init) for task in tasks]
    looks = [Series(task, wanted=looks_per_task, first_init=first_init + LOOKS, look=True) for task in tasks]
    wrapped = {"simulator": simulator, "options": options}
    with (
        _writer(path, expert, stored=stored, robot=simulator) as writer,
        SimulatorPool(EXPERT, options=wrapped, groups=processes, slots_per_group=slots) as pool,
    ):
        stage = Stage(pool, expert, manner=manner or Manner())
        waiting = deque((*series, *looks))
        while waiting:
            stage.play(waiting)
            while waiting:  # the first is written first, whatever is over already
                for take in waiting[0].successes():
                    writer.add(take.demonstration(expert, instruction=told[take.task]))
                    if progress is not None and _is_due(waiting[0]):
                        progress(_line(waiting[0]))
                if not waiting[0].done:
                    break
                waiting.popleft()
    expert.close()
    attempts = {each.task: each.attempts for each in series}
    return Recorded(episodes=writer.num_episodes, frames=writer.num_frames, attempts=attempts)


def _is_due(series: Series) -> bool:
    """Whether the last success made another tenth of a series whole."""
    return series.kept * 10 // series.wanted > (series.kept - 1) * 10 // series.wanted


def _line(series: Series) -> str:
    if series.look:
        return f"{series.task}: {series.kept} of {series.wanted} pictures of beginnings"
    return f"{series.task}: {series.kept} of {series.wanted} episodes, {series.attempts} begun"


class Stage:
    """Plays episodes in the slots of a pool, as the expert says."""

    def __init__(self, pool: SimulatorPool, expert: Expert, *, manner: Manner) -> None:
        """Raises UserError for speeds that are not one, or one a dimension."""
        self._pool, self._expert, self._manner = pool, expert, manner
        self._speed = np.atleast_1d(np.asarray(manner.speed, np.float32))
        if len(self._speed) not in (1, expert.inner.action_dim):
            raise UserError(f"{len(self._speed)} speeds for {expert.inner.action_dim} dimensions of an action")
        self._playing: dict[int, tuple[Series, Take, np.random.Generator]] = {}

    def play(self, series: Sequence[Series]) -> None:
        """Begin what fits of `series`, the first first, and go on until something has happened.

        Waits for the pool; unblocked by a step, a beginning or a loss of any episode.
        """
        for slot in range(self._pool.num_slots):
            if slot not in self._playing:
                begun = next(((each, take) for each in series if (take := each.next()) is not None), None)
                if begun is None:
                    break
                self._begin(slot, *begun)
        for event in self._pool.wait():
            if isinstance(event, Lost):
                self._lost(event)
            else:
                self._go_on(event)

    def _begin(self, slot: int, series: Series, take: Take) -> None:
        rng = np.random.default_rng([self._manner.seed, take.init, *take.task.encode()])
        self._playing[slot] = series, take, rng
        self._pool.start(slot, task=take.task, init=take.init)

    def _lost(self, event: Lost) -> None:
        series, take, _ = self._playing[event.slot]
        if event.final:
            raise UserError(event.reason)
        take.losses += 1
        if take.losses > _LOSSES:
            raise WorkerFailed(f"{take.task!r} from initial state {take.init} was lost {_LOSSES} times: {event.reason}")
        take.forget()
        self._begin(event.slot, series, take)

    def _go_on(self, event: Ready) -> None:
        """Take in what a slot shows, and act or end the episode."""
        series, take, rng = self._playing[event.slot]
        take.success = series.look or (event.result is not None and event.result.success)
        over = event.result is not None and event.result.done
        if not over:
            take.images.append({camera: images[event.slot].copy() for camera, images in self._pool.images.items()})
            take.states.append(self._pool.states[event.slot].copy())
        if over or series.look:
            del self._playing[event.slot]
            series.end(take)
            return
        wanted = self._speed * self._expert.split(take.states[-1]).actions
        take.actions.append(wanted)
        executed = wanted + self._manner.noise * rng.standard_normal(len(wanted), np.float32)
        self._pool.submit([event.slot], executed[None, None].astype(np.float32))


def _writer(path: str | Path, expert: Expert, *, stored: Stored, robot: str) -> DemoWriter:
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
    simulator: Annotated[str, typer.Option(help="One with an expert: metaworld, reach, or module:attribute.")],
    tasks: Annotated[str, typer.Option(help="Names with commas between them.")],
    episodes: Annotated[int, typer.Option(min=1, help="Of each task, in which the expert succeeds.")],
    out: Annotated[Path, typer.Option(help="Directory of the dataset.")],
    looks: Annotated[int, typer.Option(min=0, help="Pictures of beginnings of each task, without actions.")] = 0,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=JSON", help="Of the simulator.")] = None,
    speed: Annotated[str, typer.Option(help="Times the expert's action; with commas, one a dimension.")] = "1",
    noise: Annotated[float, typer.Option(min=0, help="Deviation of what is added to executed actions.")] = 0.0,
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
    """Read `image_size=64` and the like; what is no JSON is taken as a word."""
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
