"""Rewards: added up by weight, and never a number where the function failed."""

import asyncio
import math
import threading
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from cosmos_rl_core.errors import MediaError, SampleError
from cosmos_rl_core.reward.rubric import Rubric, WeightedReward
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup


def rollout(text):
    return Rollout(
        arrays={},
        rollout_logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
        loss_mask=np.ones(2, np.bool_),
        text=text,
    )


GROUP = RolloutGroup(
    prompt=Prompt(sample_id=9, row={}, origin="train.jsonl:4"), rollouts=(rollout("a"), rollout("bbb"))
)


def length(group):
    return [len(r.text) for r in group.rollouts]


def constant(value, group):
    return [value] * len(group.rollouts)


def score(*rewards, group=GROUP, **keys):
    """Score with (name, weight, function) triples."""
    rubric = Rubric([WeightedReward(name=n, weight=w, function=f) for n, w, f in rewards], **keys)
    try:
        return asyncio.run(rubric.score(group)).rollouts
    finally:
        rubric.close()


def refusal(function, **keys):
    """Why a reward's result is refused."""
    with pytest.raises(SampleError) as caught:
        score(("length", 1.0, length), ("judge", 1.0, function), **keys)
    return caught.value


def test_rewards_are_added_by_weight_and_kept_apart():
    first, second = score(("length", 0.5, length), ("bonus", 2.0, partial(constant, 1)))
    assert (first.reward, first.reward_breakdown) == (2.5, {"length": 1.0, "bonus": 1.0})
    assert (second.reward, second.reward_breakdown) == (3.5, {"length": 3.0, "bonus": 1.0})


def test_weight_zero_records_without_adding():
    _, second = score(("length", 0.0, length), ("bonus", 1.0, partial(constant, 0.25)))
    assert (second.reward, second.reward_breakdown["length"]) == (0.25, 3.0)


def test_nothing_else_of_the_group_changes():
    before, after = GROUP.rollouts, score(("length", 1.0, length))
    assert [(r.text, r.advantage, r.finish_reason) for r in after] == [(r.text, 0.0, "stop") for r in before]


async def judge(group, *, bonus=0):
    await asyncio.sleep(0)
    return [value + bonus for value in length(group)]


class Judge:
    async def __call__(self, group):
        return await judge(group)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(judge, [1, 3]), (partial(judge, bonus=1), [2, 4]), (Judge(), [1, 3])],
    ids=["function", "with options", "object"],
)
def test_async_rewards_are_awaited(function, expected):
    assert [r.reward for r in score(("judge", 1.0, function))] == expected


def test_plain_functions_run_beside_the_loop_and_async_ones_on_it():
    threads = {}

    def plain(group):
        threads["plain"] = threading.current_thread()
        return length(group)

    async def on_loop(group):
        threads["async"] = threading.current_thread()
        return length(group)

    score(("plain", 1.0, plain), ("async", 1.0, on_loop))
    assert threads["plain"].name.startswith("reward")
    assert threads["async"] is threading.current_thread()


@pytest.mark.parametrize(
    "values",
    [(1, 3.5), np.array([1, 3.5]), torch.tensor([1, 3.5]), [np.float32(1), torch.tensor(3.5)], [True, Fraction(7, 2)]],
    ids=["tuple", "numpy", "torch", "scalars", "numbers"],
)
def test_any_vector_of_numbers_is_taken(values):
    breakdown = [r.reward_breakdown["judge"] for r in score(("judge", 1.0, lambda group: values))]
    assert breakdown == [1.0, 3.5]
    assert all(type(value) is float for value in breakdown)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([1.0, math.nan], "returned nan for rollout 1"),
        ([-math.inf, 1.0], "returned -inf for rollout 0"),
        (np.array([0.0, np.nan]), "nan"),
        (["good", "bad"], "returned 'good' for rollout 0"),
        (["1.0", "2.0"], "returned '1.0' for rollout 0"),
        ([1.0, None], "returned None for rollout 1"),
        ([1.0, 1j], "returned 1j for rollout 1"),
        ([1.0, 10**400], "for rollout 1"),
        ([torch.zeros(2), torch.zeros(2)], "for rollout 0"),
        ([1.0], "returned 1 values for 2 rollouts"),
        (torch.ones(3), "returned 3 values for 2 rollouts"),
        (np.ones((2, 1)), "returned ndarray"),
        ("ok", "returned str"),
        (b"ok", "returned bytes"),
        (None, "returned NoneType"),
        (0.5, "returned float"),
        ({0: 1.0, 1: 2.0}, "returned dict"),
    ],
)
def test_what_is_no_vector_of_finite_numbers_is_an_error_of_the_sample(values, why):
    error = refusal(lambda group: values)
    assert error.reason.startswith("reward 'judge' on train.jsonl:4 returned")
    assert why in error.reason
    assert error.final


def test_a_weighted_sum_that_overflows_is_an_error_of_the_sample():
    with pytest.raises(SampleError, match=r"the rewards of train.jsonl:4 add up to -inf"):
        score(("penalty", 10.0, partial(constant, -1e308)))
    with pytest.raises(SampleError, match=r"the rewards of train.jsonl:4 add up to inf"):
        score(("a", 1.0, partial(constant, 1e308)), ("b", 1.0, partial(constant, 1e308)))


def broken(group):
    raise KeyError("answer")


async def broken_later(group):
    await asyncio.sleep(0)
    raise KeyError("answer")


@pytest.mark.parametrize("function", [broken, broken_later])
def test_a_function_that_raises_is_named_with_its_row_and_error(function):
    error = refusal(function)
    assert error.reason == "reward 'judge' on train.jsonl:4 raised KeyError: 'answer'"
    assert error.final


def test_stop_iteration_is_reported_like_any_error():
    error = refusal(lambda group: [next(iter(())) for _ in group.rollouts], timeout_s=5.0)
    assert "raised RuntimeError: StopIteration" in error.reason


def test_a_row_without_origin_is_named_by_its_sample():
    group = RolloutGroup(prompt=Prompt(sample_id=9, row={}), rollouts=GROUP.rollouts)
    assert refusal(broken, group=group).reason.startswith("reward 'judge' on sample 9 raised")


def test_a_slow_async_function_is_given_up_and_worth_another_attempt():
    async def slow(group):
        await asyncio.Event().wait()

    error = refusal(slow, timeout_s=0.02)
    assert error.reason == "reward 'judge' on train.jsonl:4 took longer than [reward] timeout_s = 0.02"
    assert not error.final


def test_a_slow_plain_function_is_given_up():
    release = threading.Event()

    def slow(group):
        release.wait(10.0)
        return length(group)

    async def go():
        rubric = Rubric([WeightedReward(name="judge", weight=1.0, function=slow)], timeout_s=0.02)
        try:
            with pytest.raises(SampleError, match="took longer than"):
                await rubric.score(GROUP)
        finally:
            release.set()
            rubric.close()

    asyncio.run(go())


def test_a_function_that_never_returns_delays_no_other_call():
    release = threading.Event()

    def hangs(group):
        if group.prompt.sample_id == 9:
            release.wait(30.0)
        return length(group)

    async def go():
        rubric = Rubric([WeightedReward(name="judge", weight=1.0, function=hangs)], timeout_s=0.2, threads=1)
        other = replace(GROUP, prompt=Prompt(sample_id=1, row={}))
        try:
            first, *others = await asyncio.gather(
                *(rubric.score(group) for group in (GROUP, *3 * [other])), return_exceptions=True
            )
            assert "took longer than" in str(first)
            assert [[one.reward for one in group.rollouts] for group in others] == 3 * [[1.0, 3.0]]
        finally:
            release.set()
            rubric.close()

    asyncio.run(go())


def test_a_call_that_does_not_return_is_reported_before_its_limit():
    reports, reported = [], threading.Event()

    def report(complaint, detail):
        reports.append((complaint, detail))
        reported.set()

    def slow(group):
        assert reported.wait(30)
        return length(group)

    score(("judge", 1.0, slow), report=report, slow_s=0.01)
    assert reports[-1] == (
        "reward 'judge' is slow or hangs: [reward] timeout_s = 60 ends a call",
        "; 0 s so far on train.jsonl:4",
    )


def test_a_call_that_takes_as_long_as_earlier_ones_is_not_reported():
    reports, lengths = [], iter([1.0, 0.2])

    async def judge(group):
        await asyncio.sleep(next(lengths))
        return length(group)

    async def main():
        rewards = [WeightedReward(name="judge", weight=1.0, function=judge)]
        rubric = Rubric(rewards, report=lambda *texts: reports.append(texts), slow_s=0.1)
        for _ in range(2):
            await rubric.score(GROUP)
            assert len(reports) == 1
        rubric.close()

    asyncio.run(main())


def test_a_timeout_of_the_functions_own_is_not_taken_for_ours():
    async def asks_a_server(group):
        raise TimeoutError("no answer from the judge")

    assert "raised TimeoutError: no answer from the judge" in refusal(asks_a_server).reason


@pytest.mark.parametrize("final", [True, False])
def test_a_picture_that_cannot_be_fetched_now_is_tried_again(final):
    def read(group):
        raise MediaError("https://a.org/b.png: 503 Service Unavailable", final=final)

    assert refusal(read).final is final
