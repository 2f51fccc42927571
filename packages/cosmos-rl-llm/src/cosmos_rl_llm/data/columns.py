"""Columns of tables (parquet, datasets of a hub) as JSON, which rows are sent as.

bytes of pictures and videos, alone or as {"bytes": ..., "path": ...}    text in base64
keys of messages and tools that are null                                 left out: a table has every key in every row
dates, decimals and bytes in a column that no key names                  not read
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import TYPE_CHECKING, Any

from cosmos_rl_llm.config import LLMDataConfig

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


def readable_columns(schema: pa.Schema, config: LLMDataConfig, *, origin: str) -> list[str]:
    """Return the columns to read: those that a key names, and others that JSON can hold."""
    named = set(_named(config))
    columns = [field.name for field in schema if field.name in named or _fits_json(field.type)]
    if unread := [name for name in schema.names if name not in columns]:
        what = "their dates, decimals or bytes are not JSON, and no key of [data] names them"
        log.warning("%s: columns that are not read, as %s: %s", origin, what, ", ".join(unread))
    return columns


def _named(config: LLMDataConfig) -> Iterator[str]:
    columns = (config.answer_column, config.response_column, config.image_column, config.video_column)
    columns += (config.chosen_column, config.rejected_column, config.label_column, config.steps_column)
    yield from (column for column in (*columns, config.tools_column) if column)
    if config.messages_column is not None:
        yield config.messages_column
    elif config.prompt_template is not None:
        yield from (name for _, name, _, _ in Formatter().parse(config.prompt_template) if name)
    else:
        yield config.prompt_column


def _fits_json(kind: pa.DataType) -> bool:
    from pyarrow import types

    if types.is_nested(kind):
        return all(_fits_json(kind.field(place).type) for place in range(kind.num_fields))
    if types.is_dictionary(kind):
        return _fits_json(kind.value_type)
    scalar = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_null(kind)
    return scalar or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def with_base64(row: Mapping[str, Any], config: LLMDataConfig) -> Mapping[str, Any]:
    """Return a table's row with the bytes of pictures and videos as text, in the columns that may hold them."""
    media = (config.image_column, config.video_column)
    columns = (*media, config.prompt_column, config.messages_column, config.tools_column)
    columns += (config.chosen_column, config.rejected_column)
    return {column: _as_text(value) if column in columns else value for column, value in row.items()}


def _as_text(value: Any) -> Any:
    match value:
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case {"bytes": bytes() as content, **rest}:
            return {**rest, "bytes": base64.b64encode(content).decode()}
        case Mapping():
            return {key: _as_text(each) for key, each in value.items() if each is not None}
        case list():
            return [_as_text(each) for each in value]
        case _:
            return value
