"""Lists of prompts: .txt, a caption per line; .jsonl, an object per line; .json, a list of objects; or Python rows."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import MAX_FILE_BYTES, parse_json, read_json_lines, read_lines
from cosmos_rl_core.storage.rows import rows_of
from cosmos_rl_wfm.data.captions import caption_of
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.data.storage import is_remote, read_bytes

SUFFIXES = (".txt", ".jsonl", ".json")

Row = dict[str, Any]


def read_prompts(config: WFMDataConfig) -> list[Row]:
    """Return the rows in their order. `video` and `text_embedding` of a row are relative to the list's folder.

    Raises:
        UserError: no such file, a line that is no JSON, or a row without a caption; names the place.
    """
    rows: list[Row] = []
    for where, columns in _located_rows(config):
        if not isinstance(columns, Mapping):
            raise UserError(f"{where}: a row is an object with named columns, not a {type(columns).__name__}")
        rows.append(prompt_row(config, columns, where=where, folder=config.path.rpartition("/")[0]))
        if len(rows) == config.limit:
            break
    return rows


def _located_rows(config: WFMDataConfig) -> Iterator[tuple[str, Any]]:
    if config.rows is not None:
        return rows_of(config.rows)
    path = PurePosixPath(config.path)
    try:
        data = read_bytes(config.path, timeout_s=config.timeout_s, limit=MAX_FILE_BYTES)
    except OSError as error:
        raise UserError(f"data.path = {config.path!r} cannot be read: {error}") from error
    return _located(data, name=path.name, suffix=path.suffix, column=config.caption_column)


def prompt_row(config: WFMDataConfig, columns: Mapping[str, Any], *, where: str, folder: str) -> Row:
    """Return the row of a prompt; paths in it are relative to `folder`. Raises UserError for one without a caption."""
    try:
        caption = caption_of(dict(columns), column=config.caption_column)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    row = {"key": where, "fps": config.fps or 0.0, **columns, "caption": caption}
    row["video"] = _resolved(columns.get("video"), folder, where=where)
    embedding = columns.get("text_embedding") if config.text_embeddings == "auto" else None
    row["text_embedding"] = _resolved(embedding, folder, where=where)
    return row


def _located(data: bytes, *, name: str, suffix: str, column: str) -> Iterator[tuple[str, Any]]:
    """Each row with its place."""
    if suffix == ".json":
        listed = parse_json(data, where=name)
        if not isinstance(listed, list):
            raise UserError(f"{name}: must hold a list of rows; one object per line goes in .jsonl")
        yield from ((f"{name}[{number}]", row) for number, row in enumerate(listed))
    elif suffix == ".jsonl":
        yield from read_json_lines(io.BytesIO(data), name=name)
    else:
        for where, line in read_lines(io.BytesIO(data), name=name):
            try:
                yield where, {column: line.decode()}
            except UnicodeDecodeError:
                raise UserError(f"{where}: not a text in UTF-8") from None


def _resolved(location: Any, folder: str, *, where: str) -> str:
    if location is None:
        return ""
    if not isinstance(location, str):
        raise UserError(f"{where}: a path is text, not a {type(location).__name__}")
    if not location or is_remote(location) or location.startswith("/"):
        return location
    return f"{folder}/{location}" if folder else location
