"""The torch engine and the shipped rewards keep the promises of their interfaces."""

import asyncio

import numpy as np
import pytest
from tiny_engine import PROMPT, make_engine

from cosmos_rl_core.testing.conformance import ENGINE_CHECKS, check_reward
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup, Sampling
from cosmos_rl_llm.domain import LLM


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_torch_engine(check):
    asyncio.run(check(make_engine, PROMPT, Sampling(max_terms=12)))


@pytest.mark.parametrize("name", ["math", "boxed", "numeric", "exact", "length"])
def test_a_shipped_reward(name):
    texts = ["the answer is 12", "\\boxed{12}", "12", "none"]
    rollouts = tuple(
        Rollout(
            arrays={"tokens": np.arange(3, dtype=np.int32)},
            rollout_logprobs=np.zeros(3, np.float32),
            versions=np.zeros(3, np.int32),
            loss_mask=np.ones(3, np.bool_),
            text=text,
        )
        for text in texts
    )
    options = {"max_tokens": 8} if name == "length" else {}
    group = RolloutGroup(prompt=Prompt(sample_id=0, row={"prompt": "6+6", "answer": "12"}), rollouts=rollouts)
    asyncio.run(check_reward(LLM.reward(name)(**options), group))
