"""Every built-in reward on generated responses: loops, nested marks, 100 kB, all of Unicode; each call is bounded."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_llm.rewards import REWARDS
from cosmos_rl_llm.rewards.math import COMPARISON_S

LONGEST = 100_000
LATEX = r"\boxed{ \frac{ \text{ { } $ ^ _ \binom{5}{2} \sum_{i=1}^{n} \int \lim 9^{9^9} (x+1)^{999} 99! % \ 1,000 1e9"
WORDS = "#### answer is : ( [ ] ) , / - + * ! = < > 1 2 9 0 . A B C or and the Paris [1,2,3,4] (5,6)"
THOUGHTS = "<think> </think> <answer> </answer> [THINK] [/THINK]"
OTHERS = [
    "\n",
    "\t",
    " ",
    'x="3" y="4"',
    "\N{MINUS SIGN}",
    "\N{FULLWIDTH DIGIT ONE}",
    "½",
    "\N{COMBINING ACUTE ACCENT}",
]
MARKS = [*LATEX.split(), *WORDS.split(), *THOUGHTS.split(), *OTHERS]
REFERENCES = ["42", "\\frac{1}{2}", "x^2+1", "B", "Paris", "1 2"]
OPTIONS = {"length": {"max_tokens": 5}}
OF_PROCESSES = {"code", "judge", "reward_model"}
"""Rewards that run programs or models."""
BOUND_S = 1.0
"""Time of the processor for one response, beside the comparison's own."""


def response(rng: random.Random) -> str:
    """A response of one kind: marks at random, one part again and again, any characters."""
    size = rng.choice([3, 30, 300]) if rng.random() < 0.97 else LONGEST
    kind = rng.random()
    if kind < 0.4:
        parts = [rng.choice(MARKS) for _ in range(min(size, 3000))]
    elif kind < 0.8:  # a loop, and something else at its end
        loop = "".join(rng.choices(MARKS, k=rng.randint(1, 4)))
        parts = [loop * (size // len(loop) + 1), "".join(rng.choices(MARKS, k=rng.randint(0, 3)))]
    else:
        codes = [rng.choice([rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])]
        parts = [chr(rng.choice([*codes, rng.randrange(0xD800)])) for _ in range(size)]
    text = "".join(parts)[:LONGEST]
    return rng.choice([text, text, f"\\boxed{{{text[: rng.choice([10, 100, 3000])]}}}", f"<answer>{text}</answer>"])


def group(rng: random.Random) -> RolloutGroup:
    empty = np.zeros(4, np.float32)
    rollout = Rollout(
        arrays={}, rollout_logprobs=empty, versions=empty.astype(np.int32), loss_mask=empty > 0, text=response(rng)
    )
    row = {"answer": rng.choice(REFERENCES), "boxes": [[1, 2, 3, 4]], "point": [1, 2]}
    prompt_text = rng.choice(["", "6 * 7?\n<think>\n"])
    return RolloutGroup(prompt=Prompt(sample_id=0, row=row), rollouts=(rollout,), prompt_text=prompt_text)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(set(REWARDS) - OF_PROCESSES))
@pytest.mark.parametrize("number", [60, pytest.param(10_000, marks=pytest.mark.slow)], ids=["few", "ten thousand"])
def test_every_call_of_a_reward_is_bounded(name, number):
    rng = random.Random(name)
    reward = REWARDS[name](**OPTIONS.get(name, {}))
    for i in range(number):
        given = group(rng)
        if name == "numeric":
            given = replace(given, prompt=replace(given.prompt, row={"answer": "42"}))
        if name == "multiple_choice":
            given = replace(given, prompt=replace(given.prompt, row={"answer": "B"}))
        start = time.process_time()
        (value,) = reward(given)
        took = time.process_time() - start
        assert 0 <= value <= 1
        assert took < BOUND_S + COMPARISON_S, f"response {i} took {took:.2f} s: {given.rollouts[0].text[:300]!r}"


PATTERNS = [
    "^<think>.*?</think>.*<answer>.*</answer>$",
    "(a+)+$",
    "(.*)*</answer>",
    "(?s)<think>(?:(?!<think>).)*</think>",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_search_by_any_pattern_is_bounded(pattern):
    rng = random.Random(pattern)
    reward = REWARDS["format"](pattern=pattern)
    for _ in range(3):
        given = group(rng)
        start = time.process_time()
        reward(given)
        assert time.process_time() - start < 2 * COMPARISON_S + BOUND_S  # with and without the mark of the prompt
