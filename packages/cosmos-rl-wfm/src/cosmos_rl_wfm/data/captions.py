"""Parses the caption of a clip from the bytes of a .txt or .json file."""

from __future__ import annotations

from typing import Any

from cosmos_rl_core.storage.json_files import parse_json


def read_caption(data: bytes, *, is_json: bool, column: str) -> dict[str, Any]:
    """Return the columns of a caption file, `caption` among them: a JSON object's own, or only the text.

    Raises:
        ValueError: it has no caption, or is no JSON object; the message is a phrase.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("its caption is not UTF-8") from None
    if not is_json:
        return {"caption": checked(text, what="its caption")}
    columns = parse_json(text, where="its JSON")
    if not isinstance(columns, dict):
        raise ValueError(f"its JSON is a {type(columns).__name__}, not an object")
    return {**columns, "caption": caption_of(columns, column=column)}


def caption_of(columns: dict[str, Any], *, column: str) -> str:
    """Return the caption of a row.

    Raises:
        ValueError: no text in that column.
    """
    if column not in columns:
        raise ValueError(
            f"no column {column!r} (data.caption_column); there are {', '.join(map(repr, columns)) or 'none'}"
        )
    return checked(columns[column], what=f"column {column!r}")


def checked(text: object, *, what: str) -> str:
    """Return a caption without surrounding white space. Raises ValueError if it is empty or no text."""
    if not isinstance(text, str):
        raise ValueError(f"{what} holds a {type(text).__name__}, not text")
    if not text.strip():
        raise ValueError(f"{what} is empty")
    return text.strip()
