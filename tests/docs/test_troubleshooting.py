"""The messages of docs/troubleshooting.md are those of the code."""

from __future__ import annotations

import ast
import re

import pytest
from pages import ROOT

SECTION = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").split("## By message")[1]
MESSAGES = re.findall(r"^\| `([^`]+)` \|", SECTION, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def strings():
    """Every string of the packages; what an f-string computes is left out."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in ROOT.glob("packages/*/src/**/*.py")]
    return "\n".join(
        "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        if isinstance(node, ast.JoinedStr)
        else node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    )


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_code(message, strings):
    assert message in strings


def test_messages_are_found():
    assert len(MESSAGES) > 20
