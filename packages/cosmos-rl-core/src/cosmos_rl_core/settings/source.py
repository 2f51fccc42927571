"""The text of a TOML file, with the position of every key, so that a message can show the line of a problem.

    source = Source(name="run.toml", text=text)
    source.excerpt("rollout.group_sise", value=False)

    run.toml:21:1
       21 | group_sise = 4
          | ^^^^^^^^^^

`tomllib` returns no positions. The scanner expects a text that `tomllib` has accepted, and checks nothing itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:[^"\\\n]|\\.)*"' r"|'[^'\n]*'", re.DOTALL)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\n]+")
_WIDEST = 110
"""Maximum characters of a line in a message; a longer one is cut around the problem."""


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Characters of the text, as offsets: `start` <= offset < `end`."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RecipeEntry:
    """A key of the file."""

    key: TextSpan
    """For a table, its header; for an entry of an array, the value."""
    value: TextSpan


@dataclass(frozen=True, kw_only=True)
class RecipeSource:
    """A TOML file, and the keys that the command line has set over it."""

    name: str
    """The file's path, for messages."""
    text: str
    overridden: Collection[str] = field(default=())
    """Dotted keys whose values are not those of the file."""

    def place(self, key: str, *, value: bool) -> str:
        """Return "name:line:column" of a dotted key, or of its value; "" if the file does not have it.

        A missing key is placed at the table that lacks it.
        """
        span = self._find(key, value=value)
        if span is None:
            return ""
        line, column = self._line(span.start)
        return f"{self.name}:{line}:{column}"

    def excerpt(self, key: str, *, value: bool) -> str:
        """Return the line of a dotted key, with carets under the key or its value; "" if the file does not have it."""
        span = self._find(key, value=value)
        return "" if span is None else self.underlined(span)

    def underlined(self, span: TextSpan) -> str:
        """Return the first line of `span`, with carets under the part of it that is in the span."""
        number, column = self._line(span.start)
        line = self.text.splitlines()[number - 1] if self.text.splitlines()[number - 1 :] else ""
        length = max(1, min(span.end - span.start, len(line) - column + 1))
        if len(line) > _WIDEST:
            cut = max(0, column - 20)
            line, column = f"...{line[cut : cut + _WIDEST]}...", column - cut + 3
            length = min(length, len(line) - column + 1)
        tabs = re.sub(r"[^\t]", " ", line[: column - 1])
        return f"{number:>5} | {line}\n{'':>5} | {tabs}{'^' * length}"

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a line and column, both counted from 1."""
        lines = self.text.splitlines(keepends=True)
        return sum(map(len, lines[: line - 1])) + column - 1

    def offset_of(self, key: str) -> int:
        """Return the offset of a dotted key, to sort by; the end of the text for one that the file does not have."""
        span = self._find(key, value=False)
        return len(self.text) if span is None else span.start

    def _line(self, offset: int) -> tuple[int, int]:
        before = self.text[:offset]
        return before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1

    def _find(self, key: str, *, value: bool) -> TextSpan | None:
        """The key or its value; for a key that the file lacks, the nearest table around it."""
        if any(key == override or key.startswith(f"{override}.") for override in self.overridden):
            return None
        if (entry := self.entries.get(key)) is not None:
            return entry.value if value else entry.key
        table = key.rpartition(".")[0]
        while table and table not in self.entries:
            table = table.rpartition(".")[0]
        return self.entries[table].key if table else None

    @cached_property
    def entries(self) -> Mapping[str, RecipeEntry]:
        """Every key and table of the file by its dotted key; entries of arrays are numbered from 0."""
        return dict(_Scanner(self.text).entries())


class _Scanner:
    """Reads a TOML document from the front, key by key."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lengths: dict[str, int] = {}
        """Number of tables of each [[array]] so far."""
        self._headed: set[str] = set()
        """Tables that a header has named, also as a part of its name."""

    def entries(self) -> Iterator[tuple[str, RecipeEntry]]:
        table = ""
        while self._skip_blank() < len(self._text):
            if self._text[self._at] != "[":
                yield from self._pair(table)
                continue
            start, width = self._at, 2 if self._text.startswith("[[", self._at) else 1
            self._at += width
            parts, _ = self._key()
            self._at += width
            header = RecipeEntry(TextSpan(start, self._at), TextSpan(start, self._at))
            for table in self._tables(parts, is_array=width == 2):
                if table not in self._headed:
                    yield table, header
                self._headed.add(table)

    def _tables(self, parts: list[str], *, is_array: bool) -> list[str]:
        """The dotted keys of the tables that a header names, outermost first; of an array the newest table."""
        tables: list[str] = []
        path = ""
        for depth, part in enumerate(parts, start=1):
            path = f"{path}.{part}" if path else part
            tables.append(path)
            if depth == len(parts) and is_array:
                self._lengths[path] = self._lengths.get(path, 0) + 1
            if path in self._lengths:
                path = f"{path}.{self._lengths[path] - 1}"
                tables.append(path)
        return tables

    def _pair(self, table: str) -> Iterator[tuple[str, RecipeEntry]]:
        self._skip_blank()
        start = self._at
        parts, end = self._key()
        key = ".".join([table, *parts] if table else parts)
        self._at += len("=")
        yield from self._value(key, TextSpan(start, end))

    def _key(self) -> tuple[list[str], int]:
        """Read a dotted key and the blanks after it; return its parts and its end."""
        parts = []
        while True:
            self._skip_blank()
            quoted = _STRING.match(self._text, self._at)
            match = quoted or _BARE_KEY.match(self._text, self._at)
            assert match is not None, "tomllib has accepted this text"
            parts.append(match[0][1:-1] if quoted else match[0])
            self._at = end = match.end()
            if self._text[self._skip_blank()] != ".":
                return parts, end
            self._at += 1

    def _value(self, key: str, named: TextSpan | None = None) -> Iterator[tuple[str, RecipeEntry]]:
        start = self._skip_blank()
        inner: list[tuple[str, RecipeEntry]] = []
        match self._text[start]:
            case "{":
                inner = self._until("}", lambda number: self._pair(key))
            case "[":
                inner = self._until("]", lambda number: self._value(f"{key}.{number}"))
            case _:
                match = _STRING.match(self._text, start) or _SCALAR.match(self._text, start)
                assert match is not None, "tomllib has accepted this text"
                self._at = start + len(match[0].rstrip())
        value = TextSpan(start, self._at)
        yield key, RecipeEntry(named or value, value)
        yield from inner
        self._skip_blank()

    def _until(
        self, end: str, item: Callable[[int], Iterable[tuple[str, RecipeEntry]]]
    ) -> list[tuple[str, RecipeEntry]]:
        """Read the entries of an array or inline table, separated by commas."""
        self._at += 1
        entries: list[tuple[str, RecipeEntry]] = []
        number = 0
        while self._text[self._skip_blank()] != end:
            entries += item(number)
            number += 1
            if self._text[self._skip_blank()] == ",":
                self._at += 1
        self._at += 1
        return entries

    def _skip_blank(self) -> int:
        blank = _BLANK.match(self._text, self._at)
        assert blank is not None
        self._at = blank.end()
        return self._at
