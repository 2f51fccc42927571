"""Score of a program by its tests, which run in a sandbox, where the program can reach neither them nor the verdict.

response --the last fenced block--> program --each test--> passed | wrong | error | timeout | memory | output --> reward
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec
from pydantic import Field, PrivateAttr

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_llm.rewards.thoughts import answer_part
from cosmos_rl_llm.sandbox.inside.remote import BROKEN_TEST, WRONG
from cosmos_rl_llm.sandbox.sandbox import Sandbox, SandboxOptions

Verdict = Literal["passed", "wrong", "error", "timeout", "memory", "output"]
_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+.-]*)[ \t]*$", re.MULTILINE)
_EXAMPLES = 'such as ["assert f(2) == 4"], or [{"input": "2\\n", "output": "4\\n"}]'


class CodeTest(NamedTuple):
    """One test: lines of Python that use a program's names, or what the program reads and then prints."""

    code: str | None = None
    stdin: str = ""
    stdout: str = ""


class CodeReward(Strict):
    """Fraction of the row's tests that the response's program passes: `await reward(group)`.

    The program is the last fenced code block after the thought; without one the reward is 0. A test is a text of
    Python with assertions, which calls the program's functions and classes, or {"input": ..., "output": ...}, what the
    program reads from stdin and then prints. White space at the ends of lines and of the output does not count.
    """

    tests_column: str = Field(default="tests", min_length=1)
    """Column with the tests of a row: a list, the JSON of one, or one text."""
    score: Literal["fraction", "all"] = "fraction"
    """Reward: the fraction of the tests that are passed, or 1 if all are, else 0."""
    fenced: bool = True
    """Read a fenced block. False: the response as a whole is the program where it has none."""
    prefix: str = ""
    """Lines before each program, such as imports."""
    sandbox: SandboxOptions = SandboxOptions()
    """Limits of each test, and the protection of the machine."""
    _sandbox: Sandbox | None = PrivateAttr(default=None)

    async def __call__(self, group: RolloutGroup) -> list[float]:
        tests = read_tests(group.prompt.row, self.tests_column)
        programs = [self.program(answer_part(group, rollout)) for rollout in group.rollouts]
        different = [program for program in dict.fromkeys(programs) if program is not None]
        rewards: dict[str | None, float] = {None: 0.0}
        for program, verdicts in zip(
            different, await asyncio.gather(*(self.verdicts(each, tests) for each in different))
        ):
            passed = verdicts.count("passed") / len(tests)
            rewards[program] = passed if self.score == "fraction" else float(passed == 1)
        return [rewards[program] for program in programs]

    def program(self, response: str) -> str | None:
        """Return the program of a response; None if it has none."""
        block = last_block(response)
        if block is None and not self.fenced:
            block = response
        return None if block is None else self.prefix + block

    async def verdicts(self, program: str, tests: Sequence[CodeTest]) -> list[Verdict]:
        """Return the verdict of each test; with `score = "all"`, those up to the first that is not passed.

        Raises UserError for a test that cannot be run with any program.
        """
        if self._sandbox is None:
            self._sandbox = Sandbox(self.sandbox)
        if self.score == "fraction":
            return list(await asyncio.gather(*(_verdict(self._sandbox, program, test) for test in tests)))
        verdicts: list[Verdict] = []
        while len(verdicts) < len(tests) and verdicts.count("passed") == len(verdicts):
            verdicts.append(await _verdict(self._sandbox, program, tests[len(verdicts)]))
        return verdicts


async def _verdict(sandbox: Sandbox, program: str, test: CodeTest) -> Verdict:
    if test.code is None:
        result = await sandbox.run(program, test.stdin)
        is_right = _lines(result.stdout) == _lines(test.stdout)
        return cast(Verdict, result.status) if result.status != "passed" or is_right else "wrong"
    result, answer = await sandbox.run_tests(program, test.code)
    if result.exit_code == BROKEN_TEST and result.status == "error":
        raise UserError(f"the test {test.code[:80]!r} cannot be run: {result.stderr.strip().splitlines()[-1]}")
    if answer is not None and answer.status != "passed":
        return cast(Verdict, answer.status)
    return "wrong" if result.exit_code == WRONG else cast(Verdict, result.status)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def last_block(text: str) -> str | None:
    """Return the last closed block between fences of ``` or ~~~; None without one."""
    block, opening = None, None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence[1].startswith(opening[1]) and not fence[2]:
            block, opening = text[opening.end() + 1 : fence.start()], None
    return block


def read_tests(row: Mapping[str, Any], column: str) -> list[CodeTest]:
    """Return the tests of a row.

    Raises:
        UserError: the row has none, or something else in this column.
    """
    if column not in row:
        raise UserError(f"the row has no column {column!r} with tests; name it in the reward's tests_column")
    tests = row[column]
    if isinstance(tests, str):
        try:
            tests = msgspec.json.decode(tests)
        except msgspec.DecodeError:  # the text of one test
            tests = [tests]
    if isinstance(tests, dict):
        tests = [tests]
    read = [_test(test) for test in tests] if isinstance(tests, list) else []
    if not read or None in read:
        raise UserError(f"column {column!r} has {str(tests)[:80]!r}, and tests are a list {_EXAMPLES}")
    return [test for test in read if test is not None]


def _test(test: Any) -> CodeTest | None:
    match test:
        case str() if test.strip():
            return CodeTest(code=test)
        case {"input": str(stdin), "output": str(stdout)}:
            return CodeTest(stdin=stdin, stdout=stdout)
    return None
