"""Reads the pictures and videos of prompts for one model: places and limits of [data.media], and the model's family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosmos_rl_core.errors import MediaError, PromptError
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.media.item import Item, View, VisionFamily, expand, view_of
from cosmos_rl_llm.media.source import decode_picture, decode_video, read_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """A family's processing, with errors that name the row."""

    family: VisionFamily
    limits: MediaSection

    def item(self, part: Mapping[str, Any], *, where: str) -> Item:
        """Read and process a part {"type": "image", "image": ...}. Raises PromptError."""
        kind = part["type"]
        try:
            data = read_bytes(part[kind], self.limits)
            if kind == "image":
                return self.family.image(decode_picture(data, self.limits))
            return self.family.video(decode_video(data, self.limits))
        except MediaError as error:
            raise PromptError(f"{where or 'a row'}: {kind}: {error.reason}") from error

    def expand(self, text: str, items: Sequence[Item], *, where: str) -> str:
        """Write the tokens of each item in place of its placeholder. Raises PromptError."""
        try:
            return expand(text, items, self.family)
        except ValueError as error:
            raise PromptError(f"{where or 'a row'}: {error}") from error

    def view(self, tokens: np.ndarray, items: Sequence[Item], *, where: str) -> View:
        """Return the view of the tokens [L] of an expanded text. Raises PromptError."""
        try:
            return view_of(tokens, items, self.family)
        except ValueError as error:
            raise PromptError(f"{where or 'a row'}: {error}") from error
