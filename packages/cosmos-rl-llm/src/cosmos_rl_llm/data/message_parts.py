"""The parts of a chat message: text, pictures and videos, in one form.

"text"                                                            -> "text"
{"type": "image", "image" | "url" | "path" | "base64": X}         -> {"type": "image", "image": X}
{"type": "image_url", "image_url": {"url": X} | X}                -> {"type": "image", "image": X}
{"type": "input_image", "image_url": X}                           -> {"type": "image", "image": X}
{"type": "input_text", "text": "text"}                            -> {"type": "text", "text": "text"}
{"type": "image"}                                                 -> {"type": "image", "image": X}, X of a column
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.json_files import shown
from cosmos_rl_llm.config import LLMDataConfig


def normalise_content(content: str | list[Any], *, where: str, key: str) -> str | list[dict[str, Any]]:
    """Return a message's content, its parts in one form. Raises UserError for a part of another form."""
    if isinstance(content, str):
        return content
    return [_normalise(part, where=where, key=key) for part in content]


def _normalise(part: Any, *, where: str, key: str) -> dict[str, Any]:
    match part:
        case {"type": "text" | "input_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": str(url) | {"url": str(url)}}:
            return {"type": "image", "image": url}
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image", "image": url}
        case {"type": "video_url", "video_url": str(url) | {"url": str(url)}}:
            return {"type": "video", "video": url}
        case {"type": "image" | "video" as kind, **rest}:
            for name in (kind, "url", "path"):
                if rest.get(name) is not None:
                    return {"type": kind, kind: rest[name]}
            if isinstance(rest.get("base64"), str):
                return {"type": kind, kind: {"bytes": rest["base64"]}}
            return {"type": kind, kind: None}
    raise UserError(
        f'{where}: a part of a message must be {{"type": "text", "text": "..."}}, or of type "image" or "video" with '
        f"its location, not {shown(part)} ({key})"
    )


def with_media(
    messages: list[dict[str, Any]], row: Mapping[str, Any], *, where: str, config: LLMDataConfig
) -> list[dict[str, Any]]:
    """Put the pictures and videos of the row's columns into the parts of messages without a location, in order.

    Without such parts they come before the text of the first message of the user. Raises UserError if the numbers
    differ.
    """
    before: list[dict[str, Any]] = []
    for kind, column in (("image", config.image_column), ("video", config.video_column)):
        contents = _of_column(row, column, where=where, key=f"data.{kind}_column")
        empty = [
            part
            for message in messages
            for part in (() if isinstance(message["content"], str) else message["content"])
            if part["type"] == kind and part[kind] is None
        ]
        if empty and len(empty) != len(contents):
            raise UserError(
                f"{where}: {len(empty)} parts of type {kind!r} without a location, and {len(contents)} in the column "
                f"{column!r} (data.{kind}_column)"
            )
        for part, one in zip(empty, contents, strict=False):
            part[kind] = one
        before += [] if empty else [{"type": kind, kind: one} for one in contents]
    return _with_parts(messages, before, where=where)


def attach_files(
    row: Mapping[str, Any], *, images: Sequence[Path], videos: Sequence[Path], config: LLMDataConfig
) -> dict[str, Any]:
    """Return a row whose prompt shows the content of files, before the text of the first message of the user.

    Raises UserError for a file that cannot be read or is too large, and for a prompt of plain text.
    """
    if isinstance(row["prompt"], str):
        raise UserError('--image and --video need a chat template; data.chat_template is "none"')
    parts = [_file_part(kind, path, config) for kind, paths in (("image", images), ("video", videos)) for path in paths]
    return {**row, "prompt": _with_parts(row["prompt"], parts, where="--prompts")}


def _file_part(kind: str, path: Path, config: LLMDataConfig) -> dict[str, Any]:
    try:
        if path.stat().st_size > config.media.max_bytes:
            raise UserError(f"--{kind} {path}: {path.stat().st_size:,} bytes, more than data.media.max_bytes")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--{kind} {path}: {error.strerror or error}") from error
    return {"type": kind, kind: {"bytes": base64.b64encode(content).decode(), "path": str(path)}}


def _with_parts(
    messages: list[dict[str, Any]], before: Sequence[Mapping[str, Any]], *, where: str
) -> list[dict[str, Any]]:
    """Put parts before the text of the first message of the user. Raises UserError if there is none."""
    if not before:
        return messages
    place = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if place is None:
        raise UserError(f"{where}: pictures, and no message of the user that they belong to")
    content = messages[place]["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{**message, "content": [*before, *text]} if i == place else message for i, message in enumerate(messages)]


def _of_column(row: Mapping[str, Any], column: str | None, *, where: str, key: str) -> list[Any]:
    if column is None:
        return []
    if column not in row:
        raise UserError(f"{where}: no column {column!r} ({key})")
    value = row[column]
    return value if isinstance(value, list) else [] if value is None else [value]
