"""Blocks of code in the pages of the project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("cookbook/**/*.md"),
        *ROOT.glob("packages/*/*.md"),
        *ROOT.glob("simulators/**/*.md"),
    ]
)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
"""In the line before a Python block: why no test runs it."""
FENCE = re.compile(r"^\s*```(.*)$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    """Path from the root."""
    line: int
    """Line of its first line of code."""
    language: str
    text: str
    not_run: str = ""
    """The reason of its NOT_RUN comment."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    """Return the path of a page from the root."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start, language = 0, ""
    for number, line in enumerate(lines, start=1):
        fence = FENCE.match(line)
        if fence is None:
            continue
        if not start:
            start, language = number + 1, fence[1]
            continue
        before = NOT_RUN.match(lines[start - 3]) if start > 2 else None
        text = "\n".join(lines[start - 1 : number - 1]) + "\n"
        yield Block(name_of(page), start, language, text, before[1] if before else "")
        start = 0
    assert not start, f"{page.name}: a block that begins at line {start} does not end"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in these languages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language in languages]


def prose(page: Path) -> str:
    """Return a page without its blocks, with as many lines."""
    inside, kept = False, []
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = FENCE.match(line) is not None
        kept.append("" if inside or fence else line)
        inside ^= fence
    return "\n".join(kept)
