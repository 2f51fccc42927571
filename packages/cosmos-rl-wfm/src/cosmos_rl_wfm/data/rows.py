"""Lists the rows of a dataset without decoding a frame, and reads lists of prompts. No torch.

    folder | prompts | shards | mock --> {"caption", "video", "key", "fps", "text_embedding", and columns of its own}

`video` is a path or URL of a video or image, or "" for a prompt without one. Rows of tar shards carry `video_at`, first
byte and number of bytes, so that a row is read on its own and a run resumes at any of them. `text_embedding` and
`text_embedding_at` likewise. `fps` is the clip's frame rate, 0 for the video's own.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from cosmos_rl_core.data.source import usable_rows
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import MAX_FILE_BYTES, parse_json, read_json_lines, read_lines
from cosmos_rl_core.storage.rows import rows_of
from cosmos_rl_wfm.data.config import Kind, WFMDataConfig
from cosmos_rl_wfm.data.folder import caption_of, read_folder
from cosmos_rl_wfm.data.mock import mock_rows
from cosmos_rl_wfm.data.shards import holds_shards, is_shard, read_shards
from cosmos_rl_wfm.data.storage import is_remote, read_bytes

log = logging.getLogger(__name__)

Row = dict[str, Any]

SUFFIXES = (".txt", ".jsonl", ".json")
"""Kinds of lists of prompts: a caption per line, an object per line, a list of objects."""

SHOWN = 5
"""Names in a message."""


def load_rows(config: WFMDataConfig) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Read the rows and their origin for messages.

    Clips without a caption, captions without a clip and unreadable shards are skipped, counted and named in the log.

    Raises:
        UserError: there is nothing at `path`, nothing is left, a prompt is wrong, or a store refuses.
    """
    kind = kind_of(config)
    rows: Sequence[Mapping[str, Any]]
    left_out: list[str] = []
    match kind:
        case "mock":
            rows = mock_rows(config)
        case "prompts":
            rows = read_prompts(config)
        case "webdataset":
            rows, left_out = read_shards(config)
        case _:
            rows, left_out = read_folder(config)
    rows = rows[: config.limit]
    if not rows:
        key = f"path = {config.path!r}" if config.rows is None else f"rows = {config.rows!r}"
        raise UserError(f"data.{key}: no row is left{': ' if left_out else ''}{_named(left_out)}")
    if left_out:
        log.warning("%s: %d left out: %s", config.path, len(left_out), _named(left_out))
    return rows, "mock" if kind == "mock" else config.rows or PurePosixPath(config.path).name


def kind_of(config: WFMDataConfig) -> Kind:
    """Return the kind of data that the config names, else the one inferred from the path."""
    if config.rows is not None:
        return "prompts"
    if config.kind != "auto":
        return config.kind
    if is_shard(config.path):
        return "webdataset"
    if PurePosixPath(config.path).suffix in SUFFIXES:
        return "prompts"
    return "webdataset" if holds_shards(config) else "folder"


def _named(left_out: Sequence[str]) -> str:
    more = len(left_out) - SHOWN
    return "; ".join(left_out[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def read_prompts(config: WFMDataConfig) -> Sequence[Mapping[str, Any]]:
    """Return the rows in their order. `video` and `text_embedding` of a row are relative to the list's folder.

    A row without a caption, or with a wrong value, is dropped, as in `usable_rows`.

    Raises:
        UserError: no such file, a line that is no JSON, or most rows are wrong; names the place.
    """
    folder = config.path.rpartition("/")[0]
    located = islice(_located_rows(config), config.limit)
    return usable_rows(located, lambda where, columns: prompt_row(config, columns, where=where, folder=folder))


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
    if not isinstance(columns, Mapping):
        raise UserError(f"{where}: a row is an object with named columns, not a {type(columns).__name__}")
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
