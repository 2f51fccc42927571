"""The table of failures in docs/elasticity.md names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/elasticity.md").read_text().partition("## Failures and their tests")[2]
ROWS = [line.strip("|").split("|") for line in TABLE.splitlines() if line.startswith("| ") and "`tests/" in line]
FILE, NAME = re.compile(r"`(tests/[\w/]+\.py)`"), re.compile(r"`(test_\w+)`")


def test_the_table_is_there():
    assert len(ROWS) > 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip()[:60])
def test_a_row_has_an_outcome_and_tests_that_exist(row):
    _, outcome, tests, measured = row
    assert outcome.strip() and measured.strip()
    text = "".join((ROOT / file).read_text() for file in FILE.findall(tests))
    missing = [name for name in NAME.findall(tests) if f"def {name}(" not in text]
    assert not missing
