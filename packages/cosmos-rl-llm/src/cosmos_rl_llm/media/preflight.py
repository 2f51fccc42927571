"""Checks of pictures and videos before the start: limits that the model does not have, and files of the first rows.

Headers are read, not pixels, and nothing is fetched from the network. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import MediaError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.settings.base import Problem
from cosmos_rl_core.settings.problems import missing_package
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_llm.config import LLMDataConfig
from cosmos_rl_llm.media.source import is_remote, limits_of, media_errors, parts_of, read_header

TILED = ("idefics3", "smolvlm", "internvl", "llava", "gemma3")
"""By model_type: families whose tower takes tiles of one size."""
Row = Mapping[str, Any]
PARTS = 8
"""Pictures and videos of each section whose headers are read."""


def media_problems(
    data: LLMDataConfig, directory: Path, *, rows: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]
) -> Iterator[Problem]:
    """Yield problems of [data.media] and of the first pictures and videos. directory: the model's."""
    parts = {key: list(islice(_parts(each), PARTS)) for key, each in (("data", rows), ("eval.data", held_out))}
    if not any(parts.values()):
        return
    if missing := [*_missing(part for each in parts.values() for _, part in each)]:
        yield from missing
        return
    kind = read_json_object(directory / "config.json", hint="see model.path").get("model_type")
    if data.media.resizes and kind in TILED:
        yield Problem(
            key="data.media",
            wrong=f"has min_pixels, max_pixels or total_pixels, and {kind} takes pictures in tiles of one size",
            suggestion="remove them",
        )
    for key, each in parts.items():
        yield from _of_headers(key, each, data)


def _parts(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Row, Row]]:
    """Yield rows with each of their pictures and videos that are not in the network; an answer shows none."""
    for row in rows:
        for message in () if isinstance(row["prompt"], str) else row["prompt"]:
            for part in parts_of(message["content"]):
                if part["type"] != "text" and not is_remote(part[part["type"]]):
                    yield row, part


def _missing(parts: Iterator[Mapping[str, Any]]) -> Iterator[Problem]:
    kinds = {part["type"] for part in parts}
    for kind, package in (("image", "PIL"), ("video", "av")):
        if kind in kinds:
            yield from missing_package(package, key="data", install=pip_install("cosmos-rl-core[media]"))


def _of_headers(key: str, parts: Sequence[tuple[Row, Row]], data: LLMDataConfig) -> Iterator[Problem]:
    """A problem if no first picture or video can be read, and a note if some cannot."""
    reasons: list[str] = []
    for row, part in parts:
        try:
            with media_errors(part, where=f"[{key}]"):
                read_header(part, limits_of(row, data.media))
        except MediaError as error:
            reasons.append(error.reason)
    if reasons:
        yield Problem(
            key=f"{key}.media",
            wrong=f"{len(reasons)} of the first {len(parts)} pictures and videos cannot be read, such as {reasons[0]}",
            suggestion=f"see {key}.media.root" if len(reasons) == len(parts) else "such rows are dropped",
            is_note=len(reasons) < len(parts),
        )
