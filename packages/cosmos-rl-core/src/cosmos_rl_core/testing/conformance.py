"""Conformance checks of rollout engines, reward functions and launchers, for the tests of plug-ins.

    @pytest.mark.parametrize("check", ENGINE_CHECKS)
    def test_my_engine(check):
        asyncio.run(check(make_engine, prompt, Sampling(max_terms=8)))

`make_engine` returns a new engine with the same weights each time. A domain with settings of its own in place of
`Sampling` passes those; limits of terms and temperature are checked of `Sampling` alone.

    check_launcher(MyPlatform(), run, start=lambda: launch("mine", run, resume=False), until=wait_for)

`until(condition, what)` waits until the condition holds, and fails with `what` otherwise.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import RewardFn, RolloutEngine, Sleeps
from cosmos_rl_core.reward.rubric import Rubric, WeightedReward
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Sampling

if TYPE_CHECKING:
    from cosmos_rl_core.ops.clusters.launcher import ClusterRun, Launcher

MakeEngine = Callable[[], RolloutEngine]
EngineCheck = Callable[[MakeEngine, Prompt, Any], Awaitable[None]]
Until = Callable[[Callable[[], object], str], object]

_SETTLED_S = 0.3
"""Time in which an engine that does not wait samples a term."""


async def returns_whole_rollouts(make: MakeEngine, prompt: Prompt, sampling: Any) -> None:
    """As many rollouts as requested, each with one log-probability, version and mask per term."""
    engine = await _fresh(make)
    text, rollouts = await engine.generate(prompt, num_samples=3, sampling=sampling, seed=1)
    await engine.close()
    assert isinstance(text, str)
    assert len(rollouts) == 3
    for rollout in rollouts:
        terms = rollout.num_terms
        assert terms >= 1
        assert not isinstance(sampling, Sampling) or terms <= sampling.max_terms
        assert rollout.rollout_logprobs.shape == rollout.versions.shape == rollout.loss_mask.shape == (terms,)
        assert rollout.rollout_logprobs.dtype == np.float32
        assert not isinstance(sampling, Sampling) or np.all(rollout.rollout_logprobs <= 1e-6)  # of tokens, no densities
        assert np.all(rollout.versions == engine.version)


async def is_seeded(make: MakeEngine, prompt: Prompt, sampling: Any) -> None:
    """The same seed gives the same rollouts; samples of one request differ from one another somewhere."""
    engine = await _fresh(make)
    _, first = await engine.generate(prompt, num_samples=8, sampling=sampling, seed=1)
    _, again = await engine.generate(prompt, num_samples=8, sampling=sampling, seed=1)
    _, other = await engine.generate(prompt, num_samples=8, sampling=sampling, seed=2)
    await engine.close()
    assert [_terms(r) for r in first] == [_terms(r) for r in again]
    assert [_terms(r) for r in first] != [_terms(r) for r in other]
    assert len({_terms(r) for r in first}) > 1


async def is_greedy_at_zero(make: MakeEngine, prompt: Prompt, sampling: Any) -> None:
    """Temperature 0 has one answer, whatever the seed."""
    if not isinstance(sampling, Sampling):
        return
    engine = await _fresh(make)
    greedy = replace(sampling, temperature=0.0)
    answers = [await engine.generate(prompt, num_samples=2, sampling=greedy, seed=seed) for seed in (1, 2)]
    await engine.close()
    assert len({_terms(r) for _, rollouts in answers for r in rollouts}) == 1


async def switches_between_terms(make: MakeEngine, prompt: Prompt, sampling: Any) -> None:
    """A new version is applied once, and all later requests are sampled with it."""
    engine = await _fresh(make)
    applied: list[int] = []
    running = asyncio.create_task(engine.generate(prompt, num_samples=4, sampling=sampling, seed=1))
    await asyncio.sleep(0)
    await engine.switch(7, lambda: applied.append(7))
    assert applied == [7]
    assert engine.version == 7
    _, before = await running
    _, after = await engine.generate(prompt, num_samples=1, sampling=sampling, seed=1)
    await engine.close()
    assert all(np.all(np.diff(rollout.versions) >= 0) for rollout in before)
    assert np.all(after[0].versions == 7)


async def waits_after_half_a_switch(make: MakeEngine, prompt: Prompt, sampling: Any) -> None:
    """If the publisher is lost while weights are applied, no term is sampled until the next version is applied."""

    def lose_publisher() -> None:
        raise ConnectionError("the publisher is gone")

    engine = await _fresh(make)
    try:
        await engine.switch(1, lose_publisher)
        raise AssertionError("the switch did not raise the ConnectionError")
    except ConnectionError:
        start = engine.progress
    running = asyncio.create_task(engine.generate(prompt, num_samples=2, sampling=sampling, seed=1))
    await asyncio.wait([running], timeout=_SETTLED_S)
    assert not running.done()
    assert engine.progress == start
    await engine.switch(2, lambda: None)
    _, rollouts = await running
    await engine.close()
    assert all(np.all(rollout.versions == 2) for rollout in rollouts)


async def ends_when_cancelled(make: MakeEngine, prompt: Prompt, sampling: Any) -> None:
    """A cancelled request ends, and the engine serves the next."""
    engine = await _fresh(make)
    running = asyncio.create_task(engine.generate(prompt, num_samples=4, sampling=sampling, seed=1))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    _, rollouts = await engine.generate(prompt, num_samples=1, sampling=sampling, seed=1)
    await engine.close()
    assert len(rollouts) == 1


async def counts_its_work(make: MakeEngine, prompt: Prompt, sampling: Any) -> None:
    """`progress` grows with work and only with work."""
    engine = await _fresh(make)
    start = engine.progress
    await engine.generate(prompt, num_samples=1, sampling=sampling, seed=1)
    grown = engine.progress
    await engine.close()
    assert grown > start


async def wakes_as_it_was(make: MakeEngine, prompt: Prompt, sampling: Any) -> None:
    """An engine that can sleep answers after it wakes as before, keeps its version, and takes new weights."""
    engine = await _fresh(make)
    if isinstance(engine, Sleeps):
        await engine.sleep()
        await engine.wake()
        _, before = await engine.generate(prompt, num_samples=3, sampling=sampling, seed=1)
        version = engine.version
        await engine.sleep()
        assert engine.version == version
        await engine.wake()
        _, after = await engine.generate(prompt, num_samples=3, sampling=sampling, seed=1)
        assert [_terms(r) for r in before] == [_terms(r) for r in after]
        await engine.switch(version + 1, lambda: None)
        _, later = await engine.generate(prompt, num_samples=1, sampling=sampling, seed=1)
        assert np.all(later[0].versions == version + 1)
    await engine.close()


ENGINE_CHECKS: Sequence[EngineCheck] = (
    returns_whole_rollouts,
    is_seeded,
    is_greedy_at_zero,
    wakes_as_it_was,
    switches_between_terms,
    waits_after_half_a_switch,
    ends_when_cancelled,
    counts_its_work,
)


async def check_reward(reward: RewardFn, group: RolloutGroup) -> None:
    """The reward passes the rubric's checks, does not change the group, and gives the same values twice."""
    rubric = Rubric([WeightedReward(name="reward", weight=1.0, function=reward)])
    first, again = await rubric.score(group), await rubric.score(group)
    rubric.close()
    values = [rollout.reward for rollout in first.rollouts]
    assert all(math.isfinite(value) for value in values)
    assert values == [rollout.reward for rollout in again.rollouts]


def check_launcher(
    launcher: Launcher, run: ClusterRun, *, start: Callable[[], Sequence[str]], until: Until, now: bool = False
) -> None:
    """The plan has each replica; a run is started once, scaled up and down, and stopped.

    run: with two rollout replicas and no end of its own. start: launches it. now: how it is stopped.
    """

    def rollouts() -> list[str]:
        return [name for name in launcher.alive(run) if name.startswith("rollout-")]

    plan = launcher.plan(run)
    assert [replica.name for replica in (*run.policies(), *run.rollouts()) if replica.name not in plan] == []
    assert launcher.alive(run) == {}
    assert len(start()) >= 1
    until(lambda: len(rollouts()) == 2, "two rollouts")
    refused(start, because=str(run.directory))
    assert launcher.scale(run, {"rollout": 2}) == []
    assert len(launcher.scale(run, {"rollout": 3})) >= 1
    until(lambda: sorted(rollouts()) == ["rollout-0", "rollout-1", "rollout-2"], "three rollouts")
    assert len(launcher.scale(run, {"rollout": 1})) >= 2
    assert len(launcher.scale(run, {"rollout": 3})) >= 2, "rollouts that are leaving were counted"
    until(lambda: len(rollouts()) == 3, "three rollouts again")
    assert len(launcher.scale(run, {"rollout": 1})) >= 2
    until(lambda: len(rollouts()) == 1, "one rollout")
    assert len(launcher.stop(run, now=now)) >= 1
    until(lambda: launcher.alive(run) == {}, "the end of the run")
    assert launcher.stop(run, now=now) == []


def refused(call: Callable[[], object], *, because: str) -> None:
    """The call raises UserError with this text."""
    try:
        call()
    except UserError as error:
        assert because in str(error), error
        return
    raise AssertionError("it was not refused")


async def _fresh(make: MakeEngine) -> RolloutEngine:
    engine = make()
    await engine.switch(0, lambda: None)
    return engine


def _terms(rollout: Rollout) -> tuple[bytes, ...]:
    """The sampled terms and their log-probabilities, comparable."""
    arrays = [np.ascontiguousarray(rollout.arrays[name]).tobytes() for name in sorted(rollout.arrays)]
    return (*arrays, rollout.rollout_logprobs.tobytes())
