"""Words that the project does not use, in code and prose. CONTRIBUTING.md has the list with their replacements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORBIDDEN = re.compile(
    r"(?<![a-z])(albums?|anchor(?:s|ed|ing)?|desks?|figures|films?|filmed|filming|heed(?:s|ed|ing)?|hear(?:s|d|ing)?"
    r"|hand(?:s|ed|ing)?[ _]over|sheets?|tells?|told|lies|drawn|draws)(?![a-z])(?!\(\))",
    re.IGNORECASE,
)
FIRST_WORDS = ("What", "Who", "How")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "cookbook/**/*.md", "cookbook/**/*.toml")
SOURCES = ("packages/*/src/**/*.py", "cookbook/**/*.py", "scripts/*.py")


def files(*patterns: str) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def forbidden_words(path: Path) -> Iterator[str]:
    """Yield FILE:LINE: word for each forbidden word; the parts of CamelCase and snake_case names are words."""
    text = path.read_text(encoding="utf-8")
    if path.name == "CONTRIBUTING.md":  # the table of these words
        start, end = text.index("| not | but |"), text.index("## Tests")
        text = text[:start] + "\n" * text[start:end].count("\n") + text[end:]
    for number, line in enumerate(text.splitlines(), 1):
        if '"anchor": "data_regularization"' in line:  # a key of an earlier version, which an error names
            continue
        line = line.replace('"start_anchor_pattern"', "")  # a key of transformers
        for found in FORBIDDEN.finditer(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", line)):
            yield f"{path.relative_to(ROOT)}:{number}: {found[0]}"


def first_words(path: Path) -> Iterator[str]:
    """Yield FILE:LINE: word for each docstring, of a field too, that begins with a clause instead of a noun."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            word = re.match(r"\s*(\w*)", node.value.value)
            if word is not None and word[1] in FIRST_WORDS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {word[1]}"


def test_forbidden_words_are_found_in_names_and_text(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.py"
    page.write_text('"""How it is."""\nheartbeat = telling = 1\nhand_over, TellAll, drawn_rows = 1, 2, 3\n')
    assert [*forbidden_words(page)] == ["page.py:3: hand_over", "page.py:3: Tell", "page.py:3: drawn"]
    assert [*first_words(page)] == ["page.py:1: How"]


def test_pages_and_sources_use_the_words_of_the_field():
    paths = files(*PAGES, *SOURCES)
    found = [line for path in paths for line in forbidden_words(path)]
    assert not found, "\n".join(["words with a replacement in CONTRIBUTING.md:", *found])


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = [line for path in files(*SOURCES) for line in first_words(path)]
    assert not found, "\n".join(["docstrings that begin with What, Who or How:", *found])
