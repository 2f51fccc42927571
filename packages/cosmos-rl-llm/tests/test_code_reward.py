"""The reward `code`: the program of a response, the tests of a row, verdicts and their fraction."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.reward.rubric import Rubric, WeightedReward
from cosmos_rl_core.reward.specimen import text_specimen
from cosmos_rl_llm.rewards.code import CodeReward, CodeTest, last_block, read_tests
from cosmos_rl_llm.sandbox.sandbox import Sandbox, SandboxOptions

OPTIONS = SandboxOptions(timeout_s=30.0)
DOUBLE = "```python\ndef f(x):\n    return 2 * x\n```"


@pytest.fixture(autouse=True)
def protected_machine():
    bad = [line for line in Sandbox(SandboxOptions(unprotected=True)).started().checks() if line.level == "bad"]
    if bad:
        pytest.skip(f"the sandbox cannot protect this machine: {bad}")


def group(*texts, **row):
    return text_specimen({"prompt": "Double x.", **row}, texts=texts, origin="rows.jsonl:1", arrays={})


def scores(reward, *texts, **row):
    return asyncio.run(reward(group(*texts, **row)))


def test_the_fraction_of_passed_tests():
    tests = ["assert f(2) == 4", "assert f(0) == 0", "assert f(-1) == 1", "assert f('a') == 'aa'"]
    answers = [DOUBLE, "```\nf = abs\n```", "no program", "```\ndef f(x): return x / 0\n```"]
    assert scores(CodeReward(sandbox=OPTIONS), *answers, tests=tests) == [0.75, 0.5, 0.0, 0.0]
    assert scores(CodeReward(sandbox=OPTIONS, score="all"), *answers, tests=tests) == [0.0, 0.0, 0.0, 0.0]
    assert scores(CodeReward(sandbox=OPTIONS, score="all"), *answers, tests=tests[1:2]) == [1.0, 1.0, 0.0, 0.0]


def test_programs_that_read_and_print():
    tests = [{"input": "2\n", "output": "4"}, {"input": "-3\n", "output": "-6\n\n"}, {"input": "", "output": "0"}]
    answers = [
        "```py\nprint(int(input()) * 2)  \n```",
        "```py\nprint(4)\n```",
        "```py\nprint(4)\nraise SystemExit(1)\n```",
    ]
    values = scores(CodeReward(sandbox=OPTIONS, tests_column="cases"), *answers, cases=json.dumps(tests))
    assert values == [pytest.approx(2 / 3), pytest.approx(1 / 3), 0.0]


def test_each_verdict():
    programs = {
        "passed": "def f(x): return 2 * x",
        "wrong": "def f(x): return x",
        "error": "def f(x): return 1 / 0",
        "timeout": "def f(x):\n  while True: pass",
        "memory": "def f(x): return [0] * 10**12",
        "output": "def f(x): print('x' * 10**6)",
    }
    reward = CodeReward(sandbox=SandboxOptions(timeout_s=2.0))
    tests = [CodeTest(code="assert f(2) == 4")]
    verdicts = {name: asyncio.run(reward.verdicts(program, tests)) for name, program in programs.items()}
    assert verdicts == {name: [name] for name in programs}


def test_a_test_may_use_objects_of_the_answer():
    program = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
def count(n):
    for i in range(n): yield i, {i}
def adder(x): return lambda y: x + y
def sort(items): items.sort()
def fail(): raise KeyError("no")
SIZE = (1, 2.5, None, {"a": [b"\\x00", 1j]})
"""
    tests = [
        "s = Stack()\ns.push(4)\nassert len(s) == 1 and s.items == [4] and s.pop() == 4 and not s.items",
        "assert list(count(2)) == [(0, {0}), (1, {1})] and (1, {1}) in count(2)",
        "assert adder(1)(2) == 3 and adder(x=1)(y=3) == 4",
        "items = [3, 1]\nsort(items)\nassert items == [1, 3]",
        "try:\n  fail()\nexcept KeyError as error:\n  assert 'no' in str(error)\nelse:\n  assert False",
        "assert SIZE == (1, 2.5, None, {'a': [bytes(1), 1j]})",
        "def check(candidate):\n  assert candidate(1)(1) == 2\ncheck(adder)",
        "import collections, math\nassert collections.Counter('aa')['a'] == adder(1)(1) and math.inf > adder(1)(1)",
    ]
    verdicts = asyncio.run(CodeReward(sandbox=OPTIONS).verdicts(program, [CodeTest(code=test) for test in tests]))
    assert verdicts == ["passed"] * len(tests)


def test_the_same_program_is_run_once():
    reward = CodeReward(sandbox=SandboxOptions(timeout_s=2.0))
    endless = "```\nwhile True: pass\n```"
    begin = time.monotonic()
    assert scores(reward, *[endless] * 64, tests=["assert True"]) == [0.0] * 64
    assert time.monotonic() - begin < 64


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("no block", None),
        ("```\na\n```\ntext\n```python\nb\nc\n```\nmore", "b\nc\n"),
        ("```\na\n```\n```python\nb = 'cut", "a\n"),
        ("~~~py\na\n~~~", "a\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("```\n```", ""),
        ("  ```py\n  a\n  ```", "  a\n  "),
        ("text ```a``` text", None),
    ],
)
def test_the_last_closed_block(text, block):
    program = last_block(text)
    assert (program is None) == (block is None)
    assert (program or "").strip() == (block or "").strip()


def test_the_search_for_a_block_is_bounded():
    for text in ("```\n" * 30_000, "`" * 100_000, " " * 100_000, "~~~" * 30_000 + "\n", ("```" + "a" * 50) * 2000):
        begin = time.process_time()
        last_block(text)
        assert time.process_time() - begin < 1.0, text[:20]


def test_a_response_without_a_block():
    reward = CodeReward(sandbox=OPTIONS, fenced=False, prefix="f = lambda x: ")
    assert scores(reward, "2*x", "```\nx+2\n```", "3", tests=["assert f(2) == 4", "assert f(3) == 6"]) == [1, 0.5, 0]


def test_a_block_inside_a_thought_does_not_count():
    assert scores(CodeReward(sandbox=OPTIONS), f"<think>{DOUBLE}</think> No.", tests=["assert f(2) == 4"]) == [0.0]


@pytest.mark.parametrize(
    "tests", [[], "", [1], {}, {"input": 1, "output": "2"}, ["assert f(2)", ""], [{"input": "1"}], None, "[]"]
)
def test_read_tests_another_form_are_an_error(tests):
    with pytest.raises(UserError, match=r"column 'tests' has .*, and tests are a list"):
        read_tests({"tests": tests}, "tests")


def test_a_row_without_tests_is_an_error():
    with pytest.raises(UserError, match="no column 'cases' with tests; name it in the reward's tests_column"):
        read_tests({"tests": ["assert True"]}, "cases")
    assert read_tests({"tests": "assert f(2) == 4"}, "tests") == [CodeTest(code="assert f(2) == 4")]
    assert read_tests({"t": {"input": "1", "output": "2"}}, "t") == [CodeTest(stdin="1", stdout="2")]


@pytest.mark.parametrize(
    ("test", "reason"),
    [("assert f(lambda x: x)", "a test passes a function"), ("assert f(", "SyntaxError"), ("f(open)", "plain data")],
)
def test_a_test_that_cannot_run_is_no_score(test, reason):
    reward = WeightedReward(name="code", weight=1.0, function=CodeReward(sandbox=OPTIONS))
    rubric = Rubric([reward])
    try:
        with pytest.raises(SampleError, match=reason) as caught:
            asyncio.run(rubric.score(group(DOUBLE, tests=[test])))
    finally:
        rubric.close()
    assert caught.value.final
