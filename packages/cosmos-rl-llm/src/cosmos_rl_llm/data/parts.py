"""The parts of a chat message: text, pictures and videos, in one form.

"text"                                                            -> "text"
{"type": "image", "image" | "url" | "path" | "base64": X}         -> {"type": "image", "image": X}
{"type": "image_url", "image_url": {"url": X}}                    -> {"type": "image", "image": X}
"""

from __future__ import annotations

from collections.abc import Mapping
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
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url" | "video_url" as kind, **rest} if isinstance(rest.get(kind), Mapping):
            return {"type": kind.removesuffix("_url"), kind.removesuffix("_url"): rest[kind]["url"]}
        case {"type": "image" | "video" as kind, **rest}:
            for name in (kind, "url", "path"):
                if rest.get(name) is not None:
                    return {"type": kind, kind: rest[name]}
            if isinstance(rest.get("base64"), str):
                return {"type": kind, kind: {"bytes": rest["base64"]}}
    raise UserError(
        f'{where}: a part of a message must be {{"type": "text", "text": "..."}}, or of type "image" or "video" with '
        f"its location, not {shown(part)} ({key})"
    )


def with_media(
    messages: list[dict[str, Any]], row: Mapping[str, Any], *, where: str, config: LLMDataConfig
) -> list[dict[str, Any]]:
    """Put the pictures and videos of the row's columns before the text of the first message of the user."""
    found: list[dict[str, Any]] = []
    for kind, column in (("image", config.image_column), ("video", config.video_column)):
        if column is None:
            continue
        if column not in row:
            raise UserError(f"{where}: no column {column!r} (data.{kind}_column)")
        given = row[column]
        each = given if isinstance(given, list) else [] if given is None else [given]
        found += [{"type": kind, kind: one} for one in each]
    if not found:
        return messages
    place = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if place is None:
        raise UserError(f"{where}: pictures, and no message of the user that they belong to")
    content = messages[place]["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{**message, "content": [*found, *text]} if i == place else message for i, message in enumerate(messages)]
