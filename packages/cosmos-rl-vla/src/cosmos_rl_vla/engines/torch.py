"""The rollout engine: episodes in the slots of simulators, and one policy that acts for all awaiting slots.

                  slots of process 0: chunk runs     slots of process 1: at a decision
                        |                                   |
    pool.wait() --------+---- events ----> observations of awaiting slots -- act --> pool.submit(chunks)

All of it runs in the engine's thread (`rollout/engine_thread.py`), which waits for the simulators and for posts at the
same time. While the policy acts for half of a process's slots, the other half and the other processes simulate.
Weights are updated between two decisions; each decision records its version.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import nn

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.parallel.offload.swap import Swap, tensors_of
from cosmos_rl_core.rollout.engine_thread import EngineRequest, ThreadedEngine
from cosmos_rl_core.types import Prompt, Rollout
from cosmos_rl_vla.config import VLASampling, VLATorchOptions
from cosmos_rl_vla.engines import steady
from cosmos_rl_vla.models.base import Randomness
from cosmos_rl_vla.observations import ObservationConverter, Seen
from cosmos_rl_vla.sims.pool.group import Lost, SlotReady
from cosmos_rl_vla.sims.pool.pool import SimulatorPool
from cosmos_rl_vla.trajectory import Decided, Trajectory, padded_result

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_vla.models.base import Acted, ActionModel


_SEEDS = 2**63 - 1


@dataclass(eq=False, slots=True, kw_only=True)
class EpisodeRequest(EngineRequest):
    """The episodes of one prompt: the same task from the same initial state."""

    prompt: Prompt
    num_samples: int
    sampling: VLASampling
    seed: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """Finished rollouts by index in the group."""

    @property
    def task(self) -> str:
        return self.prompt.row["task"]

    @property
    def init(self) -> int:
        return self.prompt.row["init"]

    def episodes(self) -> list[Running]:
        """Return the group's episodes, each with a seed of its own."""
        seeds = np.random.SeedSequence(self.seed).generate_state(self.num_samples, np.uint64)
        return [Running(request=self, place=place, seed=int(seed) & _SEEDS) for place, seed in enumerate(seeds)]

    def add(self, place: int, rollout: Rollout) -> None:
        """Add the rollout of an episode; the last one finishes the request."""
        self.rollouts[place] = rollout
        if len(self.rollouts) == self.num_samples:
            self.finish()


@dataclass(eq=False, slots=True, kw_only=True)
class Running:
    """An episode in a slot."""

    request: EpisodeRequest
    place: int
    """Index in its group."""
    seed: int
    """Seed of the policy's sampling."""
    attempt: int = 0
    """Number of times its simulator was lost."""
    trajectory: Trajectory = field(default_factory=Trajectory)
    closing: bool = False
    """The episode was truncated at the step limit; the critic's value of the last state is missing."""

    def again(self) -> Running:
        """Return the episode to begin again after its simulator was lost."""
        return Running(request=self.request, place=self.place, seed=self.seed, attempt=self.attempt + 1)


class SimulationEngine(ThreadedEngine[EpisodeRequest]):
    """Implements `interfaces.Sleeps` over simulators and an action model."""

    def __init__(
        self,
        model: ActionModel,
        *,
        weights: Callable[[], Mapping[str, Tensor]],
        observer: ObservationConverter,
        pool: SimulatorPool,
        options: VLATorchOptions,
    ) -> None:
        """weights: returns the live tensors that the trainer publishes. observer: converts observations to inputs."""
        super().__init__("simulate")
        self._model, self._weights, self._observer, self._pool = model, weights, observer, pool
        module = cast(nn.Module, model)
        self._device = next(module.parameters()).device
        self._swap = Swap(lambda: tensors_of(module))
        self._max_attempts = options.max_attempts
        self._steady_rows = options.slots if options.steady else 0
        self._episodes: deque[Running] = deque()
        """Episodes that wait for a slot, in the order of requests."""
        self._slots: dict[int, Running] = {}
        """Episodes by the slot they run in."""
        self._awaiting: list[int] = []
        """Slots that wait for a decision."""

    @property
    def rows_at_once(self) -> int:
        """Twice the number of slots: running episodes, and as many waiting."""
        return 2 * self._pool.num_slots

    @property
    def simulators(self) -> SimulatorPool:
        """The pool in which the episodes run."""
        return self._pool

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights()

    async def sleep(self) -> None:
        """Move the model to host memory. The simulators keep theirs."""
        await self._call(self._swap.out)

    async def wake(self) -> None:
        await self._call(self._swap.back)

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: VLASampling, seed: int
    ) -> tuple[str, list[Rollout]]:
        request = EpisodeRequest(prompt=prompt, num_samples=num_samples, sampling=sampling, seed=seed)
        await self._ask(request)
        rollouts = [request.rollouts[place] for place in range(num_samples)]
        return f"{prompt.row['instruction']} ({request.task}, initial state {request.init})", rollouts

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._pool.close)

    def _is_busy(self) -> bool:
        return bool(self._slots or self._episodes)

    def _work(self) -> None:
        """Start episodes in free slots, wait for events, and act for awaiting slots."""
        while self._waiting:
            self._episodes += self._waiting.popleft().episodes()
        self._begin()
        if self._slots:
            self._answer(self._pool.wait(beside=self._bell))

    def _begin(self) -> None:
        """Start an episode in every free slot, alternating between processes."""
        per_group = self._pool.num_slots // (self._pool.group_of(self._pool.num_slots - 1) + 1)
        for slot in sorted(range(self._pool.num_slots), key=lambda slot: (slot % per_group, slot)):
            if slot not in self._slots and (running := self._next()) is not None:
                self._slots[slot] = running
                self._pool.start(slot, task=running.request.task, init=running.request.init)

    def _next(self) -> Running | None:
        """Return the next valid episode; the prompts of invalid ones fail with the reason."""
        while self._episodes:
            running = self._episodes.popleft()
            if running.request.done.done():
                continue
            try:
                self._observer.check(running.request.prompt.row, self._pool)
            except ValueError as error:
                where = running.request.prompt.origin or running.request.task
                running.request.fail(SampleError(f"{where}: {error}", final=True))
                continue
            return running
        return None

    def _answer(self, events: Sequence[SlotReady | Lost]) -> None:
        """Process events of the slots, and act for those that are due."""
        self._awaiting += [event.slot for event in events if self._goes_on(event)]
        chosen = self._take_awaiting()
        greedy = [slot for slot in chosen if self._slots[slot].request.sampling.greedy]
        sampled = [slot for slot in chosen if slot not in greedy]
        if sampled:
            self._decide(sampled, greedy=False)
        if greedy:
            self._decide(greedy, greedy=True)

    def _take_awaiting(self) -> list[int]:
        """Return the awaiting slots of each process of which at least half of the episodes await.

        Fewer would need more forward passes; waiting for all would leave the process idle during the pass.
        """
        for slot in [slot for slot in self._awaiting if self._slots[slot].request.done.done()]:
            self._awaiting.remove(slot)
            del self._slots[slot]
        group_of = self._pool.group_of
        awaiting, all_of_them = Counter(map(group_of, self._awaiting)), Counter(map(group_of, self._slots))
        chosen = [slot for slot in self._awaiting if 2 * awaiting[group_of(slot)] >= all_of_them[group_of(slot)]]
        self._awaiting = [slot for slot in self._awaiting if slot not in chosen]
        return chosen

    def _goes_on(self, event: SlotReady | Lost) -> bool:
        """Record a chunk's result and finish an episode that is over. Returns whether the slot awaits an action."""
        running = self._slots[event.slot]
        if running.request.done.done():
            del self._slots[event.slot]
            return False
        if isinstance(event, Lost):
            del self._slots[event.slot]
            self._lost(running, event)
            return False
        if event.result is None:
            return True
        sampling, horizon = running.request.sampling, self._model.horizon
        running.trajectory.results.append(padded_result(event.result, horizon))
        cut_off = event.result.truncated or running.trajectory.steps >= sampling.max_steps
        running.closing = cut_off and sampling.bootstrap and not sampling.greedy
        if event.result.terminated or (cut_off and not running.closing):
            self._finish(event.slot, last_values=None)
            return False
        return True

    def _lost(self, running: Running, lost: Lost) -> None:
        """Begin the episode again, or fail its prompt with the reason."""
        attempts = running.attempt + 1
        if not lost.final and attempts < self._max_attempts:
            self._episodes.appendleft(running.again())
            return
        where = running.request.prompt.origin or running.request.task
        times = "" if lost.final else f", {attempts} times"
        running.request.fail(SampleError(f"the episode of {where} was lost{times}: {lost.reason}", final=lost.final))

    def _decide(self, slots: Sequence[int], *, greedy: bool) -> None:
        """Run the policy once over awaiting slots; slots at their step limit only need its value."""
        episodes = [self._slots[slot] for slot in slots]
        seen = self._observer.observe(self._pool, slots, [running.request.prompt.row for running in episodes])
        seeds = [running.seed for running in episodes]
        places = [len(running.trajectory.decisions) for running in episodes]
        randomness = Randomness(seeds=seeds, places=places, version=self._version)
        decided = Decided.of(self._act(seen, randomness, greedy=greedy), seen, version=self._version)
        self._progress += 1
        chunks: dict[int, list[tuple[int, np.ndarray]]] = {}
        for row, (slot, running) in enumerate(zip(slots, episodes, strict=True)):
            if running.closing:
                self._finish(slot, last_values=decided.values[row])
                continue
            left = running.request.sampling.max_steps - running.trajectory.steps
            chunk = self._observer.actions(decided.actions[row])[:left]
            running.trajectory.decisions.append(decided.decision(row, actions=chunk))
            chunks.setdefault(len(chunk), []).append((slot, chunk))
        for alike in chunks.values():
            self._pool.submit([slot for slot, _ in alike], np.stack([chunk for _, chunk in alike]))

    def _act(self, seen: Seen, randomness: Randomness, *, greedy: bool) -> Acted:
        inputs = seen.inputs(self._device)
        if not self._steady_rows:
            return self._model.act(inputs, randomness=randomness, greedy=greedy)
        length = self._observer.max_tokens
        return steady.act(
            self._model, inputs, randomness=randomness, greedy=greedy, rows=self._steady_rows, length=length
        )

    def _finish(self, slot: int, *, last_values: np.ndarray | None) -> None:
        running = self._slots.pop(slot)
        camera = next(iter(self._pool.images.values()), None)
        last = None if camera is None else camera[slot].copy()
        rollout = running.trajectory.rollout(running.request.sampling, last_image=last, last_values=last_values)
        running.request.add(running.place, rollout)
