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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.parallel.offload.swap import Swap, tensors_of
from cosmos_rl_core.rollout.engine_thread import EngineRequest, ThreadedEngine
from cosmos_rl_core.types import Prompt, Rollout
from cosmos_rl_vla.config import VLASampling, VLATorchOptions
from cosmos_rl_vla.models.base import Acted, ActionModel, Inputs, Randomness
from cosmos_rl_vla.models.loaded import LoadedPolicy
from cosmos_rl_vla.sims.pool.group import Lost, SlotReady
from cosmos_rl_vla.sims.pool.pool import SimulatorPool
from cosmos_rl_vla.trajectory import Decided, Trajectory, padded_result

if TYPE_CHECKING:
    from torch import Tensor


_SEEDS = 2**63 - 1
GREY = 128
"""Pixel value of an image that is hidden from the policy."""


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

    def __init__(self, loaded: LoadedPolicy, *, pool: SimulatorPool, options: VLATorchOptions) -> None:
        """loaded: with its weights, on its device; it is frozen."""
        super().__init__("simulate")
        self._loaded, self._model, self._pool = loaded, loaded.model, pool
        self._weights = loaded.trained_weights()
        """The live tensors that the trainer publishes."""
        self._model.requires_grad_(False).eval()
        self._device = next(self._model.parameters()).device
        self._swap = Swap(lambda: tensors_of(self._model))
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
        return self._weights

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
                self._check(running.request.prompt.row["instruction"])
            except ValueError as error:
                where = running.request.prompt.origin or running.request.task
                running.request.fail(SampleError(f"{where}: {error}", final=True))
                continue
            return running
        return None

    def _check(self, instruction: str) -> None:
        """Raise ValueError for an instruction longer than the model's maximum prompt."""
        self._loaded.instructions([instruction], self._loaded.stats.normalise_state(self._pool.states[:1]))

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
        inputs = observe(self._loaded, self._pool, slots, [running.request.prompt.row for running in episodes])
        seeds = [running.seed for running in episodes]
        places = [len(running.trajectory.decisions) for running in episodes]
        randomness = Randomness(seeds=seeds, places=places, version=self._version)
        decided = Decided.of(self._act(inputs, randomness, greedy=greedy), inputs, version=self._version)
        self._progress += 1
        chunks: dict[int, list[tuple[int, np.ndarray]]] = {}
        for row, (slot, running) in enumerate(zip(slots, episodes, strict=True)):
            if running.closing:
                self._finish(slot, last_values=decided.values[row])
                continue
            left = running.request.sampling.max_steps - running.trajectory.steps
            chunk = self._loaded.stats.unnormalise(decided.actions[row])[:left]
            running.trajectory.decisions.append(decided.decision(row, actions=chunk))
            chunks.setdefault(len(chunk), []).append((slot, chunk))
        for alike in chunks.values():
            self._pool.submit([slot for slot, _ in alike], np.stack([chunk for _, chunk in alike]))

    def _act(self, inputs: Inputs, randomness: Randomness, *, greedy: bool) -> Acted:
        inputs = inputs.to(self._device)
        if not self._steady_rows:
            return self._model.act(inputs, randomness=randomness, greedy=greedy)
        length = self._loaded.instructions.max_length
        return act_steadily(
            self._model, inputs, randomness=randomness, greedy=greedy, rows=self._steady_rows, length=length
        )

    def _finish(self, slot: int, *, last_values: np.ndarray | None) -> None:
        running = self._slots.pop(slot)
        camera = next(iter(self._pool.images.values()), None)
        last = None if camera is None else camera[slot].copy()
        rollout = running.trajectory.rollout(running.request.sampling, last_image=last, last_values=last_values)
        running.request.add(running.place, rollout)


def observe(
    loaded: LoadedPolicy, pool: SimulatorPool, slots: Sequence[int], rows: Sequence[Mapping[str, Any]]
) -> Inputs:
    """Copy the observations of `slots`, with each row's `instruction`; its `perturb` may grey the images out."""
    chosen = list(slots)
    cameras = [camera[chosen] for camera in pool.images.values()]
    images = np.stack(cameras, axis=1) if cameras else np.zeros((len(chosen), 0, 1, 1, 3), np.uint8)
    images[[row.get("perturb") == "grey_images" for row in rows]] = GREY
    states = loaded.stats.normalise_state(pool.states[chosen])
    tokens = loaded.instructions([row["instruction"] for row in rows], states)
    arrays = {"images": images, "state": states, "tokens": tokens.tokens, "token_mask": tokens.mask}
    return Inputs(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def act_steadily(
    model: ActionModel, inputs: Inputs, *, randomness: Randomness, greedy: bool, rows: int, length: int
) -> Acted:
    """Act in passes of one shape: a policy's output for an episode is then bitwise equal in any batch.

    The summation order of a matrix product depends on its number of rows. So a pass always has `rows` observations,
    padded with its first one, and `length` tokens.
    """
    missing = length - inputs.tokens.shape[1]
    tokens, mask = F.pad(inputs.tokens, (0, missing)), F.pad(inputs.token_mask, (0, missing))
    inputs = replace(inputs, tokens=tokens, token_mask=mask)
    parts: list[tuple[Acted, int]] = []
    for first in range(0, len(inputs), rows):
        count = min(rows, len(inputs) - first)
        places = [*range(first, first + count), *[first] * (rows - count)]
        own = replace(
            randomness,
            seeds=[randomness.seeds[place] for place in places],
            places=[randomness.places[place] for place in places],
        )
        selected = inputs.select(torch.tensor(places, device=inputs.tokens.device))
        parts.append((model.act(selected, randomness=own, greedy=greedy), count))
    return Acted(
        actions=torch.cat([acted.actions[:count] for acted, count in parts]),
        logprobs=torch.cat([acted.logprobs[:count] for acted, count in parts]),
        values=torch.cat([acted.values[:count] for acted, count in parts]),
        replay={name: torch.cat([acted.replay[name][:count] for acted, count in parts]) for name in parts[0][0].replay},
    )
