import itertools
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from math_verify import parse, verify
from pydantic import ValidationError

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_llm.domain import LLM
from cosmos_rl_llm.rewards import REWARDS
from cosmos_rl_llm.rewards.math import (
    equivalent,
    final_answer,
    last_boxed,
)
from cosmos_rl_llm.rewards.numbers import as_number, last_number
from cosmos_rl_llm.rewards.rules import FormatReward


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
        ("2 of 1e5", "1e5"),
        ("x = \N{MINUS SIGN}5", "-5"),
        ("$x = 2\\frac{1}{2}$", "2\\frac{1}{2}"),
        ("it is 2 1/2.", "2 1/2"),
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
        ("1.5 \\times 10^{3}", Fraction(1500)),
        ("2\\frac{1}{2}", Fraction(5, 2)),
        ("-2 1/2", Fraction(-5, 2)),
        ("\\frac12", Fraction(1, 2)),
        ("\N{MINUS SIGN}5", Fraction(-5)),
        ("1\\,000", Fraction(1000)),
        ("1 2", None),
        ("1/0", None),
        ("1e999999999", None),
        ("9" * 5000, None),
        ("x", None),
        ("", None),
    ],
)
def test_as_number(text, number):
    found = as_number(text)
    assert (found and found.value) == number


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


# The signal may arrive while the finaliser of another test's object runs. Python drops its exception there; the
# signal is then sent again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("bomb", ["9^{9^{9^9}}", "(9!)!", "(1+x+x^2)^{3000}-1", "\\binom{10^9}{10^8}"])
def test_an_expression_without_a_value_is_another_answer(bomb, monkeypatch):
    monkeypatch.setattr("cosmos_rl_llm.rewards.math.COMPARISON_S", 0.3)
    start = time.process_time()
    assert score("math", "72x", f"\\boxed{{{bomb}}}") == 0
    assert time.process_time() - start < 2.5  # parsing is math-verify's import, too
    assert equivalent("x+1", "1+x")


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("2\\frac{1}{2}", "5/2"),
        ("2\\frac{1}{2}", "2.5"),
        ("50%", "0.5"),
        ("50\\%", "50"),
        ("50\\%", "\\frac12"),
        ("ba", "ab"),
        ("3yx", "3xy"),
        ("cd-ab", "-ba+cd"),
        ("\\binom{5}{2}", "10"),
        ("10", "\\binom{5}{2}"),
        ("\\sum_{i=1}^{10} i", "55"),
        ("\N{MINUS SIGN}5", "-5"),
        ("1e5", "100000"),
        ("10^5", "1e5"),
        ("1\\,000", "1000"),
    ],
)
def test_answers_that_mean_the_same(answer, reference):
    assert equivalent(answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("2\\frac{1}{2}", "21/2"),
        ("12", "1 2"),
        ("1 2", "12"),
        ("1000001", "1000000"),
        ("12345678.5", "12345678.4"),
        ("evil", "live"),
        ("Ab", "xy"),
    ],
)
def test_answers_that_look_alike(answer, reference):
    assert not equivalent(answer, reference)


def test_a_tolerance_joins_numbers():
    assert not equivalent("3.15", "3.14")
    assert equivalent("3.15", "3.14", tolerance=0.01)
    assert equivalent("101", "100", tolerance=0.01)
    assert not equivalent("103", "100", tolerance=0.01)


NOTATIONS = ["{n}", "{n}.0", "+{n}", "{n}/1", "{m}/2", "\\frac{{{m}}}{{2}}", "{n}%", "{m}\\frac{{1}}{{2}}", "({n})"]
TEXTS = ["xy", "yx", "x+1", "1+x", "x=7", "\\{7,0\\}", "0,7"]


def test_no_verdict_differs_from_math_verify_alone():
    """500 pairs: what is compared before the library agrees with it."""
    texts = [*TEXTS, *(each.format(n=n, m=2 * n) for n in (0, 7) for each in NOTATIONS)]
    pairs = [(answer, reference) for answer in texts for reference in texts if answer != reference][:500]
    assert len(pairs) == 500
    parsed = {text: parse(f"${text}$") for text in texts}
    alone = {(a, b): verify(parsed[b], parsed[a]) for a, b in pairs}
    assert {pair: equivalent(*pair) for pair in pairs} == alone
    assert 20 < sum(alone.values()) < 480


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
    assert score("numeric", "1000000", "1000001") == 0
    assert score("numeric", "1/3", "0.3333333") == 1
    assert score("numeric", "50%", "half of it, 0.5") == score("numeric", "50", "50%") == 1
    assert score("numeric", "100000", "it is 1e5") == score("numeric", "-5", "\N{MINUS SIGN}5") == 1


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


MARKS = ["<think>", "</think>", "<answer>", "</answer>", " ", "x"]


def test_the_default_format_is_its_pattern_in_linear_time():
    pattern = re.compile(FormatReward().pattern, re.DOTALL)
    for parts in itertools.product(MARKS, repeat=5):
        text = "".join(parts)
        assert score("format", None, text) == bool(pattern.search(text.strip()))
        assert score("format", None, text, whole=True) == bool(pattern.fullmatch(text.strip()))


def test_a_search_that_does_not_end_is_no_match(monkeypatch):
    monkeypatch.setattr("cosmos_rl_llm.rewards.rules._SEARCH_S", 0.2)
    assert score("format", None, "a" * 60 + "b", pattern="(a+)+$") == 0
    assert score("format", None, "a" * 60, pattern="(a+)+$") == 1


def in_thought(name: str, answer: str | None, text: str, **options) -> float:
    """Score a response to a prompt that opens the thought."""
    (value,) = REWARDS[name](**options)(replace(make_group(answer, text), prompt_text="6 * 7?\n<think>\n"))
    return value


def test_a_box_in_a_thought_that_was_cut_counts_for_nothing():
    cut = "<think>perhaps \\boxed{42}, no"
    for name in ("math", "boxed"):
        assert score(name, "42", cut) == 0
        assert in_thought(name, "42", "perhaps \\boxed{42}, no") == 0
        assert in_thought(name, "42", "perhaps \\boxed{41}, no</think>\\boxed{42}") == 1
        assert score(name, "42", "\\boxed{42}" + cut) == 1
    assert score("numeric", "42", "[THINK]42") == 0
    assert in_thought("numeric", "42", "41</think> 42") == 1
    assert score("math", "42", "<think>\\boxed{41}?</think> The answer is 42.") == 1


def test_a_prompt_may_open_the_thought():
    text = "6 * 7 is 42</think> <answer>42</answer>"
    assert score("format", None, text) == 0
    assert in_thought("format", None, text) == in_thought("format", None, text, whole=True) == 1
    assert in_thought("format", None, text, pattern="^.*</think> <answer>.*</answer>$") == 1
    assert in_thought("format", None, f"<think>{text}") == 1
    assert in_thought("multiple_choice", "B", "A? C is wrong.</think> B") == 1
    assert in_thought("multiple_choice", "B", "B") == 0  # the thought was cut


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
