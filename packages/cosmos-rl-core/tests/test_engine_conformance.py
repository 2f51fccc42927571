"""The tiny engine keeps the promises of every rollout engine; so do the shipped rewards of the tiny task."""

import asyncio

import pytest

from cosmos_rl_core.testing.conformance import ENGINE_CHECKS, check_reward
from cosmos_rl_core.testing.tiny import TINY
from cosmos_rl_core.testing.tiny_task import TinyData, TinyModel
from cosmos_rl_core.types import Prompt, RolloutGroup, Sampling

PROMPT = Prompt(sample_id=0, row={"context": 2})
SAMPLING = Sampling(max_terms=6)


def make_engine():
    return TINY.build_engine(TinyModel(), data=TinyData(), name="tiny", options={})


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_tiny_engine(check):
    asyncio.run(check(make_engine, PROMPT, SAMPLING))


def test_the_tiny_reward():
    async def go():
        _, rollouts = await make_engine().generate(PROMPT, num_samples=4, sampling=SAMPLING, seed=0)
        await check_reward(TINY.reward("hits")(), RolloutGroup(prompt=PROMPT, rollouts=tuple(rollouts)))

    asyncio.run(go())
