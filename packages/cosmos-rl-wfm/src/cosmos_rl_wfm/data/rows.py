"""Lists the rows of a dataset without decoding a frame. No torch.

    folder | prompts | shards | mock --> {"caption", "video", "key", "fps", "text_embedding", and columns of its own}

`video` is a path or URL of a video or image, or "" for a prompt without one. Rows of tar shards carry `video_at`, first
byte and number of bytes, so that a row is read on its own and a run resumes at any of them. `text_embedding` and
`text_embedding_at` likewise. `fps` is the clip's frame rate, 0 for the video's own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_wfm.data.config import Kind, WFMDataConfig
from cosmos_rl_wfm.data.folder import read_folder
from cosmos_rl_wfm.data.mock import mock_rows
from cosmos_rl_wfm.data.prompts import SUFFIXES, read_prompts
from cosmos_rl_wfm.data.shards import holds_shards, is_shard, read_shards

log = logging.getLogger(__name__)

SHOWN = 5
"""Names in a message."""


def load_rows(config: WFMDataConfig) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Read the rows and their origin for messages.

    Clips without a caption, captions without a clip and unreadable shards are skipped, counted and named in the log.

    Raises:
        UserError: there is nothing at `path`, nothing is left, a prompt is wrong, or a store refuses.
    """
    kind = kind_of(config)
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
