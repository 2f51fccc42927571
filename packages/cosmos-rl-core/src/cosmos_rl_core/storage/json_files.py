"""Reads JSON files of users, other programs and interrupted runs: every defect in them is one UserError.

rows    read_json_lines(file, name="train.jsonl")       one object a line, read lazily
        read_json_list(path)                            a whole .json file
model   read_json_object(path)                          config.json and the like
        check_fields(held, used={...}, fixed={...}, ...)    all of its fields are known
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from cosmos_rl_core.errors import UserError

MAX_LINE_BYTES = 64 * 2**20
"""Longest line of a .jsonl file: a line is in memory as a whole, several times."""
MAX_FILE_BYTES = 2**30
"""Largest .json file, which is in memory as a whole."""
MAX_DEPTH = 100
"""Deepest nesting of lists and objects: much deeper values cannot be serialised again."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _NotANumberError(ValueError):
    """A constant in the place of a number; the message is a phrase."""


def parse_json(text: str | bytes, *, where: str, finite: bool = True) -> Any:
    """Return the value of a JSON text in UTF-8; a byte order mark before it is skipped.

    With `finite` numbers are finite: NaN, Infinity and 1e999 are refused, which Python's reader accepts.

    Raises:
        UserError: it is not JSON, is nested too deeply, or holds an invalid number or character; the message begins
            with `where`, and has line and column.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        text = text.removeprefix("\ufeff")
        hooks: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite} if finite else {}
        value = json.loads(text, **hooks)
        if _is_deep(value):
            raise RecursionError
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UserError(f"{where}: not valid JSON: {error.msg} ({line}column {error.colno})") from None
    except RecursionError:
        raise UserError(f"{where}: lists and objects are nested more than {MAX_DEPTH} deep") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not a text in UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError:
        raise UserError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff), which is not a character") from None
    except _NotANumberError as error:
        raise UserError(f"{where}: {error}") from None
    except ValueError:
        raise UserError(f"{where}: an integer of more than {sys.get_int_max_str_digits()} digits") from None
    return value


def read_lines(file: BinaryIO, *, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield each line of a text that is not empty, with its location ("train.jsonl:17"), lazily.

    Raises:
        UserError: a line of more than MAX_LINE_BYTES, before it is read to its end.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{name}:{number}: the line is longer than {MAX_LINE_BYTES:,} bytes; write one row a line")
        if text := line.removeprefix(b"\xef\xbb\xbf").strip():
            yield f"{name}:{number}", text


def read_json_lines(file: BinaryIO, *, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the value of each line, with its location. Raises UserError as `read_lines` and `parse_json`."""
    for where, line in read_lines(file, name=name):
        yield where, parse_json(line, where=where)


def read_json_list(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each entry of a list with its location ("train.json[16]").

    Raises:
        UserError: as `parse_json`, and for a file that cannot be read, is too large, or holds anything but a list.
    """
    rows = parse_json(_read(path, hint="write one object a line in .jsonl"), where=str(path))
    if not isinstance(rows, list):
        raise UserError(f"{path}: must hold a list of rows, not {shown(rows)}; one object a line goes in .jsonl")
    yield from ((f"{path}[{number}]", row) for number, row in enumerate(rows))


def read_json_object(path: Path, *, hint: str = "") -> dict[str, Any]:
    """Return the object in a file; NaN and Infinity are allowed, as configurations have them. `hint`: the remedy.

    Raises:
        UserError: the file is not there, cannot be read, or holds anything else.
    """
    data = _read(path, hint=hint)
    try:
        content = parse_json(data, where=str(path), finite=False)
    except UserError as error:
        raise UserError(f"{error}{hint and f'; {hint}'}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold an object, not {shown(content)}{hint and f'; {hint}'}")
    return content


def check_fields(
    fields: Mapping[str, Any],
    *,
    used: Collection[str] = (),
    fixed: Mapping[str, Collection[Any]] | None = None,
    without_effect: Collection[str] = (),
    where: str,
) -> None:
    """Raise UserError for a field of another program's file that would be read without its effect.

    Args:
        used: fields that are read.
        fixed: the values of other fields whose effect is that of the code here.
        without_effect: fields that change nothing here, whatever their value.
    """
    fixed = fixed or {}
    for name, value in fields.items():
        if name in fixed and value not in fixed[name]:
            allowed = " or ".join(json.dumps(one) for one in fixed[name])
            raise UserError(f"{where}: {name} = {json.dumps(value)} is not supported; only {allowed} is")
        if name not in fixed and name not in used and name not in without_effect:
            raise UserError(f"{where}: {name} = {json.dumps(value)} is a field that is not known here")


def _read(path: Path, *, hint: str) -> bytes:
    hint = hint and f"; {hint}"
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise UserError(f"{path}: {size:,} bytes, at most {MAX_FILE_BYTES:,} of .json{hint}")
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is not there{hint}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}{hint}") from error


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _refuse(constant: str) -> float:
    raise _NotANumberError(f"{constant} is not a number; leave the key out, or write null")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _NotANumberError(f"{text[:40]} is larger than any float")
    return number


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            return False
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    return True
