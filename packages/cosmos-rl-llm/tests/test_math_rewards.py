import logging
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from pydantic import ValidationError

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.rewards import REWARDS
from cosmos_rl_llm.rewards.math import (
    as_number,
    equivalent,
    final_answer,
    is_costly,
    last_boxed,
    last_number,
)


def make_group(answer: str | None, *texts: str, num_terms: int = 4) -> RolloutGroup:
    row = {} if answer is None else {"answer": answer}
    rollouts = [
        Rollout(
            arrays={},
            rollout_logprobs=np.zeros(num_terms, np.float32),
            versions=np.zeros(num_terms, np.int32),
            loss_mask=np.ones(num_terms, bool),
            text=text,
        )
        for text in texts
    ]
    return RolloutGroup(prompt=Prompt(sample_id=0, row=row), rollouts=tuple(rollouts))


def score(name: str, answer: str | None, text: str, **options) -> float:
    (value,) = REWARDS[name](**options)(make_group(answer, text))
    return value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 48 + 24 = 72", "72"),
        ("It costs $1,234.50.", "$1,234.50"),
        ("x = -5", "-5"),
        ("10-3", "3"),
        ("about 3/4 of it", "3/4"),
        ("1,2", "2"),
        ("none", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.50", Fraction(2469, 2)),
        ("$20", Fraction(20)),
        ("\\$20.", Fraction(20)),
        ("50\\%", Fraction(50)),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("1{,}000", Fraction(1000)),
        ("1e3", Fraction(1000)),
        ("1/0", None),
        ("1e999999999", None),
        ("9" * 5000, None),
        ("x", None),
        ("", None),
    ],
)
def test_as_number(text, number):
    assert as_number(text) == number


def test_last_boxed_matches_braces_and_skips_unclosed_boxes():
    assert last_boxed("\\boxed{1} and \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{3} then \\boxed{4") == "3"
    assert last_boxed("nothing") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5 steps \\boxed{7} in 3 days", "7"),
        ("first 1\n#### 72\n", "72"),
        ("The answer is 12.", "12"),
        ("The answer is $x+1$, found in 2 ways.", "x+1"),
        ("thus $y=2$ and $x=3$", "x=3"),
        ("we get 5", "5"),
        ("no idea", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("72.0", "72"),
        ("\\frac{1}{2}", "0.5"),
        ("(x+1)^2", "x^2+2x+1"),
        ("2\\sqrt{2}", "\\sqrt{8}"),
        ("\\{2,1\\}", "\\{1,2\\}"),
        ("\\text{Paris}", "paris"),
    ],
)
def test_equal_answers(answer, reference):
    assert equivalent(answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [("73", "72"), ("x+1", "x+2"), ("silent", "listen"), ("", "1"), ("\\frac{", "0.5")],
)
def test_unequal_answers(answer, reference):
    assert not equivalent(answer, reference)


@pytest.mark.parametrize(
    "bomb",
    ["9^{9^{9^9}}", "2^{1000000000}", "(9!)!", "99999!", "\\sum_{i=1}^{10} i", "x+" * 200, "2**10**10"],
)
def test_expressions_that_could_run_for_long_are_refused_at_once(bomb):
    start = time.monotonic()
    assert is_costly(bomb)
    assert score("math", "72x", f"\\boxed{{{bomb}}}") == 0
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    "answer",
    [
        "x^2+2x+1",
        "\\frac{a^2}{b^3}",
        "2^{10}",
        "x^{2}y^{3}",
        "(x^2+1)^3",
        "x^{\\frac{1}{2}}",
        "5!",
        "(x+1)(x-2)",
    ],
)
def test_ordinary_expressions_are_not_costly(answer):
    assert not is_costly(answer)


def test_math_reward_works_in_a_worker_thread_and_says_nothing(caplog):
    group = make_group("x^2+2x+1", "\\boxed{(x+1)^2}", "\\boxed{x^2}", "The answer is $1+2x+x^2$.")
    with caplog.at_level(logging.DEBUG), ThreadPoolExecutor(1) as pool:
        assert pool.submit(REWARDS["math"](), group).result() == [1, 0, 1]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_whole_solution_may_be_the_reference():
    assert score("math", "6 * 7 = 42\n#### 42", "The answer is 42.") == 1
    assert score("numeric", "so it is \\boxed{42}", "6 * 7 = 42") == 1


def test_boxed_reward_wants_a_box():
    assert score("boxed", "72", "\\boxed{72}") == 1
    assert score("boxed", "72", "The answer is 72.") == 0


def test_numeric_reward_takes_the_last_number():
    assert score("numeric", "1,000", "7 days, so $1000.00.") == 1
    assert score("numeric", "1000", "1000 in 7 days") == 0
    assert score("numeric", "3.14", "3.15", tolerance=0.01) == 1
    assert score("numeric", "72", "no number") == 0


def test_numeric_reward_wants_a_numeric_reference():
    with pytest.raises(UserError, match=r"'Paris' is not a number; see data.answer_pattern"):
        score("numeric", "Paris", "1")


@pytest.mark.parametrize("name", ["math", "boxed", "numeric", "exact"])
def test_a_missing_reference_is_an_error_and_no_number(name):
    with pytest.raises(UserError, match=r"data.answer_column"):
        score(name, None, "1")


def test_exact_reward():
    assert score("exact", "blue  whale", " blue whale\n") == 1
    assert score("exact", "blue whale", "Blue whale") == 0
    assert score("exact", "blue whale", "Blue whale", ignore_case=True) == 1


def test_format_reward():
    text = "<think>a\nb</think> <answer>1</answer>"
    assert score("format", None, text, pattern="<think>.*</think>") == 1
    assert score("format", None, text, pattern="<think>.*</think>", whole=True) == 0
    with pytest.raises(ValidationError, match="not a regular expression"):
        REWARDS["format"](pattern="(")


@pytest.mark.parametrize(("num_terms", "value"), [(0, 0.5), (5, 1), (10, 1), (12, 0.8), (20, 0), (50, 0)])
def test_length_reward_falls_along_a_line(num_terms, value):
    reward = REWARDS["length"](min_tokens=5, max_tokens=10, slack_tokens=10)
    assert reward(make_group(None, "", num_terms=num_terms)) == pytest.approx([value])


def test_length_reward_wants_a_range():
    with pytest.raises(ValidationError, match="above max_tokens"):
        REWARDS["length"](min_tokens=11, max_tokens=10)


def test_the_domain_hands_out_rewards_by_name():
    reward = LLM.reward("numeric")
    assert reward is not None
    assert reward(tolerance=0.5)(make_group("10", "10.4")) == [1]
    assert LLM.reward("nmeric") is None


def test_an_unknown_option_is_an_error():
    with pytest.raises(ValidationError, match="tolerence"):
        REWARDS["numeric"](tolerence=0.1)
