"""Rows of a dataset that come from Python code as mappings, not from a file.

[data] rows = "my_rows:train"       rows_of("my_rows:train")
run(recipe, rows=[{...}, ...])      keep_rows(rows, run_dir / "rows.jsonl"), and the file is read as any other
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import shown

Located = tuple[str, Mapping[str, Any]]
"""Location of a row ("train.jsonl:17", "my_rows:train[16]") and the row."""


def rows_of(name: str) -> Iterator[Located]:
    """Yield the rows that "module:attribute" names: an iterable of mappings, or a function that returns one.

    Raises UserError for a name that cannot be imported, a function that fails, and a row that is not JSON.
    """
    source = plugins.attribute(name, kind="[data] rows =")
    try:
        rows = source() if callable(source) else source
    except Exception as error:  # the user's own code may raise anything
        raise UserError(f"[data] rows = {name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(rows, Iterable):
        raise UserError(
            f"[data] rows = {name!r} is {shown(rows)}; it must be a list of rows, or a function without arguments that "
            "returns one"
        )
    return located(rows, name=name)


def located(rows: Iterable[Any], *, name: str) -> Iterator[Located]:
    """Yield each row with its location in `name`. Raises UserError for one that is not a mapping of columns to JSON."""
    for number, row in enumerate(rows):
        where = f"{name}[{number}]"
        if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
            raise UserError(f"{where}: a row must be a mapping with named columns, not {shown(row)}")
        yield as_json(where, row, finite=True)


def as_json(where: str, row: Mapping[str, Any], *, finite: bool = False) -> Located:
    """Raise UserError for a column that cannot be sent to workers as JSON, such as a date or a picture.

    With `finite` NaN and infinities are refused too, which Python's own reader accepts.
    """
    for column, value in row.items():
        try:
            json.dumps(value, allow_nan=not finite)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{where}: column {column!r} holds {shown(value)}, which is not JSON ({error}); "
                "drop the column, or write it as text"
            ) from None
    return where, row


def keep_rows(rows: Iterable[Any], path: Path, *, name: str, resumed: bool) -> None:
    """Write rows to a .jsonl file; a resumed run must get the rows that are in its file already.

    Raises UserError for a row that is not JSON, and for rows that differ from those in the file.
    """
    lines = (json.dumps(dict(row)) + "\n" for _, row in located(rows, name=name))
    if not (resumed and path.exists()):
        with path.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        return
    with path.open(encoding="utf-8") as file:
        for number, (before, now) in enumerate(zip_longest(file, lines)):
            if before != now:
                raise UserError(
                    f"{name}[{number}] is not the row that the run began with ({path}:{number + 1}): give the same "
                    "rows to resume it, or none, or choose another [run] output_dir for a new run"
                )
