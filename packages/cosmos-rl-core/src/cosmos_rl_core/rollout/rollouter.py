"""From a prompt to its group: generate -> score -> filter -> shape -> mask -> advantage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from cosmos_rl_core.algorithms.rules import GroupRules, mask_prefixes, most_varied
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.interfaces import Recorder, RolloutEngine
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.reward.rubric import Rubric
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup

T = TypeVar("T")

FILTERED = "filtered:zero_variance"
"""Reason of a group that was left out for equal rewards; reasons with "filtered:" are not counted as failures."""
COMPARED = 4
"""Rollouts of the long prompt: several, since one may end at once."""


class Generates(Protocol):
    """Generates the rollouts of a prompt: an engine, or episodes over one."""

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Any, seed: int
    ) -> tuple[str, list[Rollout]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of a replica to its engine."""

    group_size: int
    num_started: int | None = None
    """Rollouts that are started for a group, of which the first `group_size` that end are taken; None: as many."""
    sampling: Any
    """Built by the domain's [rollout.sampling]."""
    eval_sampling: Any
    """Likewise, of evaluations."""
    seed: int
    """Of the run."""
    long: tuple[Prompt, Any] | None = None
    """Prompt and sampling parameters of the rollouts that the policy compares with its own log-probabilities."""


class Rollouter:
    """Runs prompts through one engine.

    group = await rollouter.run(prompt)                  # complete, with advantages; raises SampleError
    group = await rollouter.evaluate(prompt)             # one scored rollout with the evaluation's sampling parameters
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        rubric: Rubric,
        rules: GroupRules,
        requests: Requests,
        episodes: Generates | None = None,
        recorders: tuple[Recorder | None, Recorder | None] = (None, None),
        timeline: Timeline | None = None,
        show: Callable[[RolloutGroup], RolloutGroup] = lambda group: group,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """episodes: generates the rollouts in place of the engine. recorders: of training and of evaluation samples.
        show: adds the prompt's media. log: receives the reason if no rollouts can be compared.
        """
        self.engine = engine
        self.source: Generates = episodes or engine
        """Generates the rollouts."""
        self._rubric = rubric
        self._rules = rules
        self._requests = requests
        self._recorder, self._eval_recorder = recorders
        self._recording = asyncio.Lock()
        self._timeline = timeline or Timeline("rollout")
        self._show = show
        self._long = requests.long
        self._log = log
        self._compared: RolloutGroup | None = None
        self._comparing = asyncio.Lock()

    async def run(self, prompt: Prompt) -> RolloutGroup:
        with self._timeline.span("generate", sample=prompt.sample_id):
            text, rollouts = await self._rollouts(prompt)
        group = self._with_advantages(await self._scored(prompt, text, rollouts))
        await self._record(self._recorder, group)
        return group

    async def evaluate(self, prompt: Prompt) -> RolloutGroup:
        seed = request_seed(self._requests.seed, stream=1, sample_id=prompt.sample_id)
        sampling = self._requests.eval_sampling
        with self._timeline.span("generate", sample=prompt.sample_id):
            text, rollouts = await self.source.generate(prompt, num_samples=1, sampling=sampling, seed=seed)
        group = await self._scored(prompt, text, rollouts)
        await self._record(self._eval_recorder, group)
        return group

    async def score(self, group: RolloutGroup) -> RolloutGroup:
        """Score an existing group. Raises SampleError."""
        return await self._rubric.score(group)

    async def _record(self, recorder: Recorder | None, group: RolloutGroup) -> None:
        if recorder is None:
            return
        async with self._recording:
            if recorder.wants(group.max_policy_version, group):
                await asyncio.to_thread(recorder.save, group.max_policy_version, group)

    async def rollouts_to_compare(self) -> RolloutGroup | None:
        """Return the rollouts of the long prompt, generated once; None after the weights that they were sampled with.

        Every group of those weights carries them: which of the groups the next step trains on is not known here.
        """
        async with self._comparing:  # a cancelled group leaves the work to the next
            if self._long is not None:
                self._compared = await self._generate_long(*self._long)
                self._long = None
            if self._compared is not None and self._compared.min_policy_version != self.engine.version:
                self._compared = None
            return self._compared

    async def _generate_long(self, prompt: Prompt, sampling: Any) -> RolloutGroup | None:
        seed = request_seed(self._requests.seed, stream=2, sample_id=prompt.sample_id)
        try:
            with self._timeline.span("generate", sample=prompt.sample_id):
                _, rollouts = await self.engine.generate(prompt, num_samples=COMPARED, sampling=sampling, seed=seed)
        except Exception as error:  # any: an engine of others may want columns that this row has not
            self._log(f"engine and policy are not compared at the start: {type(error).__name__}: {error}")
            return None
        group = RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))
        return group if group.num_terms else None

    async def _rollouts(self, prompt: Prompt) -> tuple[str, list[Rollout]]:
        """Return the prompt as the model saw it, and the rollouts of a group."""
        requests = self._requests
        generate = partial(self.source.generate, prompt, sampling=requests.sampling)
        seed = request_seed(requests.seed, stream=0, sample_id=prompt.sample_id)
        if requests.num_started is None:
            return await generate(num_samples=requests.group_size, seed=seed)
        each = [generate(num_samples=1, seed=seed + number) for number in range(requests.num_started)]
        first = await first_results(each, count=requests.group_size)
        return first[0][0], [rollout for _, rollouts in first for rollout in rollouts]

    async def _scored(self, prompt: Prompt, text: str, rollouts: Sequence[Rollout]) -> RolloutGroup:
        with self._timeline.span("score", sample=prompt.sample_id):
            group = self._show(RolloutGroup(prompt=prompt, rollouts=tuple(rollouts), prompt_text=text))
            return await self._rubric.score(group)

    def _with_advantages(self, group: RolloutGroup) -> RolloutGroup:
        rewards = np.array([r.reward for r in group.rollouts])
        if self._rules.keep is not None and not self._rules.keep(rewards):
            raise SampleError(FILTERED, final=True, mean_reward=float(rewards.mean()))
        if self._rules.shape_reward is not None:
            lengths = np.array([r.num_terms for r in group.rollouts])
            truncated = np.array([r.finish_reason == "length" for r in group.rollouts])
            rewards = self._rules.shape_reward(rewards, lengths, truncated)
        if self._rules.mask_prefix_terms:
            group = self._without_prefixes(group, rewards)
        if self._rules.mask_truncated:
            group = _trained(group, [r.finish_reason != "length" for r in group.rollouts])
        if self._rules.of_steps is not None:
            return replace(group, rollouts=tuple(_with_steps(rollout, self._rules) for rollout in group.rollouts))
        if self._rules.num_trained is not None:
            return self._of_most_varied(group, rewards, self._rules.num_trained)
        advantages = np.full(len(rewards), np.nan) if self._rules.waits_for_step else self._rules.advantage(rewards)
        group = _with_rewards(group, rewards, advantages)
        return _trained(group, [r.advantage > 0 for r in group.rollouts]) if self._rules.selects else group

    def _of_most_varied(self, group: RolloutGroup, rewards: np.ndarray, count: int) -> RolloutGroup:
        """Train on a part of the group, whose rollouts are compared with one another alone."""
        chosen = most_varied(rewards, count)
        advantages = np.zeros(len(rewards))
        advantages[chosen] = self._rules.advantage(rewards[chosen])
        return _with_rewards(_trained(group, np.isin(np.arange(len(rewards)), chosen)), rewards, advantages)

    def _without_prefixes(self, group: RolloutGroup, rewards: np.ndarray) -> RolloutGroup:
        assert self._rules.tokens is not None, "the checks refuse mask_prefix_terms for a domain without tokens"
        tokens = [self._rules.tokens(rollout) for rollout in group.rollouts]
        masks = [rollout.loss_mask for rollout in group.rollouts]
        masks = mask_prefixes(tokens, masks, rewards, at_least=self._rules.mask_prefix_terms)
        pairs = zip(group.rollouts, masks, strict=True)
        return replace(group, rollouts=tuple(replace(rollout, loss_mask=mask) for rollout, mask in pairs))


def _with_rewards(group: RolloutGroup, rewards: np.ndarray, advantages: np.ndarray) -> RolloutGroup:
    rollouts = tuple(
        replace(rollout, reward=float(reward), advantage=float(advantage))
        for rollout, reward, advantage in zip(group.rollouts, rewards, advantages, strict=True)
    )
    return replace(group, rollouts=rollouts)


def _trained(group: RolloutGroup, trains: Sequence[bool] | np.ndarray) -> RolloutGroup:
    """Return the group without trained terms in the rollouts where `trains` [G] is false."""
    pairs = zip(group.rollouts, trains, strict=True)
    return replace(group, rollouts=tuple(replace(each, loss_mask=each.loss_mask & bool(keep)) for each, keep in pairs))


def _with_steps(rollout: Rollout, rules: GroupRules) -> Rollout:
    """Add the advantages of the rollout's steps; its own advantage is their mean if they are final, for display."""
    assert rules.of_steps is not None
    if rollout.episode is None:
        raise UserError(
            'advantage = "gae" needs the steps of an episode, but these rollouts have none; use an algorithm that '
            'compares rollouts of a group, such as "grpo"'
        )
    episode = rules.of_steps(rollout.episode)
    assert episode.advantages is not None
    mean = np.nan if rules.waits_for_step else float(episode.advantages.mean())
    return replace(rollout, episode=episode, advantage=mean)


async def first_results(work: Sequence[Coroutine[Any, Any, T]], *, count: int) -> list[T]:
    """Return the results of the first `count` coroutines that end, in the order of `work`, and cancel the others.

    Of those that end at once the earlier ones are taken. The first error is raised, and all others are cancelled.
    """
    tasks = [asyncio.create_task(each) for each in work]
    waiting, ended = set(tasks), list[asyncio.Task[T]]()
    try:
        while len(ended) < count:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ended += [task for task in tasks if task in done]
            for task in done:
                task.result()
        return [task.result() for task in tasks if task in ended[:count]]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def request_seed(run_seed: int, *, stream: int, sample_id: int) -> int:
    """Return the seed of one request; a function of the arguments only, so that every replica samples the same."""
    return int(np.random.SeedSequence([run_seed, stream, sample_id]).generate_state(1, np.uint64)[0] >> 1)
