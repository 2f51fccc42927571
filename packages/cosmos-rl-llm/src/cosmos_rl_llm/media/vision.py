"""Reads the pictures and videos of prompts for one model: places and limits of [data.media], and the model's family.

A further family is a row of FAMILIES. docs/vision.md lists them; tests/test_vision.py compares each with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.errors import MediaError, UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.media.files import ProcessorFiles
from cosmos_rl_llm.media.item import MediaItem, View, VisionFamily, expand_spans, view_of
from cosmos_rl_llm.media.qwen import QwenVision
from cosmos_rl_llm.media.source import decode_picture, decode_video, limits_of, media_errors, read_bytes
from cosmos_rl_llm.media.tiles import GemmaVision, IdeficsVision, InternVision, LlavaVision

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES: Mapping[str, Callable[[ProcessorFiles, PreTrainedConfig], VisionFamily]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QwenVision.of),
    **dict.fromkeys(("idefics3", "smolvlm"), IdeficsVision.of),
    "internvl": InternVision.of,
    "llava": LlavaVision.of,
    "gemma3": GemmaVision.of,
}
"""By the model_type of a model's configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """A family's processing, with errors that name the row."""

    family: VisionFamily
    limits: MediaSection

    def of_row(self, row: Mapping[str, Any]) -> Vision:
        """Return the vision with the limits of the row's own section, such as [eval.data]."""
        return replace(self, limits=limits_of(row, self.limits))

    def item(self, part: Mapping[str, Any], *, where: str) -> MediaItem:
        """Read and process a part {"type": "image", "image": ...}. Raises MediaError."""
        kind = part["type"]
        with media_errors(part, where=where):
            data = read_bytes(part[kind], self.limits)
            if kind == "image":
                return self.family.image(decode_picture(data, self.limits), self.limits)
            video = decode_video(data, self.limits, self.family.fit(self.limits))
            return self.family.video(video, self.limits)

    def expand(self, spans: Sequence[str], items: Sequence[MediaItem], *, where: str) -> list[str]:
        """Write the tokens of each item in place of its placeholder in the pieces of a chat. Raises MediaError."""
        try:
            return expand_spans(spans, items, self.family)
        except ValueError as error:
            raise MediaError(f"{where or 'a row'}: {error}") from error

    def view(self, tokens: np.ndarray, items: Sequence[MediaItem], *, where: str) -> View:
        """Return the view of the tokens [L] of an expanded text. Raises MediaError."""
        try:
            return view_of(tokens, items, self.family)
        except ValueError as error:
            raise MediaError(f"{where or 'a row'}: {error}") from error


def find_family(source: str, config: PreTrainedConfig) -> VisionFamily:
    """Return the family of a vision-language model.

    Raises UserError for one that is not supported, and for files of the processing that do not fit the model.
    """
    make = FAMILIES.get(config.model_type)
    if make is None:
        raise UserError(
            f"model.path = {source!r}: pictures of {config.model_type} are not supported, only of {', '.join(FAMILIES)}"
        )
    if find_spec("PIL") is None:
        raise UserError(
            f"a vision-language model needs a package that is not installed: {pip_install('cosmos-rl-core[media]')}"
        )
    return make(ProcessorFiles.read(source, kind=config.model_type), config)
